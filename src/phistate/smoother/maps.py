"""Which feature map a smoother uses: the one given, a grid over the rows, or random features."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sklearn.utils import check_random_state
from torch import Tensor

from phistate.features import FeatureMap, feature_map
from phistate.features.base import MAX_FEATURES
from phistate.features.fitted import FittedFeatureMap
from phistate.features.grid import Grid
from phistate.smoother.memory import within_reach

RANDOM = ("favor+", "hyperbolic", "oprf", "rff", "sderf", "simplex")
MARGIN = 2.0
"""How far the grid reaches beyond the data, in bandwidths: four standard deviations of what it integrates. A row less
than half of that from the edge loses 2% of its kernel and more."""
# The grid's cells in bandwidths: finer than half, the kernel's error (5e-9) no longer shows; at one, it is 1.4%.
_FINEST, _WIDEST = 0.5, 1.0


def choose_map(
    given: str | Callable[[int], FeatureMap],
    u: Tensor,
    weight: Tensor,
    *,
    num_features: int,
    random_state: Any,
    bandwidth: str,
) -> FeatureMap:
    """The map that ``given`` says, fitted to rows u ``[n,d]`` where it takes a fit; ``bandwidth`` as errors tell it."""
    u = within_reach(u)
    if callable(given):
        phi = _checked(given(u.shape[1]), u.shape[1])
    elif given in ("auto", "grid"):
        needed = _centres(u, _WIDEST).prod()
        if needed <= num_features:
            phi = _grid(u, num_features)
        elif given == "auto":
            phi = _random("oprf", u, weight, num_features, random_state)
        elif needed > MAX_FEATURES:
            raise ValueError(
                f"bandwidth: got {bandwidth}; feature_map='grid' takes one at which {u.shape[1]} columns of this range "
                f"need at most {MAX_FEATURES} features, not {needed:.2g}"
            )
        else:
            raise ValueError(
                f"num_features: got {num_features}; feature_map='grid' takes at least {needed:.0f} for "
                f"{u.shape[1]} columns of this range, or a wider bandwidth"
            )
    elif given in RANDOM:
        phi = _random(given, u, weight, num_features, random_state)
    else:
        names = ", ".join(("auto", "grid", *RANDOM))
        raise ValueError(f"feature_map: got {given!r}; takes a function or one of {names}")
    if isinstance(phi, FittedFeatureMap) and not phi.is_fitted:
        phi.fit(u[:, None], u[:, None])
    return phi.double()


def _checked(phi: object, d: int) -> FeatureMap:
    if not isinstance(phi, FeatureMap):
        raise TypeError(f"feature_map: got a function that gives {type(phi).__name__}; takes a FeatureMap")
    if phi.head_dim != d or phi.scale != 1 or phi.positional:
        raise ValueError(
            f"feature_map: got {phi!r}; takes head_dim = {d}, scale = 1 and no positions, for X has {d} columns"
        )
    return phi


def _random(name: str, u: Tensor, weight: Tensor, num_features: int, random_state: Any) -> FeatureMap:
    d = u.shape[1]
    if name == "simplex" and d < 2:
        raise ValueError("feature_map: got 'simplex' for X of 1 column; takes at least 2")
    seed = int(check_random_state(random_state).randint(2**31 - 1))
    options: dict[str, Any] = {"generator": torch.Generator().manual_seed(seed)}
    if name == "oprf":
        # Its fit takes rows without weights; E‖u_x + u_y‖² over independent rows is all that it uses.
        share = weight / weight.max()
        share /= share.sum()
        r = float(2 * (share @ u.square()).sum() + 2 * (share @ u).square().sum())
        options["a"] = (1 - ((d + 2 * r) + math.sqrt((d + 2 * r) ** 2 + 8 * d * r)) / (2 * d)) / 8
    return feature_map(name, head_dim=d, num_features=num_features, scale=1.0, **options)


def _grid(u: Tensor, most: int) -> Grid:
    """The finest useful grid over the rows with at most ``most`` centres, which the coarsest one keeps to."""
    widths = (float(width) for width in np.linspace(_FINEST, _WIDEST, 51))
    counts = next(counts for counts in (_centres(u, width) for width in widths) if counts.prod() <= most)
    low, high = _edges(u)
    return Grid(u.shape[1], low=low.tolist(), high=high.tolist(), counts=counts.int().tolist(), scale=1.0)


def _centres(u: Tensor, width: float) -> Tensor:
    """How many cells of a width each axis takes, as floating-point numbers, for they may be very many."""
    low, high = _edges(u)
    return ((high - low) / width).ceil()


def _edges(u: Tensor) -> tuple[Tensor, Tensor]:
    return u.amin(0) - MARGIN, u.amax(0) + MARGIN
