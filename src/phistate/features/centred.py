"""Exact centring: any exponential map, read around the means of the queries and of the keys."""

from __future__ import annotations

import torch
from torch import Tensor

from phistate.features.base import ExponentialFeatureMap, Side
from phistate.features.fitted import FittedFeatureMap, by_set, per_head
from phistate.features.random import RandomFeatureMap


class Centred(FittedFeatureMap, ExponentialFeatureMap):
    """An exponential map around the means b of the queries and c of the keys, for the same kernel.

    exp(x·y) = exp(c·(x−b)) · exp((x−b)·(y−c)) · exp(b·y), so with ``phi`` standing for the middle factor
    log φ_q(x) = log φ(x−b) + c·(x−b) and log φ_k(y) = log φ(y−c) + b·y. A random map's variance grows with
    exp(‖x+y‖²), which the means, common to all, need not be part of.

    Args:
        phi: the exponential map; if it needs fitting itself, ``fit`` fits it to the centred vectors.
        heads: None: one pair of means for all heads; n: one for each of n sets of heads (usually the key
            heads).

    Raises:
        TypeError: a ``phi`` that is no exponential map.
        ValueError: a call before ``fit``.

    Example:
        >>> import torch
        >>> from phistate.features import FavorPlus
        >>> q, k = torch.randn(2, 1, 100, 1, 8, generator=torch.Generator().manual_seed(0)) + 1
        >>> phi = Centred(FavorPlus(8, num_features=16)).fit(q, k)
        >>> plain, centred = phi.phi.relative_variance(q, k), phi.relative_variance(q, k)
        >>> bool(centred.median() < plain.median() / 4)
        True
    """

    query_mean: Tensor
    key_mean: Tensor

    def __init__(self, phi: ExponentialFeatureMap, *, heads: int | None = None) -> None:
        if not isinstance(phi, ExponentialFeatureMap):
            raise TypeError(f"phi: got {type(phi).__name__}; takes an ExponentialFeatureMap")
        super().__init__(phi.head_dim, scale=phi.scale)
        self.phi = phi
        self.positive = phi.positive
        self.positional = phi.positional
        self._await_fit(heads)
        nothing = torch.full((self._sets, self.head_dim), float("nan"))
        self.register_buffer("query_mean", nothing.clone())
        self.register_buffer("key_mean", nothing)

    @property
    def num_features(self) -> int:
        """F of the map inside."""
        return self.phi.num_features

    def log_features(self, x: Tensor, side: Side, positions: Tensor | None) -> Tensor:
        """Log φ of the centred vector, plus its dot product with the other side's mean."""
        self._check_fitted()
        b, c = self._means(x)
        if side == "query":
            x = x - b
            return self.phi.log_features(x, side, positions) + (x * c).sum(-1, keepdim=True)
        return self.phi.log_features(x - c, side, positions) + (x * b).sum(-1, keepdim=True)

    def relative_variance(self, x: Tensor, y: Tensor) -> Tensor:
        """Var κ̂(x, y) / κ(x, y)² over the draw of the map inside, in float64.

        Args:
            x: queries ``[...,H,D]``, as ``query`` takes them (not yet scaled).
            y: keys ``[...,H,D]``, broadcast against x.

        Raises:
            TypeError: the map inside is not random.
        """
        if not isinstance(self.phi, RandomFeatureMap):
            raise TypeError(f"phi: got {type(self.phi).__name__}; takes a random map for a relative variance")
        self._check_fitted()
        b, c = (mean / self.scale**0.5 for mean in self._means(x.double()))
        return self.phi.relative_variance(x.double() - b, y.double() - c)

    def _means(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return per_head(self.query_mean.to(x.dtype), x), per_head(self.key_mean.to(x.dtype), x)

    def _fit(self, x: Tensor, y: Tensor) -> None:
        self.query_mean.copy_(by_set(x, self._sets).mean(1))
        self.key_mean.copy_(by_set(y, self._sets).mean(1))
        if isinstance(self.phi, FittedFeatureMap):
            b, c = self._means(x)[0], self._means(y)[1]
            self.phi._fit_scaled(x - b, y - c)

    def extra_repr(self) -> str:
        """The base's settings and the sets of heads."""
        return f"{super().extra_repr()}, heads={self.heads}"
