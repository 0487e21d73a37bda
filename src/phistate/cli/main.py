"""The command's entry: its subcommands, and one line on bad input."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from phistate import __version__
from phistate.cli.audit import audit
from phistate.cli.bench import bench
from phistate.cli.features import features
from phistate.cli.info import info

app = typer.Typer(
    name="phistate",
    help="Attention as a kernel, history as a state: linear attention that tells you what it costs.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(audit)
app.command()(features)
app.add_typer(bench)
app.command()(info)

# Typer gives its usage errors no public name, and their home changed when it took click in.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """What every subcommand shares."""
    if version:
        typer.echo(__version__)
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _told(error: Exception) -> str:
    """What a usage error says; ours name their argument themselves, typer's know it."""
    if isinstance(error, typer.BadParameter) and error.param is not None:
        return error.format_message()
    return error.message if isinstance(error, typer.BadParameter) else str(error)


def main() -> None:
    """Run the command; bad input is one line on stderr and exit code 2."""
    try:
        code = app(standalone_mode=False)
    except _UsageError as error:
        typer.echo(f"phistate: {' '.join(_told(error).split())}", err=True)
        code = 2
    except typer.Abort:
        typer.echo("phistate: stopped", err=True)
        code = 130
    sys.exit(code)
