"""The study: each contender's error against softmax, over features, length and logits; its time and its bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from phistate.diagnostics import Comparison, compare
from phistate.ops.softmax_attention import softmax_attention
from phistate.study import contenders as c
from phistate.study.inputs import Inputs, gaussian

SOFTMAX = "softmax"
SHORTEST = 64
"""The shortest sequence of the curve over lengths."""

_LAST_QUERIES = 32  # how many queries at the end of a sequence stand for it
_ROUNDS, _ROUNDS_TAKE = 3, 0.2  # a call is timed so often at least, and for so many seconds
_FLOAT32 = 4
_SEED_STRIDE = 1_000_003  # a prime, so that (seed, draw, head) never share a draw


@dataclass(frozen=True)
class Figures:
    """One contender against softmax, over the last queries of a sequence, all heads and draws."""

    error: float
    """√(Σ‖ô−o‖² / Σ‖o‖²), o softmax's output."""
    delta: float
    """Median |δ|, δ the denominator's relative error."""
    spread: float
    """Median sd_p(ε), ε the kernel's relative error on a key."""
    relative_spread: float
    """Median sd_p(ε)/|1+δ|: how wrong the weights are, whatever the denominator."""
    kl: float
    """Median KL(p‖p̂), in nats; inf where half of the queries lose a key altogether."""
    top1: float
    """Share of queries whose heaviest key is softmax's."""
    negative: float
    """Share of queries whose denominator is not positive."""


@dataclass(frozen=True)
class Point:
    """Figures of a contender somewhere on a curve."""

    name: str
    label: str
    budget: int
    features: int
    length: int
    logit_std: float
    figures: Figures


@dataclass(frozen=True)
class Cost:
    """What a contender takes at the study's budget and length."""

    name: str
    seconds: float
    """Least of several runs of one layer's attention, float32, batch 1."""
    state_bytes: int


@dataclass
class Study:
    """Everything a study found."""

    source: str
    head_dim: int
    heads: int
    kv_heads: int
    length: int
    logit_std: float
    budget: int
    draws: int
    seed: int
    too_small: Mapping[str, int]
    """Maps left out of the table because even their smallest needs more features than the budget, and how many."""
    table: list[Point] = field(default_factory=list)
    """At the study's budget and length."""
    over_features: list[Point] = field(default_factory=list)
    over_length: list[Point] = field(default_factory=list)
    over_logits: list[Point] = field(default_factory=list)
    """Gaussian inputs only."""
    costs: list[Cost] = field(default_factory=list)
    threads: int = 1
    seconds: float = 0.0

    def cost(self, name: str) -> Cost:
        """Of softmax or a contender."""
        return next(cost for cost in self.costs if cost.name == name)

    def to_json(self) -> dict[str, object]:
        """JSON values; null stands for what is infinite or undefined."""
        found = _plain(asdict(self))
        assert isinstance(found, dict)
        return found


Step = Callable[[str], None]


def study(
    inputs: Inputs,
    *,
    names: Sequence[str] | None = None,
    budget: int = 256,
    budgets: Sequence[int] | None = None,
    logit_stds: Sequence[float] = (),
    draws: int = 3,
    seed: int = 0,
    step: Step = lambda doing: None,
) -> Study:
    """Every contender on the same inputs.

    Errors are those of the last queries of a causal sequence, against exact softmax, in float64. Random maps are drawn
    anew for every head and draw, and fitted ones are fitted to each key head's own sample.

    Args:
        inputs: from `gaussian`, or a model's.
        names: contenders; None: all.
        budget: features for the table and for the curves over length and logits.
        budgets: features for the curve over features; None: ⅛ to 4 times ``budget``.
        logit_stds: deviations for the curve over logits, each of a Gaussian of the inputs' shape.
        draws: of random maps.
        seed: of everything random.
        step: told what is worked on, once for each of `steps`.

    Raises:
        ValueError: a budget or number of draws below 1, a name that takes no part.
    """
    began = time.perf_counter()
    if budget < 1:
        raise ValueError(f"budget: got {budget}; takes an integer ≥ 1")
    if draws < 1:
        raise ValueError(f"draws: got {draws}; takes an integer ≥ 1")
    taking_part = c.contender_names() if names is None else tuple(dict.fromkeys(names))
    sizes = default_budgets(budget) if budgets is None else sorted(set(budgets))
    lengths = [n for n in _lengths(inputs.length) if n > 1]
    bench = _Bench(inputs, draws, seed)
    kv_heads, value_dim = inputs.k.shape[2], inputs.v.shape[-1]
    found = Study(
        source=inputs.source,
        head_dim=inputs.head_dim,
        heads=inputs.q.shape[2],
        kv_heads=kv_heads,
        length=inputs.length,
        logit_std=inputs.logit_std,
        budget=budget,
        draws=draws,
        seed=seed,
        too_small={},
        threads=torch.get_num_threads(),
    )
    too_small: dict[str, int] = {}
    with torch.inference_mode():
        exact = time_attention(lambda q, k, v: softmax_attention(q, k, v, scale=inputs.scale), inputs)
        kept = inputs.length * kv_heads * (inputs.head_dim + value_dim) * _FLOAT32
        found.costs.append(Cost(SOFTMAX, exact, kept))
    for name in taking_part:
        step(name)
        main = bench.points(name, budget, lengths)
        if not main:
            too_small[name] = bench.smallest(name, budget)
        else:
            found.over_length += main
            found.table.append(main[-1])
            found.costs.append(bench.cost(name, budget))
        seen: set[str] = set()
        for size in sizes:
            points = main[-1:] if size == budget else bench.points(name, size, lengths[-1:])
            # A map of a fixed size is one point, not a line.
            fresh = [p for p in points if f"{p.features} {p.label}" not in seen]
            seen |= {f"{p.features} {p.label}" for p in fresh}
            found.over_features += fresh
    for std in logit_stds:
        step(f"logits {std:g}")
        drawn = gaussian(length=inputs.length, head_dim=inputs.head_dim, logit_std=std, heads=kv_heads, seed=seed)
        other = _Bench(drawn, draws, seed)
        for name in taking_part:
            found.over_logits += [
                Point(**{**vars(p), "logit_std": std}) for p in other.points(name, budget, lengths[-1:])
            ]
    found.too_small = too_small
    found.seconds = time.perf_counter() - began
    return found


