"""An audit in a terminal: three tables and three sentences."""

from __future__ import annotations

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from phistate.audit.interventions import Price
from phistate.audit.plan import counts
from phistate.audit.report import Report, short, size, threads
from phistate.audit.timing import SOFTMAX

_WIDE = 96  # columns that the plans of thirty layers take with their standard errors
_BESIDE, _PRICE = 24, 9  # columns that a price's companions take, and a price


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
    console.print(prices(report, console.width))
    console.print(plans(report, errors=console.width >= _WIDE))
    console.print(times(report))
    console.print()
    for sentence in report.verdict():
        console.print(f"• {sentence}", highlight=False)
    took = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in report.seconds.items())
    console.print(f"[dim]{sum(report.seconds.values()):.0f} s: {took}[/dim]", highlight=False)


def prices(report: Report, width: int) -> Group:
    """What replacing one layer costs, by each candidate; the cheapest marked, and what its kernel gets wrong.

    Args:
        report: what the audit found.
        width: columns of the terminal; more candidates than fit go on in a second table.
    """
    at_once = max(1, (width - _BESIDE) // _PRICE)
    parts = [report.labels[n : n + at_once] for n in range(0, len(report.labels), at_once)]
    of_map = "; ° cheapest linear map, medians of its |δ| and sd ε" if report.maps else ", medians of its |δ| and sd ε"
    title = f"Price of one layer, nats per token (* cheapest{of_map})"
    return Group(*(_under(title if n == 0 else "", _prices(report, part)) for n, part in enumerate(parts)))


def _prices(report: Report, labels: list[str]) -> Table:
    """The prices of some candidates."""
    table = _table()
    headings: list[Text | str] = ["layer", "entropy", *map(_heading, labels), "|δ|", "sd ε\n÷1+δ"]
    for heading in headings:
        table.add_column(heading, justify="right", vertical="bottom")
    told = report.maps or report.labels
    for layer in report.layers:
        cheapest, cheapest_map = layer.cheapest, layer.cheapest_of(told)
        marks = {cheapest_map: "°", cheapest: "*"} if report.maps else {cheapest: "*"}
        figures = layer.candidates[cheapest_map].figures
        table.add_row(
            str(layer.index),
            _plain(layer.softmax["entropy"]),
            *(_cell(layer.candidates[label].price.cost, marks.get(label, " "), report.threshold) for label in labels),
            _plain(figures["delta_median"]),
            _plain(figures["relative_spread_median"]),
        )
    return table


def plans(report: Report, *, errors: bool = True) -> Group:
    """What replacing the n cheapest layers together costs, on text not used for choosing them.

    Args:
        report: what the audit found.
        errors: show standard errors too, for which 80 columns are too few.
    """
    table = _table()
    table.add_column("n")
    steps = counts(len(report.layers))
    for count in steps:
        table.add_column(str(count), justify="right")
    for name in dict.fromkeys(measured.plan.name for measured in report.plans):
        found = [report.plan(name, count) for count in steps]
        if all(found):
            table.add_row(short(name), *(_sum(m.price, errors) for m in found if m))
    how = " (± standard error)" if errors else ""
    return _under(f"Price of the n cheapest layers together, nats per token of other text{how}", table)


def times(report: Report) -> Group:
    """Time of one layer's attention by length, and what decoding keeps."""
    lengths = list(report.timing(SOFTMAX).seconds)
    table = _table()
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
    notes = [f"linear maps by the {' and '.join(sorted(backends))} backend"] if backends else []
    if any(seconds is None for timing in report.timings for seconds in timing.seconds.values()):
        notes.append("– not within the time budget")
    title = f"One layer's attention here, ms ({'; '.join([threads(report.threads) + ', float32', *notes])})"
    return _under(title, table)


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)


def _under(title: str, table: Table) -> Group:
    """A title may be wider than its table, which a table's own may not."""
    return Group(Text(f"\n{title}", style="italic"), table)


def _heading(label: str) -> Text:
    """The name, and below it the options' values: a column has to be narrow."""
    name, _, values = short(label).partition(" ")
    return Text(f"{name}\n{values}" if values else name, justify="right")


def _cell(cost: float, mark: str, threshold: float) -> Text:
    return Text(f"{cost:+.3f}{mark}", style="" if mark == " " else "bold green" if cost < threshold else "bold")


def _sum(price: Price, errors: bool) -> str:
    return f"{price.cost:+.3f} ±{price.standard_error:.3f}" if errors else f"{price.cost:+.3f}"


def _plain(value: float | None) -> str:
    """Two digits of what is not negative, or ∞ for what JSON has no number for."""
    if value is None:
        return "∞"
    if value == 0 or 0.01 <= value < 100:
        return f"{value:.2g}"
    return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e") if value < 0.01 or value >= 1000 else f"{value:.0f}"


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{1000 * seconds:.3g}" if seconds < 1 else f"{1000 * seconds:.0f}"


def _partial(report: Report) -> bool:
    return len(report.layers) < report.all_layers
