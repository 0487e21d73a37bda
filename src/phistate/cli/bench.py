"""``phistate bench``: how fast the ops are here, beside what else runs them, and against what the machine can do."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from phistate.cli.bench_model import model

if TYPE_CHECKING:
    from phistate.bench.cases import Case
    from phistate.bench.render import Results

_PAGE = 180
"""Columns of a table that goes to a file or a pipe: enough for every cell on one line."""

bench = typer.Typer(name="bench", help="Measure the ops beside their peers.", no_args_is_help=True)


bench.command()(model)


@bench.callback()
def _group() -> None:
    """Measure the ops beside their peers."""


@bench.command()
def ops(
    case: Annotated[
        list[str] | None,
        typer.Option(help="Cases whose name holds this, or matches it as a glob; may be repeated. None: all."),
    ] = None,
    threads: Annotated[
        str | None,
        typer.Option(help="Numbers of threads, such as 1,2. None: one, and all cores.", show_default=False),
    ] = None,
    seconds: Annotated[float, typer.Option(help="How long each row is measured at least.")] = 1.0,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write machine, limits and rows as JSON.", show_default=False),
    ] = None,
    markdown_file: Annotated[
        Path | None,
        typer.Option("--markdown", metavar="FILE", help="Write the page docs/benchmarks.md is.", show_default=False),
    ] = None,
    from_file: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="Show an earlier run's JSON; measure nothing.", show_default=False),
    ] = None,
    list_cases: Annotated[bool, typer.Option("--list", help="List the cases and their bars; measure nothing.")] = False,
) -> None:
    """Measure each case beside its peers: times, ratio, errors, and the share of the machine's limit."""
    from rich.console import Console

    from phistate.bench import cases, machine
    from phistate.bench.render import remarks, summary, table

    if not (seconds >= 0 and math.isfinite(seconds)):
        _refuse(f"--seconds: got {seconds}; takes a number ≥ 0")
    numbers = [*dict.fromkeys((1, machine.cores()))] if threads is None else _threads(threads)
    for option, path in (("--json", json_file), ("--markdown", markdown_file)):
        _check_target(option, path)
    try:
        found = cases.select(case or [])
    except ValueError as error:
        _refuse(f"--{error}")
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PAGE)
    if list_cases:
        console.print(_listing(found))
        return
    results = _measure(found, numbers, seconds) if from_file is None else _read(from_file)
    if json_file is not None:
        _write("--json", json_file, json.dumps(results.to_json(), indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    if markdown_file is not None:
        from phistate.bench.render import markdown

        _write("--markdown", markdown_file, markdown(results))
    for limits in results.limits:
        rows = [row for row in results.rows if row.threads == limits.threads]
        console.print(table(limits.threads, rows))
        for remark in remarks(rows):
            console.print(f"• {remark}", style="dim", highlight=False, markup=False)
    console.print(summary(results.rows), highlight=False)


def _measure(found: list[Case], numbers: list[int], seconds: float) -> Results:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from phistate.bench import limits, machine, runner
    from phistate.bench.render import Results

    columns = (TextColumn("{task.description:<32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    load = machine.load()
    rows: list[runner.Row] = []
    measured: list[limits.Limits] = []
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("limits", total=len(found) * len(numbers))
        for count in numbers:
            progress.update(task, description="limits")
            measured.append(limits.measure(count))
            for one in found:
                description = f"{one.name}, {count} thread{'s' if count > 1 else ''}"
                progress.update(task, description=description)
                if not console.is_terminal:  # a log: a line a case, for a bar is not drawn there
                    console.print(description, highlight=False)
                rows += runner.run(one, count, measured[-1], seconds=seconds)
                progress.advance(task)
    return Results(machine.describe(), measured, rows, load)


def _read(path: Path) -> Results:
    from phistate.bench.render import Results

    try:
        return Results.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError) as error:
        _refuse(f"--from: got {str(path)!r}, which is no JSON of this command ({type(error).__name__}: {error})")


def _listing(found: list[Case]) -> object:
    from rich import box
    from rich.table import Table

    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("case", "run", "dtype", "beside (at most this share of its time)"):
        shown.add_column(name)
    for one in found:
        beside = [a.peer if a.at_most is None else f"{a.peer} {a.at_most:.3g}" for a in one.against]
        if one.share is not None:
            beside.append(f"{100 * one.share:.0f} % of the FMA peak")
        run = one.run if one.measure == "time" else f"{one.measure}, {one.run}"
        shown.add_row(one.name, run, str(one.dtype).removeprefix("torch."), ", ".join(beside))
    return shown


def _threads(text: str) -> list[int]:
    numbers = text.split(",")
    if not all(part.strip().isdecimal() and int(part) >= 1 for part in numbers):
        _refuse(f"--threads: got {text!r}; takes numbers ≥ 1 separated by commas, such as 1,2")
    return [*dict.fromkeys(int(part) for part in numbers)]


def _refuse(message: str) -> NoReturn:
    raise typer.BadParameter(message)


def _check_target(option: str, path: Path | None) -> None:
    """That a file can be written, before minutes are spent on what it is to hold."""
    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        _refuse(f"{option}: got {str(path)!r}; takes a file in a folder that exists and can be written")


def _write(option: str, path: Path, text: str) -> None:
    """All of the file or none of it: written beside its place, then moved there."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(path)
    except OSError as error:
        _refuse(f"{option}: got {str(path)!r}, which cannot be written ({error.strerror})")
    finally:
        scratch.unlink(missing_ok=True)
