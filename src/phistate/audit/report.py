"""What an audit found: as JSON, and as three sentences that follow from the figures."""

from __future__ import annotations

import math
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from phistate import __version__
from phistate.audit.interventions import Price
from phistate.audit.metrics import Numbers
from phistate.audit.plan import CHEAPEST_MAP, MeasuredPlan, counts
from phistate.audit.timing import SOFTMAX, Shape, Timing


@dataclass(frozen=True)
class CandidateFigures:
    """One candidate in one layer."""

    price: Price
    figures: Numbers
    heads: Sequence[Numbers]


@dataclass(frozen=True)
class LayerReport:
    """One layer: softmax's own figures, and each candidate's by label."""

    index: int
    softmax: Numbers
    heads: Sequence[Numbers]
    candidates: Mapping[str, CandidateFigures]

    @property
    def cheapest(self) -> str:
        """The label of the candidate with the lowest price."""
        return self.cheapest_of(list(self.candidates))

    def cheapest_of(self, labels: Sequence[str]) -> str:
        """The label, of these, with the lowest price."""
        return min(labels, key=lambda label: self.candidates[label].price.cost)


@dataclass(frozen=True)
class Report:
    """Everything an audit found; costs and losses in nats per token, times in seconds, memory in bytes."""

    model: str
    kind: str
    parameters: int
    shape: Shape
    source: str
    length: int
    seed: int
    baselines: Sequence[str]
    all_layers: int
    left_out: Sequence[int]
    """Layers whose attention is not causal softmax over every earlier key."""
    threshold: float
    loss_choose: float
    loss_measure: float
    layers: Sequence[LayerReport]
    plans: Sequence[MeasuredPlan]
    timings: Sequence[Timing]
    threads: int
    seconds: Mapping[str, float]
    """Stage of the audit → how long it took."""

    @property
    def labels(self) -> list[str]:
        """The candidates' labels, as given."""
        return list(self.layers[0].candidates)

    @property
    def maps(self) -> list[str]:
        """The labels of the candidates that are no baselines."""
        return [label for label in self.labels if label not in self.baselines]

    def plan(self, name: str, count: int | None = None) -> MeasuredPlan | None:
        """The measured plan of that name (and number of layers), if there is one."""
        for measured in self.plans:
            if measured.plan.name == name and count in (None, len(measured.plan.replaced)):
                return measured
        return None

    def timing(self, label: str) -> Timing:
        """The timing of softmax or of a candidate."""
        return next(timing for timing in self.timings if timing.label == label)

    def verdict(self) -> list[str]:
        """Three sentences: which layers can go and at what cost, against which baseline, and what that
        buys."""
        return [self._what_goes(), self._against_baseline(), self._what_it_buys()]

    def to_json(self) -> dict[str, object]:
        """The report as JSON values; null stands for what is infinite, undefined or was not measured."""
        return {
            "phistate": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": {"processor": processor(), "threads": self.threads},
            "model": {
                "name": self.model,
                "class": self.kind,
                "parameters": self.parameters,
                "layers": self.all_layers,
                "layers_left_out": list(self.left_out),
                "heads": self.shape.heads,
                "kv_heads": self.shape.kv_heads,
                "head_dim": self.shape.head_dim,
            },
            "text": {"source": self.source, "length": self.length},
            "seed": self.seed,
            "mixers": self.labels,
            "baselines": list(self.baselines),
            "loss": {"choose": self.loss_choose, "measure": self.loss_measure},
            "layers": [
                {
                    "layer": layer.index,
                    "softmax": {**layer.softmax, "heads": list(layer.heads)},
                    "cheapest": layer.cheapest,
                    "candidates": {
                        label: {**_price(found.price), **found.figures, "heads": list(found.heads)}
                        for label, found in layer.candidates.items()
                    },
                }
                for layer in self.layers
            ],
            "plans": [
                {
                    "plan": measured.plan.name,
                    "count": len(measured.plan.replaced),
                    "replaced": {str(layer): label for layer, label in measured.plan.replaced.items()},
                    "sum_of_prices": measured.plan.expected,
                    **_price(measured.price),
                }
                for measured in self.plans
            ],
            "timing": [
                {
                    "mixer": timing.label,
                    "backend": timing.backend,
                    "crossover": timing.crossover,
                    "lengths": [
                        {
                            "length": length,
                            "seconds": seconds,
                            "repeats": timing.repeats[length],
                            "bytes": timing.memory[length],
                        }
                        for length, seconds in timing.seconds.items()
                    ],
                }
                for timing in self.timings
            ],
            "verdict": self.verdict(),
            "seconds": dict(self.seconds),
        }

    def _what_goes(self) -> str:
        cheap = self.plan(f"all under {self.threshold:g} nats")
        looked_at = f"{len(self.layers)} layers" if len(self.layers) > 1 else "one layer"
        assert cheap is not None
        if not cheap.plan.replaced:
            cost, layer, label = min(
                (found.price.cost, layer.index, label)
                for layer in self.layers
                for label, found in layer.candidates.items()
            )
            return (
                f"None of the {looked_at} can go for under {self.threshold:g} nats: the cheapest is layer {layer} "
                f"by {short(label)}, at {cost:+.4f}."
            )
        by = Counter(cheap.plan.replaced.values()).most_common()
        ways = ", ".join(f"{count} by {short(label)}" for label, count in by)
        return (
            f"{len(cheap.plan.replaced)} of {looked_at} ({ranges(sorted(cheap.plan.replaced))}) can go for under "
            f"{self.threshold:g} nats each ({ways}){self._by_maps_alone()}; all of these together cost "
            f"{_cost(cheap.price)} nats on other text, where the model's own loss is {self.loss_measure:.3f}."
        )

    def _by_maps_alone(self) -> str:
        """How many of them a linear map could take, where baselines were there to take them first."""
        alone = self.plan(f"maps under {self.threshold:g} nats")
        if alone is None:
            return ""
        layers = sorted(alone.plan.replaced)
        if not layers:
            return ", none of them by a linear map"
        return f", {len(layers)} of them ({ranges(layers)}) by a linear map too, together {_cost(alone.price)}"

    def _against_baseline(self) -> str:
        if not self.maps:
            return "No linear map was among the candidates, so nothing is said of one."
        rivals = [label for label in self.baselines if label.startswith("window")] or list(self.baselines)
        if not rivals:
            return "No baseline was among the candidates, so whether a linear map earns its place is not said."
        rival = rivals[0]
        better = [
            layer.index
            for layer in self.layers
            if min(layer.candidates[label].price.cost for label in self.maps) < layer.candidates[rival].price.cost
        ]
        alone = (
            f"a linear map is cheaper in {len(better)} of {len(self.layers)} layers ({ranges(better)})"
            if better
            else "no linear map is cheaper in any layer"
        )
        count = min(counts(len(self.layers)), key=lambda n: (abs(n - len(self.layers) / 2), n))
        name = CHEAPEST_MAP if len(self.maps) > 1 else self.maps[0]
        base, best = self.plan(rival, count), self.plan(name, count)
        assert base is not None
        assert best is not None
        ahead = base.price.cost - best.price.cost
        noise = 2 * math.hypot(base.price.standard_error, best.price.standard_error)
        result = "no clear difference" if abs(ahead) < noise else "the map wins" if ahead > 0 else "the baseline wins"
        layers = f"{count} cheapest layers replaced together" if count > 1 else "cheapest layer replaced"
        return (
            f"Against the baseline {short(rival)}, {alone}; with the {layers}, "
            f"linear maps cost {_cost(best.price)} and the baseline {_cost(base.price)} nats: {result}."
        )

    def _what_it_buys(self) -> str:
        softmax = self.timing(SOFTMAX)
        label = self._best_map() if self.maps else self.labels[0]
        timing = self.timing(label)
        longest = max((n for n, s in timing.seconds.items() if s and softmax.seconds[n]), default=None)
        where = f"On this machine ({threads(self.threads)}, {timing.backend} backend)"
        if longest is None:
            speed = f"{short(label)} was not timed within the budget"
        else:
            ratio = (softmax.seconds[longest] or math.nan) / (timing.seconds[longest] or math.nan)
            at = f"{ratio:.2g} times softmax's speed at {longest}"
            speed = (
                f"one layer's attention by {short(label)} is faster from {timing.crossover} tokens up ({at})"
                if timing.crossover is not None
                else f"one layer's attention by {short(label)} is slower at every length timed ({at})"
            )
        end = max(timing.memory)
        per_token = softmax.memory[end] / end
        tokens = round(timing.memory[end] / per_token)
        return (
            f"{where} {speed}, and it keeps {size(timing.memory[end])} a layer whatever the length, "
            f"what the KV cache takes for {tokens} tokens."
        )

    def _best_map(self) -> str:
        """The linear map that costs least with every layer replaced."""
        costs = {label: self.plan(label, len(self.layers)) for label in self.maps}
        return min(costs, key=lambda label: found.price.cost if (found := costs[label]) else math.inf)


def short(label: str) -> str:
    """A label as a person reads it: the name and the options' values.

    Example:
        >>> short("window:window=64:sinks=4")
        'window 64 4'
    """
    name, *options = label.split(":")
    return " ".join([name, *(option.partition("=")[2] for option in options)])


def size(count: float) -> str:
    """Bytes in the unit a person reads.

    Example:
        >>> size(1_700_000)
        '1.7 MB'
    """
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def threads(count: int) -> str:
    """How many threads, in words.

    Example:
        >>> threads(1), threads(2)
        ('1 thread', '2 threads')
    """
    return f"{count} thread" if count == 1 else f"{count} threads"


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers, runs written as first-last.

    Example:
        >>> ranges([0, 1, 2, 5, 7, 8])
        '0-2, 5, 7-8'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def processor() -> str:
    """What the machine calls its processor."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:  # noqa: PTH123
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _price(price: Price) -> dict[str, float]:
    return {"cost": price.cost, "standard_error": price.standard_error, "loss": price.loss}


def _cost(price: Price) -> str:
    return f"{price.cost:+.3f} ± {price.standard_error:.3f}"