def steps(names: Sequence[str] | None, logit_stds: Sequence[float]) -> int:
    """How often `study` calls ``step``."""
    return len(c.contender_names() if names is None else set(names)) + len(logit_stds)


def default_budgets(budget: int) -> list[int]:
    """⅛ to 4 times the budget, by factors of two.

    Example:
        >>> default_budgets(256)
        [32, 64, 128, 256, 512, 1024]
    """
    return sorted({max(1, budget * 2**n // 8) for n in range(6)})


def time_attention(attend: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: Inputs) -> float:
    """The least of several runs after one that warms up: what others do on the machine only adds."""
    attend(inputs.q, inputs.k, inputs.v)
    took: list[float] = []
    while len(took) < _ROUNDS or sum(took) < _ROUNDS_TAKE:
        start = time.perf_counter()
        attend(inputs.q, inputs.k, inputs.v)
        took.append(time.perf_counter() - start)
    return min(took)


@dataclass
class _Bench:
    """Contenders on one set of inputs."""

    inputs: Inputs
    draws: int
    seed: int

    def points(self, name: str, budget: int, lengths: Sequence[int]) -> list[Point]:
        """One for each length, of the queries at its end; none where the map does not fit the budget."""
        inputs = self.inputs
        heads = inputs.k.shape[2]
        groups = inputs.q.shape[2] // heads
        parts: list[Comparison] = []
        at = sorted({t for n in lengths for t in range(max(0, n - _LAST_QUERIES), n)})
        queries = torch.tensor(at)
        for draw in range(self.draws if c.is_random(name) else 1):
            for head in range(heads):
                mine = slice(head * groups, (head + 1) * groups)
                fit = (inputs.fit_q[:, :, mine], inputs.fit_k[:, :, head : head + 1])
                made = self._make(name, budget, draw * heads + head, fit)
                if made is None:
                    return []
                parts.append(
                    compare(
                        inputs.q[:, :, mine],
                        inputs.k[:, :, head : head + 1],
                        inputs.v[:, :, head : head + 1],
                        made.kernel,
                        scale=inputs.scale,
                        queries=queries,
                    )
                )
        assert made is not None
        place = {t: n for n, t in enumerate(at)}
        return [
            Point(
                name,
                made.label,
                budget,
                made.features,
                length,
                inputs.logit_std,
                _figures(parts, [place[t] for t in range(max(0, length - _LAST_QUERIES), length)]),
            )
            for length in lengths
        ]

    def cost(self, name: str, budget: int) -> Cost:
        """Time and bytes of the whole layer."""
        made = self._make(name, budget, 0, (self.inputs.fit_q, self.inputs.fit_k))
        assert made is not None
        with torch.inference_mode():
            return Cost(name, time_attention(made.attend, self.inputs), made.state_bytes)

    def smallest(self, name: str, budget: int) -> int:
        """How many features the smallest of a map has that does not fit the budget."""
        # Every map that can be too large has a smallest of at most C(D+2, 2) features.
        for size in range(budget + 1, (self.inputs.head_dim + 1) * (self.inputs.head_dim + 2) // 2 + 1):
            if (made := self._make(name, size, 0, (self.inputs.fit_q, self.inputs.fit_k))) is not None:
                return made.features
        raise AssertionError(f"{name} fits no budget")

    def _make(self, name: str, budget: int, draw: int, fit: tuple[Tensor, Tensor]) -> c.Contender | None:
        inputs = self.inputs
        return c.make(
            name,
            budget,
            head_dim=inputs.head_dim,
            value_dim=inputs.v.shape[-1],
            kv_heads=inputs.k.shape[2],
            scale=inputs.scale,
            length=inputs.length,
            seed=self.seed * _SEED_STRIDE + draw,
            fit=fit,
        )


def _figures(parts: Sequence[Comparison], rows: Sequence[int]) -> Figures:
    def of(name: str) -> Tensor:
        return torch.cat([getattr(part, name)[:, rows].flatten() for part in parts])

    def median(values: Tensor) -> float:
        return float(values.median())

    return Figures(
        error=float((of("output_error_norm").square().sum() / of("output_norm").square().sum()).sqrt()),
        delta=median(of("delta").abs()),
        spread=median(of("spread")),
        relative_spread=median(of("relative_spread")),
        kl=median(of("kl")),
        top1=float(of("top1").mean()),
        negative=float((of("denominator_ratio") <= 0).double().mean()),
    )


def _lengths(longest: int) -> list[int]:
    """Powers of two from `SHORTEST`, and the longest."""
    lengths, length = [longest], SHORTEST
    while length < longest:
        lengths.append(length)
        length *= 2
    return sorted(lengths)


def _plain(value: object) -> object:
    """JSON has no infinity and no NaN."""
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value
