"""Who takes part: every feature map, made to use a budget of features as well as it can, and two baselines."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from phistate.diagnostics import LogKernel, window_kernel
from phistate.features import FeatureMap, feature_map, feature_map_names
from phistate.features.fitted import FittedFeatureMap
from phistate.ops.linear_attention import linear_attention
from phistate.ops.softmax_attention import softmax_attention

BASELINES = ("uniform", "window")
"""What any map has to beat: the average that looks at nothing, and exact softmax on the keys that fit the bytes."""

SINKS = 4
"""First keys the window baseline keeps."""

_HIGHEST_DEGREE = 8  # of polynomials: beyond, 1/√α! is below 1e-2 and the monomials no longer matter
_FLOAT32 = 4


@dataclass(frozen=True)
class Family:
    """What maps of one kind have in common in a plot."""

    name: str
    members: tuple[str, ...]


FAMILIES = (
    Family("baselines", BASELINES),
    Family("pointwise", ("elu", "relu", "relu2", "exp", "cosformer", "dpfp")),
    Family("learned, untrained", ("hedgehog", "rebased")),
    Family("polynomial", ("polynomial", "taylor", "polysketch")),
    Family("positive random", ("favor+", "hyperbolic", "simplex", "oprf", "sderf")),
    Family("signed", ("rff", "nystrom")),
)
"""Every contender, by kind."""


@dataclass(frozen=True)
class Contender:
    """One way to attend within a budget, made for inputs of one shape."""

    name: str
    label: str
    features: int
    kernel: FeatureMap | LogKernel
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    state_bytes: int
    """Of one layer, in float32, while decoding."""


def contender_names() -> tuple[str, ...]:
    """The baselines, then every registered map.

    Example:
        >>> contender_names()[:3]
        ('uniform', 'window', 'elu')
    """
    return (*BASELINES, *(name for name in feature_map_names() if name not in BASELINES))


def is_random(name: str) -> bool:
    """Whether another draw gives another kernel."""
    return name in _DRAWN


def make(
    name: str,
    budget: int,
    *,
    head_dim: int,
    value_dim: int,
    kv_heads: int,
    scale: float,
    length: int,
    seed: int = 0,
    fit: tuple[Tensor, Tensor] | None = None,
) -> Contender | None:
    """The contender that uses at most ``budget`` features; None where even its smallest needs more.

    Args:
        name: from `contender_names`.
        budget: most features of one query or key. The window gets the bytes that a state of so many features takes.
        head_dim: D.
        value_dim: V.
        kv_heads: states in a layer.
        scale: softmax's.
        length: the longest sequence, for maps that must know.
        seed: of what is random.
        fit: queries and keys ``[1,T,H,D]`` for maps that are fitted.

    Raises:
        ValueError: a name that takes no part; samples too few for the map.
    """
    if name not in contender_names():
        raise ValueError(f"maps: got {name!r}; takes {', '.join(contender_names())}")
    if name == "window":
        window = max(1, budget * (value_dim + 1) // (head_dim + value_dim) - SINKS)

        def near(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return softmax_attention(q, k, v, scale=scale, window=window, sinks=SINKS)

        kept = min(window + SINKS, length) * kv_heads * (head_dim + value_dim) * _FLOAT32
        return Contender(name, f"window {window} + {SINKS}", budget, window_kernel(window, SINKS), near, kept)
    options = _options(name, budget, head_dim, length)
    if options is None:
        return None
    if name == "nystrom" and fit is not None:
        # There are no more landmarks than vectors to place them on; half as many leaves k-means something to do.
        vectors = sum(x.shape[1] * x.shape[2] for x in fit)
        options["num_features"] = min(budget, max(1, vectors // 2))
    if name in _DRAWN:
        options["generator"] = torch.Generator().manual_seed(seed)
    phi = feature_map(name, head_dim=head_dim, scale=scale, **options)
    if isinstance(phi, FittedFeatureMap):
        if fit is None:
            raise ValueError(f"fit: got None; takes queries and keys for {name!r}")
        phi.fit(*fit)
    phi.requires_grad_(False)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return linear_attention(q, k, v, feature_map=phi, normalize=True, signed="allow")

    shown = [str(options[key]) for key in ("order", "p", "nu", "sketch_size") if key in options]
    marks = ["untrained"] if name in ("hedgehog", "rebased") else [] if phi.positive else ["signed"]
    label = " ".join([name, *shown, *(f"({mark})" for mark in marks)])
    tokens = torch.zeros(1, 1, kv_heads, head_dim)
    # What a state holds depends on the map (log-space ones keep a scale), so a state is asked.
    _, state = linear_attention(
        tokens,
        tokens,
        torch.zeros(1, 1, kv_heads, value_dim),
        feature_map=phi,
        normalize=True,
        signed="allow",
        return_state=True,
    )
    return Contender(name, label, phi.num_features, phi, attend, state.nbytes)


_BY_COUNT = ("favor+", "rff", "hyperbolic", "oprf", "sderf", "simplex", "nystrom")
_DRAWN = ("favor+", "rff", "hyperbolic", "oprf", "sderf", "simplex", "polysketch")


def _options(name: str, budget: int, dim: int, length: int) -> dict[str, object] | None:
    """What makes a map use the budget; None where its smallest is larger."""
    if name in _BY_COUNT:
        step = 2 if name in ("rff", "hyperbolic") else 1
        count = budget // step * step
        return {"num_features": count} if count and not (name == "simplex" and dim < 2) else None
    if name in _SIZES:
        size = _SIZES[name](dim)
        options: dict[str, object] = {"max_length": length} if name == "cosformer" else {}
        return options if size <= budget else None
    ladders: dict[str, tuple[str, range, Callable[[int], int]]] = {
        # Odd powers can be negative.
        "taylor": ("order", range(2, _HIGHEST_DEGREE + 1, 2), lambda n: math.comb(dim + n, n)),
        "polynomial": ("p", range(2, _HIGHEST_DEGREE + 1, 2), lambda p: math.comb(dim + p - 1, p)),
        "dpfp": ("nu", range(1, 2 * dim), lambda nu: 2 * dim * nu),
        "polysketch": ("sketch_size", range(1, budget + 1), lambda r: r * (r + 1) // 2),
    }
    option, rungs, size_of = ladders[name]
    fitting = list(takewhile(lambda rung: size_of(rung) <= budget, rungs))
    return {option: fitting[-1]} if fitting else None


_SIZES: dict[str, Callable[[int], int]] = {
    "uniform": lambda dim: 1,
    "elu": lambda dim: dim,
    "relu": lambda dim: dim,
    "relu2": lambda dim: dim,
    "exp": lambda dim: dim,
    "hedgehog": lambda dim: 2 * dim,
    "cosformer": lambda dim: 2 * dim,
    "rebased": lambda dim: dim * (dim + 1) // 2,
}
