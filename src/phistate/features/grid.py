"""The softmax kernel by a quadrature on a grid: positive, deterministic, near exact, for a handful of dimensions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from phistate.features.base import ExponentialFeatureMap, Side, check_count, check_features


class Grid(ExponentialFeatureMap):
    """Features on a grid of centres c: the integral behind every positive random feature, by the midpoint rule.

    exp(x·y) = (2/π)^{D/2} ∫ exp(2c·(x+y) − 2‖c‖² − ‖x‖²/2 − ‖y‖²/2) dc, so that with cells of volume V
    log φ_c(x) = 2c·x − ‖c‖² − ‖x‖²/2 + ½ log(V (2/π)^{D/2}).
    The integrand is a Gaussian of standard deviation ½ around (x+y)/2. Where the grid covers that point by two units
    on every side, an axis with cells of width Δ errs by at most 2 exp(−π²/2Δ²) relative (5e-9 at Δ = ½, 3e-4 at ¾, 1e-2
    at 1) and 6e-5 for what the grid cuts off; beyond the grid the kernel falls off. The count is the product of
    the axes' counts, which leaves the map to D ≤ 3 or so.

    Args:
        head_dim: D.
        low: lower edge of each axis, D numbers in units of x·√scale.
        high: upper edge, each above ``low``.
        counts: how many centres each axis has; the map makes their product of features.
        scale: softmax scale, None: D ** -0.5.

    Raises:
        ValueError: another number of edges or counts than D, an edge that is not finite, ``high`` not above ``low``,
            ``counts`` that make more than 2²⁰ features.

    Example:
        >>> import torch
        >>> phi = Grid(1, low=[-4.0], high=[4.0], counts=[16], scale=1.0)
        >>> x, y = torch.tensor([[1.5]]), torch.tensor([[-0.5]])
        >>> bool(((phi.query(x) * phi.key(y)).sum() / (x * y).sum().exp() - 1).abs() < 1e-5)
        True
    """

    centres: Tensor

    def __init__(
        self,
        head_dim: int,
        *,
        low: Sequence[float],
        high: Sequence[float],
        counts: Sequence[int],
        scale: float | None = None,
    ) -> None:
        super().__init__(head_dim, scale=scale)
        for name, given in (("low", low), ("high", high), ("counts", counts)):
            if len(given) != head_dim:
                raise ValueError(f"{name}: got {len(given)} values; takes head_dim = {head_dim}")
        axes, volume, size = [], 1.0, 1
        for bottom, top, count in zip(low, high, counts, strict=True):
            if not (math.isfinite(bottom) and math.isfinite(top) and bottom < top):
                raise ValueError(f"high: got {top} over low = {bottom}; takes finite edges, high above low")
            width = (top - bottom) / check_count("counts", count)
            size *= count
            check_features("counts", list(counts), size)
            axes.append(bottom + (torch.arange(count, dtype=torch.float64) + 0.5) * width)
            volume *= width
        self.low, self.high = tuple(low), tuple(high)
        self.log_volume = math.log(volume)
        self.register_buffer("centres", torch.cartesian_prod(*axes).reshape(-1, head_dim))

    @property
    def num_features(self) -> int:
        """F, the product of the axes' counts."""
        return len(self.centres)

    def log_features(self, x: Tensor, side: Side, positions: Tensor | None) -> Tensor:
        """2c·x − ‖c‖² − ‖x‖²/2 + ½ log(V (2/π)^{D/2})."""
        centres = self.centres.to(x.dtype)
        constant = (self.log_volume + self.head_dim / 2 * math.log(2 / math.pi)) / 2
        offset = constant - centres.square().sum(-1)
        return (x @ (2 * centres).mT).add_(offset).sub_(x.square().sum(-1, keepdim=True) / 2)

    def extra_repr(self) -> str:
        """The base's settings and the grid's edges; the centres are a buffer."""
        return f"{super().extra_repr()}, low={self.low}, high={self.high}"
