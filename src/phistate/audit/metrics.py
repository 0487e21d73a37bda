"""What a candidate does to one layer's attention, told in a few numbers per layer and per head."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from phistate.audit.candidates import Mixing
from phistate.audit.capture import Inputs
from phistate.diagnostics import Comparison, compare, effective_rank, evenly_spaced

Numbers = dict[str, float | None]
"""Figures by name; None where the figure is infinite or cannot be told."""

MAX_QUERIES = 512
"""Queries looked at in one layer: all of a short sequence, evenly spaced ones of a long one."""
_RANK_QUERIES = 128

_FIGURES: dict[str, Callable[[Comparison], Tensor]] = {
    "delta_median": lambda rows: _median(rows.delta.abs()),
    "delta_p95": lambda rows: _quantile(rows.delta.abs(), 0.95),
    "spread_median": lambda rows: _median(rows.spread),
    "relative_spread_median": lambda rows: _median(rows.relative_spread),
    "output_error": lambda rows: (rows.output_error_norm.square().sum(0) / rows.output_norm.square().sum(0)).sqrt(),
    "total_variation": lambda rows: rows.total_variation.mean(0),
    "kl": lambda rows: rows.kl.masked_fill(rows.kl.isinf(), math.nan).nanmean(0),
    "kl_infinite": lambda rows: rows.kl.isinf().double().mean(0),
    "top1": lambda rows: rows.top1.mean(0),
    "negative_share": lambda rows: rows.negative_share.mean(0),
    "denominator_ratio_min": lambda rows: rows.denominator_ratio.amin(0),
}
"""Each figure of `Comparison` rows, over the first dimension."""


def softmax_figures(inputs: Inputs) -> tuple[Numbers, list[Numbers]]:
    """Of softmax itself: ``entropy`` (mean over queries, nats) and ``effective_rank``; the layer's, each
    head's."""
    length = inputs.q.shape[1]
    rows = compare(
        inputs.q, inputs.k, inputs.v, lambda logits, queries, keys: logits, scale=inputs.scale, queries=_queries(length)
    )
    entropy = rows.entropy.mean((0, 1))
    rank = effective_rank(inputs.q, inputs.k, scale=inputs.scale, queries=evenly_spaced(length, _RANK_QUERIES)).mean(0)
    heads: list[Numbers] = [
        {"entropy": number(e), "effective_rank": number(r)} for e, r in zip(entropy, rank, strict=True)
    ]
    return {"entropy": number(entropy.mean()), "effective_rank": number(rank.mean())}, heads


def candidate_figures(inputs: Inputs, mixing: Mixing) -> tuple[Numbers, list[Numbers]]:
    """Of a candidate against softmax, the layer's and each head's; the names are those of
    `phistate.diagnostics`.

    ``delta_median`` and ``delta_p95`` are of |δ|; ``spread_median`` is of sd_p(ε),
    ``relative_spread_median`` of sd_p(ε)/|1 + δ|; ``output_error`` is √(Σ‖ô − o‖²/Σ‖o‖²); ``kl`` is the mean
    over the rows where it is finite and ``kl_infinite`` the share of those where it is not; the rest are
    means, ``denominator_ratio_min`` the least.
    """
    rows = compare(
        inputs.q,
        inputs.k,
        inputs.v,
        mixing.kernel,
        scale=inputs.scale,
        queries=_queries(inputs.q.shape[1]),
    )
    layer: Numbers = {}
    heads: list[Numbers] = [{} for _ in range(inputs.q.shape[2])]
    together = _flatten(rows, 3)
    apart = _flatten(rows, 2)
    for name, figure in _FIGURES.items():
        layer[name] = number(figure(together))
        for head, value in zip(heads, figure(apart), strict=True):
            head[name] = number(value)
    return layer, heads


def number(value: Tensor) -> float | None:
    """A float, or None for what JSON cannot say: infinite or undefined."""
    found = float(value)
    return found if math.isfinite(found) else None


def _queries(length: int) -> Tensor:
    return evenly_spaced(length, MAX_QUERIES)


def _flatten(rows: Comparison, dims: int) -> Comparison:
    """All rows along the first dimension: of the layer (3 dimensions together) or of each head (2)."""
    return Comparison(*(getattr(rows, name).flatten(0, dims - 1) for name in Comparison.__dataclass_fields__))


def _median(values: Tensor) -> Tensor:
    return _quantile(values, 0.5)


def _quantile(values: Tensor, q: float) -> Tensor:
    """The value at rank q, one that occurs: interpolation would turn ∞ − ∞ into NaN."""
    return torch.quantile(values, q, dim=0, interpolation="nearest")
