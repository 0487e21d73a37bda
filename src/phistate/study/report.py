"""A study to look at: four plots and a table, as HTML or PNG."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from phistate import __version__
from phistate.report import plots
from phistate.report.page import Figure, Grid, Heading, page
from phistate.study.contenders import BASELINES, FAMILIES
from phistate.study.run import SOFTMAX, Point, Study

_COLOURS = {
    "baselines": ("#1d2329",),
    "pointwise": ("#8fb8de", "#5b93c7", "#2f6fab", "#1f4e79", "#7aa6a1", "#3d7a74"),
    "learned, untrained": ("#b9a3d6", "#7e5fb0"),
    "polynomial": ("#9fc16b", "#3f8f29", "#6b7a1e"),
    "positive random": ("#e39a3b", "#c9741a", "#f0b96b", "#d64f2a", "#a52a1a"),
    "signed": ("#d48ab5", "#a83279"),
}
_MARKERS = "os^Dvp"
_LINES = {"uniform": ":", "window": "--"}
_DENOMINATOR = (1e-3, 1e3)  # what the first plot shows; marks beyond lie on its edge
_HOPELESS = 10.0  # an output error that no longer matters: lines beyond leave their plot


def headline(study: Study) -> str:
    """The one thing to know: the best map, and what it does against the baselines."""
    points = [p for p in study.table if math.isfinite(p.figures.error)]
    maps = [p for p in points if p.name not in BASELINES]
    rivals = [p for p in points if p.name in BASELINES]
    if not maps:
        return "No feature map fits the budget."
    best = min(maps, key=lambda p: p.figures.error)
    told = f"{best.label} is closest to softmax with {best.features} features: output error {best.figures.error:.2f}"
    if not rivals:
        return told + "."
    rival = min(rivals, key=lambda p: p.figures.error)
    losing = sum(p.figures.error >= rival.figures.error for p in maps)
    if losing == len(maps):
        baseline = f"best baseline ({rival.label}: output error {rival.figures.error:.2f})"
        return f"No map does better than the {baseline}; the closest is {best.label}, {best.figures.error:.2f}."
    told += f", against {rival.figures.error:.2f} of the best baseline ({rival.label})"
    return f"{told}; {losing} of {len(maps)} maps do no better than that baseline."


def html(study: Study) -> str:
    """The study as a page that stands alone."""
    with plots.style():
        blocks: list[Heading | Figure | Grid] = [
            Heading(
                "The denominator first",
                "Left to right: how wrong the normaliser is. Bottom to top: how wrong the weights are once the "
                "normaliser has been divided out, which is what bounds the output's error. A kernel that errs alike on "
                "every key moves right only, and its output is untouched. Trails run over the budgets; the large mark "
                "is the study's, and on the edge where it lies beyond.",
            ),
            Figure(plots.svg(_alone(_denominator, study)), "sd of the kernel's relative error against |δ|"),
            Heading(
                "Error against features",
                "The output's error relative to softmax's output; 1 is as wrong as no output at all, and what errs by "
                f"more than {_HOPELESS:g} is not shown. A map of a fixed size is a single mark.",
            ),
            Figure(plots.svg(_alone(_over_features, study)), "output error against the number of features"),
            Heading(
                "Error against length",
                f"At a budget of {study.budget} features, for the last queries of ever longer sequences. The window is "
                "exact while it holds them whole, and shown from where it does not.",
            ),
            Figure(plots.svg(_alone(_over_length, study)), "output error against the sequence's length"),
        ]
        if study.over_logits:
            blocks += [
                Heading(
                    "Error against how sharp attention is",
                    "The standard deviation of the logits decides more than anything else which map works.",
                ),
                Figure(plots.svg(_alone(_over_logits, study)), "output error against the logits' standard deviation"),
            ]
    header, rows, strong = table(study)
    blocks += [Heading(f"At most {study.budget} features"), Grid(header, rows, strong)]
    if study.too_small:
        blocks.append(Heading("Left out", left_out(study)))
    return page("Feature maps against softmax", f"{headline(study)} {setting(study)}", blocks, _footer(study))


def png(study: Study) -> bytes:
    """The plots on one sheet."""
    panels = [_denominator, _over_features, _over_length, *([_over_logits] if study.over_logits else [])]
    rows, columns = (2, 2) if len(panels) == 4 else (1, len(panels))
    with plots.style():
        drawn = plots.figure(1.5 + 6.75 * columns, 0.5 + 5.5 * rows)
        drawn.suptitle(f"{headline(study)}\n{setting(study)}", x=0.01, ha="left", fontsize=11, color=plots.INK)
        for panel, axis in zip(panels, drawn.subplots(rows, columns).flatten(), strict=True):
            panel(axis, study)
        _legend(drawn, study)
        return plots.png(drawn)


def setting(study: Study) -> str:
    """What was studied, in a sentence."""
    of = "Gaussian inputs" if study.source == "Gaussian" else study.source
    heads = f"{study.heads} heads" + (f" on {study.kv_heads}" if study.kv_heads != study.heads else "")
    return (
        f"{of[0].upper()}{of[1:]}: {study.length} tokens, {heads} of {study.head_dim}, logits of standard deviation "
        f"{study.logit_std:.2g}."
    )


def left_out(study: Study) -> str:
    """Which maps the budget left out, and what they take."""
    return ", ".join(f"{name} takes {count} features" for name, count in study.too_small.items()) + "."


def table(study: Study) -> tuple[list[str], list[list[str]], frozenset[int]]:
    """Header, rows by error, and the rows of the baselines."""
    header = ["map", "features", "output error", "|δ|", "sd ε", "sd ε/|1+δ|", "KL", "top-1", "Σ ≤ 0", "ms", "state"]
    points = sorted(study.table, key=lambda p: p.figures.error)
    rows = [
        [SOFTMAX, "–", "0", "0", "0", "0", "0", "100%", "0%", *_costs(study, SOFTMAX)],
        *(
            [
                point.label,
                str(point.features) if point.name != "window" else "–",
                _number(point.figures.error),
                _number(point.figures.delta),
                _number(point.figures.spread),
                _number(point.figures.relative_spread),
                _number(point.figures.kl),
                f"{100 * point.figures.top1:.0f}%",
                f"{100 * point.figures.negative:.0f}%",
                *_costs(study, point.name),
            ]
            for point in points
        ),
    ]
    return header, rows, frozenset(n + 1 for n, point in enumerate(points) if point.name in BASELINES)


def _costs(study: Study, name: str) -> list[str]:
    cost = study.cost(name)
    return [f"{1e3 * cost.seconds:.3g}", f"{cost.state_bytes / 1e3:.3g} kB"]


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "∞" if value > 0 else "–"
    if value == 0 or 0.001 <= abs(value) < 100:
        return f"{value:.3f}"
    return f"{value:.1e}"


def _footer(study: Study) -> str:
    return (
        f"phistate {__version__}: {study.draws} draws of every random map, seed {study.seed}; errors in float64 on the "
        f"last queries of a causal sequence; times in float32 on {study.threads} threads, the least of several; "
        f"{study.seconds:.0f} s."
    )


def _alone(panel: Callable[[Any, Study], None], study: Study) -> Any:
    drawn = plots.figure(9.5, 5.6)
    panel(drawn.subplots(), study)
    _legend(drawn, study)
    return drawn


def _looks(name: str) -> dict[str, Any]:
    """Colour by family, marker by place in it."""
    for family in FAMILIES:
        if name in family.members:
            place = family.members.index(name)
            colours = _COLOURS[family.name]
            return {
                "color": colours[place % len(colours)],
                "marker": _MARKERS[place % len(_MARKERS)],
                "linestyle": _LINES.get(name, "-"),
                "zorder": 4 if name in BASELINES else 3,
            }
    raise AssertionError(f"{name} belongs to no family")


def _legend(drawn: Any, study: Study) -> None:
    from matplotlib.lines import Line2D

    present = {p.name for p in (*study.table, *study.over_features)}
    handles: list[Line2D] = []
    titles: list[int] = []
    for family in FAMILIES:
        members = [name for name in family.members if name in present]
        if members:
            titles.append(len(handles))
            handles.append(Line2D([], [], linestyle="", label=family.name))
            handles += [Line2D([], [], label=name, **_looks(name)) for name in members]
    legend = drawn.legend(handles=handles, loc="outside right upper", fontsize=9, handlelength=2.2)
    texts = legend.get_texts()
    for at in titles:
        texts[at].set_fontweight("bold")
        texts[at].set_color(plots.SOFT)


def _denominator(axis: Any, study: Study) -> None:
    for name, points in _by_name(study.over_features):
        looks = _looks(name)
        x, y = _places(points)
        axis.plot(x, y, alpha=0.55, **{**looks, "linewidth": 1.2, "markersize": 3})
    for point in study.table:
        x, y = _places([point])
        axis.plot(x, y, clip_on=False, **{**_looks(point.name), "markersize": 9})
    _logarithmic(axis)
    bottom = min(axis.get_ylim()[0], 0.3)  # room for the words, where hardly anything lies
    axis.set_ylim(bottom=bottom)
    axis.axhspan(bottom, 1, color=plots.RULE, alpha=0.4, zorder=0)
    axis.text(
        0.99,
        0.015,
        "shaded: the output is off by less than the values' own spread",
        transform=axis.transAxes,
        ha="right",
        fontsize=9,
        color=plots.SOFT,
    )
    axis.set_title("The denominator first")
    axis.set_xlabel("|δ|, the denominator's relative error (median)")
    axis.set_ylabel("sd_p(ε)/|1+δ|, the weights' (median)")


def _over_features(axis: Any, study: Study) -> None:
    _lines(axis, study.over_features, lambda p: p.features if p.name != "window" else p.budget)
    axis.set_title("Error against features")
    axis.set_xlabel("features (the window: of a state of as many bytes)")


def _over_length(axis: Any, study: Study) -> None:
    _lines(axis, study.over_length, lambda p: p.length)
    axis.set_title(f"Error against length, {study.budget} features")
    axis.set_xlabel("tokens")


def _over_logits(axis: Any, study: Study) -> None:
    _lines(axis, study.over_logits, lambda p: p.logit_std)
    axis.set_title(f"Error against the logits' spread, {study.budget} features")
    axis.set_xlabel("standard deviation of the logits")


def _lines(axis: Any, points: Sequence[Point], x: Callable[[Point], float]) -> None:
    for name, line in _by_name(points):
        # A logarithm has no place for what is exact.
        along = sorted((p for p in line if p.figures.error > 0), key=x)
        axis.plot([x(p) for p in along], [p.figures.error for p in along], **_looks(name))
    ticks = sorted({x(p) for p in points}) or [1.0]
    shown = [p.figures.error for p in points if 0 < p.figures.error <= _HOPELESS] or [1.0]
    axis.set_xlim(ticks[0] / 1.2, ticks[-1] * 1.2)
    axis.set_ylim(min(shown) / 1.2, max(shown) * 1.2)
    _logarithmic(axis)
    if len(ticks) <= 8:
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_ylabel(f"output error ‖ô−o‖/‖o‖ (up to {_HOPELESS:g})")


def _logarithmic(axis: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_xscale("log")
    axis.set_yscale("log")
    for along in (axis.xaxis, axis.yaxis):
        low, high = along.get_view_interval()
        along.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,)))
        along.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        along.set_minor_locator(NullLocator())


def _by_name(points: Sequence[Point]) -> list[tuple[str, list[Point]]]:
    return [(name, list(line)) for name, line in groupby(sorted(points, key=lambda p: p.name), lambda p: p.name)]


def _places(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    """Where points lie on the first plot."""
    least, largest = _DENOMINATOR

    def within(value: float) -> float:
        return min(max(value, least), largest)

    return [within(p.figures.delta) for p in points], [within(p.figures.relative_spread) for p in points]
