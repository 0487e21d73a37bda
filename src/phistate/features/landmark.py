"""Nyström features: the softmax kernel, exact wherever a query or a key is one of the landmarks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from phistate.features.base import Side, check_count
from phistate.features.fitted import FittedFeatureMap, by_set, headwise, per_head

_LLOYD_STEPS = 10
_MOST_LANDMARKS = 2**14  # G^-½ then takes 1 GiB
# Eigenvalues of the landmarks' kernel below this share of the largest are left out: past it the inverse root
# magnifies the float32 rounding of the features to the size of the kernel.
_RANK_TOLERANCE = torch.finfo(torch.float32).eps


class Nystrom(FittedFeatureMap):
    """Nyström features of exp(x·y) on M landmarks, placed by k-means over queries and keys together.

    φ(x) = G^-½ [exp(m_j·x − ‖m_j‖²/2)]_j with G_ij = exp(−‖m_i−m_j‖²/2), which is K_MM^-½ k(M, x) with both
    scaled to a unit diagonal. κ̂(x, y) = exp(x·y) when x or y is a landmark (to float32 rounding, as far as G
    has full rank there); between landmarks it errs by the parts of x and y that the landmarks do not span, of
    either sign.

    Args:
        head_dim: D.
        num_features: M.
        heads: None: one set of landmarks for all heads; n: one for each of n sets of heads (usually the key
            heads).
        scale: softmax scale, None: D ** -0.5.

    Raises:
        ValueError: ``num_features`` below 1 or above 2¹⁴, a call before ``fit``, a fit to fewer vectors than landmarks.

    Papers: Williams & Seeger 2001; for attention, Xiong et al. 2021, arXiv:2102.03902 (there with a
    pseudo-inverse between segment means, here with the symmetric root, so that a state can be kept).

    Example:
        >>> import torch
        >>> q, k = torch.randn(2, 1, 50, 1, 4, generator=torch.Generator().manual_seed(0))
        >>> phi = Nystrom(4, num_features=8, scale=1.0).fit(q, k)
        >>> x, y = phi.landmarks[0, :1], k[0, 0]
        >>> bool(((phi.query(x) * phi.key(y)).sum() / (x * y).sum().exp() - 1).abs() < 1e-4)
        True
    """

    positive = False
    landmarks: Tensor
    root: Tensor

    def __init__(
        self,
        head_dim: int,
        *,
        num_features: int = 64,
        heads: int | None = None,
        scale: float | None = None,
    ) -> None:
        super().__init__(head_dim, scale=scale)
        size = check_count("num_features", num_features, most=_MOST_LANDMARKS)
        self._await_fit(heads)
        self.register_buffer("landmarks", torch.full((self._sets, size, head_dim), math.nan))
        self.register_buffer("root", torch.full((self._sets, size, size), math.nan))

    @property
    def num_features(self) -> int:
        """F = M."""
        return self.landmarks.shape[1]

    def features(self, x: Tensor, side: Side, positions: Tensor | None) -> Tensor:
        """G^-½ exp(Mx − ‖M‖²/2)."""
        self._check_fitted()
        offset = per_head(self.landmarks.to(x.dtype).square().sum(-1) / 2, x)
        return headwise((headwise(x, self.landmarks) - offset).exp(), self.root)

    def _fit(self, x: Tensor, y: Tensor) -> None:
        pools = torch.cat((by_set(x, self._sets), by_set(y, self._sets)), 1)
        if pools.shape[1] < self.num_features:
            raise ValueError(
                f"q, k: got {pools.shape[1]} vectors a set of heads; takes at least num_features = {self.num_features}"
            )
        self.landmarks.copy_(torch.stack([_k_means(pool, self.num_features) for pool in pools]))
        landmarks = self.landmarks.double()
        values, vectors = torch.linalg.eigh((-torch.cdist(landmarks, landmarks).square() / 2).exp())
        kept = values > values[..., -1:] * self.num_features * _RANK_TOLERANCE
        inverse = torch.where(kept, values, math.inf).rsqrt().unsqueeze(-2)
        self.root.copy_((vectors * inverse) @ vectors.mT)

    def extra_repr(self) -> str:
        """The base's settings, M and the sets of heads."""
        return f"{super().extra_repr()}, num_features={self.num_features}, heads={self.heads}"


def _k_means(pool: Tensor, count: int) -> Tensor:
    """``count`` centres of vectors ``[N,D]``, by Lloyd's steps from evenly spaced ones; empty ones stay."""
    centres = pool[torch.arange(count, device=pool.device) * len(pool) // count]
    for _ in range(_LLOYD_STEPS):
        nearest = torch.cdist(pool, centres).argmin(1)
        sizes = nearest.bincount(minlength=count).unsqueeze(-1)
        sums = torch.zeros_like(centres).index_add_(0, nearest, pool)
        centres = torch.where(sizes > 0, sums / sizes, centres)
    return centres
