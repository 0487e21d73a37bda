"""``phistate bench model``: a whole hybrid model with and without accelerate()."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from phistate.bench.fla import Own
    from phistate.bench.model import Comparison


def model(
    name: Annotated[
        str, typer.Argument(help="A family (--list shows them), or the directory or file of a transformers config.")
    ] = "qwen3_5",
    layers: Annotated[int, typer.Option(help="Layers of a family's model.", min=1)] = 8,
    width: Annotated[int, typer.Option(help="Its hidden size, a multiple of the head.", min=1)] = 768,
    head: Annotated[int, typer.Option(help="Dimension of a head.", min=1)] = 128,
    state: Annotated[int, typer.Option(help="Columns of a Mamba-2 state; Mamba-1 has at most 16.", min=1)] = 128,
    vocab: Annotated[int, typer.Option(help="Size of the vocabulary.", min=8)] = 32768,
    length: Annotated[int, typer.Option(help="Tokens of the prompt.", min=1)] = 2048,
    new_tokens: Annotated[int, typer.Option(help="Tokens generated after it.", min=1)] = 32,
    rounds: Annotated[int, typer.Option(help="How often each side is measured, by turns.", min=1)] = 3,
    threads: Annotated[int | None, typer.Option(help="Torch's threads. None: all cores.", min=1)] = None,
    memory: Annotated[bool, typer.Option(help="Measure the peak of memory too, in processes of their own.")] = True,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures as JSON.", show_default=False)
    ] = None,
    list_families: Annotated[bool, typer.Option("--list", help="List the families; measure nothing.")] = False,
) -> None:
    """Prefill and decode rates of a random-weight model, with and without accelerate().

    Families whose names begin with "fla." are flash-linear-attention's own. Nothing else runs them on a CPU, so they
    stand beside the very operators they run, called directly.
    """
    import importlib.util

    from rich.console import Console

    if importlib.util.find_spec("transformers") is None:
        raise typer.BadParameter("transformers is not installed; pip install 'phistate[models]'")
    from phistate.bench.families import FAMILIES, Size
    from phistate.bench.fla_families import FLA_FAMILIES

    if list_families:
        typer.echo("\n".join((*FAMILIES, *FLA_FAMILIES)))
        return
    if json_file is not None and not json_file.parent.is_dir():
        raise typer.BadParameter(f"--json: got {str(json_file)!r}; takes a file in a folder that exists")
    if width % head:
        raise typer.BadParameter(f"--width: got {width}; takes a multiple of --head = {head}")
    family = name.replace("-", "_")
    of_fla = family in FLA_FAMILIES
    if of_fla and importlib.util.find_spec("fla") is None:
        raise typer.BadParameter("flash-linear-attention is not installed; pip install 'phistate[fla]'")
    import torch
    import transformers

    from phistate.bench.fla import measure
    from phistate.bench.model import compare

    if threads is not None:
        torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    family = family if family in FAMILIES or of_fla else name
    size = Size(layers=layers, width=width, head=head, state=state, vocab=vocab)
    errors = Console(stderr=True)
    try:
        with errors.status("starting") as status:
            if of_fla:
                own = measure(family, size, length=length, rounds=rounds, progress=status.update)
                figures, shown, said = _of_fla(own)
            else:
                compared = compare(
                    family,
                    size,
                    length=length,
                    new_tokens=new_tokens,
                    rounds=rounds,
                    memory=memory,
                    progress=status.update,
                )
                figures, shown, said = _of_transformers(compared)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if json_file is not None:
        scratch = json_file.with_name(f".{json_file.name}.partial")
        scratch.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        scratch.replace(json_file)
    console = Console()
    console.print(shown)
    console.print(said, highlight=False)


def _of_transformers(result: Comparison) -> tuple[dict[str, object], object, str]:
    figures = dataclasses.asdict(result)
    figures |= {"prefill_ratio": result.prefill_ratio, "decode_ratio": result.decode_ratio}
    share = "" if result.share is None else f"phistate's functions take {100 * result.share:.1f} % of the prefill; "
    said = f"{share}the last logits differ by {result.difference:.1e} of the largest. Replaced: "
    return figures, table(result), f"{said}{', '.join(result.replaced)}."


def _of_fla(result: Own) -> tuple[dict[str, object], object, str]:
    figures = dataclasses.asdict(result)
    figures |= {name: getattr(result, name) for name in ("overhead", "share", "backward_ratio")}
    return figures, own_table(result), f"phistate's operators take {100 * result.share:.1f} % of the prefill."


def table(result: Comparison) -> object:
    """The figures of both sides, one column each."""
    from rich import box
    from rich.table import Table

    shown = Table(title=_title(result), title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("", "transformers", "accelerated", "ratio"):
        shown.add_column(heading, justify="left" if not heading else "right")
    plain, fast = result.plain, result.fast
    shown.add_row(
        f"prefill of {result.length}, tokens/s",
        f"{result.length / plain.prefill:.0f}",
        f"{result.length / fast.prefill:.0f}",
        f"{result.prefill_ratio:.2f}",
    )
    shown.add_row(
        f"decode of {result.new_tokens}, tokens/s",
        f"{1 / plain.decode:.1f}",
        f"{1 / fast.decode:.1f}",
        f"{result.decode_ratio:.2f}",
    )
    if plain.peak is not None and fast.peak is not None:
        shown.add_row(
            "prefill's peak beside the model, MiB",
            f"{plain.peak / 2**20:.0f}",
            f"{fast.peak / 2**20:.0f}",
            f"{plain.peak / fast.peak:.2f}" if fast.peak else "-",
        )
    return shown


def own_table(result: Own) -> object:
    """What fla's model takes, and its operators by themselves."""
    from rich import box
    from rich.table import Table

    shown = Table(title=_title(result), title_justify="left", box=box.SIMPLE_HEAD, min_width=80)
    for heading in ("", "seconds", "ratio"):
        shown.add_column(heading, justify="left" if not heading else "right")
    shown.add_row(f"prefill of {result.length}", f"{result.prefill:.3f}", f"{result.overhead:.2f}")
    shown.add_row("its operators, called directly", f"{result.direct:.3f}", "1")
    shown.add_row("forward, with a loss", f"{result.forward:.3f}", "1")
    shown.add_row("forward and backward", f"{result.backward:.3f}", f"{result.backward_ratio:.2f}")
    return shown


def _title(result: Own | Comparison) -> str:
    cores = f"{result.threads} thread{'s' if result.threads > 1 else ''}"
    return f"{result.model}, {result.parameters / 1e6:.0f} M parameters, float32, batch 1, {cores}"
