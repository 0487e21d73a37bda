"""An audit in a terminal: three tables and three sentences."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from phistate.audit.plan import counts
from phistate.audit.report import LayerReport, Report, short, size
from phistate.audit.timing import SOFTMAX


def render(report: Report, console: Console) -> None:
    """Print the audit.

    Args:
        report: what `phistate.audit.run.audit` found.
        console: where to.
    """
    layers = f"{report.all_layers} layers" + (f", {len(report.layers)} looked at" if _partial(report) else "")
    shape = report.shape
    console.print(
        f"[bold]{report.model}[/bold]  {report.parameters / 1e6:.0f} M parameters, {layers}, {shape.heads} query and "
        f"{shape.kv_heads} key heads of {shape.head_dim}; {report.length} tokens of {report.source}, "
        f"loss {report.loss_choose:.3f} nats",
        highlight=False,
    )
    console.print(prices(report))
    console.print(plans(report))
    console.print(times(report))
    for sentence in report.verdict():
        console.print(f"• {sentence}", highlight=False)
    took = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in report.seconds.items())
    console.print(f"[dim]{sum(report.seconds.values()):.0f} s: {took}[/dim]", highlight=False)


def prices(report: Report) -> Table:
    """What replacing one layer costs, by each candidate; the cheapest marked."""
    table = _table("Price of one layer, nats per token (* cheapest; |δ|, sd ε: its medians)")
    table.add_column("layer", justify="right")
    table.add_column("entropy", justify="right")
    for label in report.labels:
        table.add_column(_heading(label), justify="right")
    table.add_column("|δ|", justify="right")
    table.add_column("sd ε", justify="right")
    for layer in report.layers:
        best = layer.candidates[layer.cheapest].figures
        table.add_row(
            str(layer.index),
            _plain(layer.softmax["entropy"]),
            *(_cell(layer, label, report.threshold) for label in report.labels),
            _plain(best["delta_median"]),
            _plain(best["spread_median"]),
        )
    return table


def plans(report: Report) -> Table:
    """What replacing the n cheapest layers together costs, on text not used for choosing them."""
    table = _table("Price of the n cheapest layers together, on other text (± standard error)")
    table.add_column("n")
    steps = counts(len(report.layers))
    for count in steps:
        table.add_column(str(count), justify="right")
    for name in dict.fromkeys(measured.plan.name for measured in report.plans):
        found = [report.plan(name, count) for count in steps]
        if all(found):
            table.add_row(short(name), *(f"{m.price.cost:+.3f} ±{m.price.standard_error:.3f}" for m in found if m))
    return table


def times(report: Report) -> Table:
    """Time of one layer's attention by length, and what decoding keeps."""
    lengths = list(report.timing(SOFTMAX).seconds)
    table = _table(f"One layer's attention here, ms ({report.threads} threads, float32, batch 1)")
    table.add_column("tokens")
    for length in lengths:
        table.add_column(str(length), justify="right")
    table.add_column("faster\nfrom", justify="right", vertical="bottom")
    table.add_column(f"kept at\n{lengths[-1]}", justify="right", vertical="bottom")
    for timing in report.timings:
        table.add_row(
            short(timing.label),
            *(_milliseconds(timing.seconds[length]) for length in lengths),
            "" if timing.label == SOFTMAX else "never" if timing.crossover is None else str(timing.crossover),
            size(timing.memory[lengths[-1]]),
        )
    backends = {timing.backend for timing in report.timings if timing.label not in (SOFTMAX, *report.baselines)}
    if backends:
        table.caption = f"linear maps by the {' and '.join(sorted(backends))} backend; – not within the time budget"
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))


def _heading(label: str) -> Text:
    """The name, and below it the options' values: a column has to be narrow."""
    name, _, values = short(label).partition(" ")
    return Text(f"{name}\n{values}" if values else name, justify="right")


def _cell(layer: LayerReport, label: str, threshold: float) -> Text:
    cost = layer.candidates[label].price.cost
    cheapest = label == layer.cheapest
    style = "bold green" if cheapest and cost < threshold else "bold" if cheapest else ""
    return Text(f"{cost:+.4f}" + ("*" if cheapest else " "), style=style)


def _plain(value: float | None) -> str:
    """Three digits, or ∞ for what JSON has no number for."""
    if value is None:
        return "∞"
    return f"{value:.2f}" if 0.01 <= abs(value) < 1000 else f"{value:.0e}" if value else "0"


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{1000 * seconds:.3g}" if seconds < 1 else f"{1000 * seconds:.0f}"


def _partial(report: Report) -> bool:
    return len(report.layers) < report.all_layers
