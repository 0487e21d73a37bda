"""What a replacement buys on this machine: one layer's attention timed, and bytes kept while decoding."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phistate.audit.candidates import Candidate, Mixing
from phistate.audit.capture import Attend
from phistate.features import FeatureMap
from phistate.ops.backends import BACKENDS
from phistate.ops.linear_attention import linear_attention
from phistate.ops.softmax_attention import softmax_attention

LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)

_ROUNDS, _MOST_ROUNDS = 3, 15  # a median needs three; of more than fifteen it tells nothing new
_ENOUGH = 2.0  # seconds for one length, once it has its three rounds
_FLOAT32 = 4


@dataclass(frozen=True)
class Shape:
    """The shape of one layer's attention."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scale: float


@dataclass(frozen=True)
class Timing:
    """One way to attend, by length."""

    label: str
    backend: str
    seconds: Mapping[int, float | None]
    """Length → median seconds of one layer's attention; None: not within the time budget."""
    repeats: Mapping[int, int]
    memory: Mapping[int, int]
    """Length → bytes of one layer kept while decoding."""
    crossover: int | None
    """The first length measured from which on it is faster than softmax throughout; None: it never is."""


SOFTMAX = "softmax"


def time_attention(
    candidates: Sequence[Candidate],
    shape: Shape,
    *,
    lengths: Sequence[int] = LENGTHS,
    budget: float = 60.0,
    seed: int = 0,
    step: Callable[[], None] = lambda: None,
) -> list[Timing]:
    """Softmax and each candidate on the same random q, k, v ``[1,T,H,D]`` float32, causal, in turn.

    One round runs each once, so that a change of the machine's pace meets all alike. What is foreseen, by
    its time at the length before, not to end within the budget is left out.

    Args:
        candidates: what to time beside softmax (torch's fused attention, grouped heads).
        shape: of the model's attention.
        lengths: ascending.
        budget: seconds for everything.
        seed: of the inputs and of random maps.
        step: called after each length.
    """
    end = time.perf_counter() + budget
    generator = torch.Generator().manual_seed(seed)
    labels = [SOFTMAX, *(candidate.label for candidate in candidates)]
    seconds: dict[str, dict[int, float | None]] = {label: {} for label in labels}
    repeats: dict[str, dict[int, int]] = {label: {} for label in labels}
    memory: dict[str, dict[int, int]] = {label: {} for label in labels}
    backend = {SOFTMAX: "torch"}
    sizes = {"kv_heads": shape.kv_heads, "head_dim": shape.head_dim, "value_dim": shape.value_dim}
    with torch.inference_mode():
        for n, length in enumerate(lengths):
            q, k, v = _inputs(shape, length, generator)
            runs: dict[str, Attend] = {SOFTMAX: _softmax(shape)}
            memory[SOFTMAX][length] = length * shape.kv_heads * (shape.head_dim + shape.value_dim) * _FLOAT32
            for candidate in candidates:
                mixing = candidate.make(
                    head_dim=shape.head_dim, scale=shape.scale, length=length, seed=seed, layer=0, sample=(q, k)
                )
                runs[candidate.label] = mixing.attend
                memory[candidate.label][length] = candidate.state_bytes(mixing, length=length, **sizes)
                if n == 0:
                    backend[candidate.label] = _backend(mixing, q, k, v)
            if n > 0:
                left = end - time.perf_counter()
                runs = {
                    label: run
                    for label, run in runs.items()
                    if _foreseen(seconds[label][lengths[n - 1]], length / lengths[n - 1], label) < left
                }
            # What is left goes to the lengths in proportion to their size.
            share = (end - time.perf_counter()) * length / sum(lengths[n:])
            took = _interleaved(runs, (q, k, v), share, warm_up=n == 0)
            for label in labels:
                found = took.get(label, [])
                seconds[label][length] = statistics.median(found) if found else None
                repeats[label][length] = len(found)
            step()
    return [
        Timing(
            label,
            backend[label],
            seconds[label],
            repeats[label],
            memory[label],
            None if label == SOFTMAX else crossover(seconds[SOFTMAX], seconds[label]),
        )
        for label in labels
    ]


def crossover(softmax: Mapping[int, float | None], candidate: Mapping[int, float | None]) -> int | None:
    """The first length from which on the candidate takes less time, at every length where both were measured.

    Example:
        >>> crossover({1: 1.0, 2: 4.0, 4: 16.0}, {1: 2.0, 2: 3.0, 4: 4.0})
        2
    """
    both = [(length, a, b) for length, a in softmax.items() if a is not None and (b := candidate[length]) is not None]
    found = None
    for length, own, other in both:
        if other >= own:
            found = None
        elif found is None:
            found = length
    return found


def _interleaved(
    runs: Mapping[str, Attend], inputs: tuple[Tensor, Tensor, Tensor], share: float, *, warm_up: bool
) -> dict[str, list[float]]:
    """Seconds of each run, one after the other, round by round while that fits in the share of time."""
    if warm_up:
        for attend in runs.values():
            attend(*inputs)
    begin = time.perf_counter()
    took: dict[str, list[float]] = {label: [] for label in runs}
    for done in range(1, _MOST_ROUNDS + 1):
        start = time.perf_counter()
        for label, attend in runs.items():
            before = time.perf_counter()
            attend(*inputs)
            took[label].append(time.perf_counter() - before)
        now = time.perf_counter()
        ahead = now - begin + (now - start)  # were there another round
        if ahead > share or (done >= _ROUNDS and ahead > _ENOUGH):
            break
    return took


def _foreseen(before: float | None, growth: float, label: str) -> float:
    """Seconds of the next length from those of the last; what was left out stays out."""
    if before is None:
        return math.inf
    return before * (growth**2 if label == SOFTMAX else growth)


def _inputs(shape: Shape, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k, v of one layer."""
    q = torch.randn(1, length, shape.heads, shape.head_dim, generator=generator)
    k = torch.randn(1, length, shape.kv_heads, shape.head_dim, generator=generator)
    v = torch.randn(1, length, shape.kv_heads, shape.value_dim, generator=generator)
    return q, k, v


def _softmax(shape: Shape) -> Attend:
    """Torch's fused causal attention, the model's own way."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return softmax_attention(q, k, v, scale=shape.scale)

    return attend


def _backend(mixing: Mixing, q: Tensor, k: Tensor, v: Tensor) -> str:
    """The backend that ``backend="auto"`` takes for this map: the first that does not refuse."""
    if not isinstance(mixing.kernel, FeatureMap):
        return "torch"
    for backend in BACKENDS:
        try:
            linear_attention(q, k, v, feature_map=mixing.kernel, normalize=True, signed="allow", backend=backend.name)
        except ValueError:
            continue
        return backend.name
    raise AssertionError("the torch backend refuses nothing")
