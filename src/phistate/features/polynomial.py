"""Maps made of monomials: (x·y)^p and the Taylor polynomial of exp(x·y), exact for the kernel they name."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from phistate.features.base import FeatureMap, Side, check_count

# From this many vectors on, slicing beats gathering on a CPU (D = 64, order 2: 2.1× forward, 1.5× backward);
# below, the D small calls cost more than the gather.
_SLICE_FROM = 64


class Polynomial(FeatureMap):
    """The polynomial kernel (x·y)^p, exactly.

    φ_α(x) = √(p! / ∏ α_i!) · ∏ x_i^{α_i} for every multi-index α with |α| = p, so that φ(x)·φ(y) = (x·y)^p.
    F = C(D+p−1, p): each monomial once.

    Args:
        head_dim: D.
        p: the power, ≥ 1. The kernel is nonnegative for even p only.
        scale: softmax scale, None: D ** -0.5.

    Raises:
        ValueError: ``p`` below 1.

    Example:
        >>> import torch
        >>> phi = Polynomial(2, p=2, scale=1.0)
        >>> x, y = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 1.0]])
        >>> (phi.query(x) * phi.key(y)).sum()
        tensor(25.0000)
    """

    def __init__(self, head_dim: int, *, p: int = 2, scale: float | None = None) -> None:
        super().__init__(head_dim, scale=scale)
        self.p = check_count("p", p)
        self.positive = p % 2 == 0
        self.monomials = Monomials(head_dim, p)

    @property
    def num_features(self) -> int:
        """F = C(D+p−1, p)."""
        return math.comb(self.head_dim + self.p - 1, self.p)

    def features(self, x: Tensor, side: Side, positions: Tensor | None) -> Tensor:
        """√p! times the weighted monomials of degree p, the factor shared out among the p variables of each."""
        return self.monomials(x * math.factorial(self.p) ** (0.5 / self.p), least=self.p)

    def extra_repr(self) -> str:
        """The base's settings and p."""
        return f"{super().extra_repr()}, p={self.p}"


class Taylor(FeatureMap):
    """The Taylor polynomial of the softmax kernel: Σ_{n ≤ N} (x·y)^n / n!.

    φ_α(x) = (∏ α_i!)^-½ · ∏ x_i^{α_i} for every multi-index α with |α| ≤ N; order 2 is [1, x_i, x_i²/√2,
    x_i x_j (i<j)]. F = C(D+N, N). The kernel is biased towards 1 and has no variance; it is positive for even
    N (at least ½ for N = 2) and can be negative for odd N.

    Args:
        head_dim: D.
        order: N ≥ 1.
        scale: softmax scale, None: D ** -0.5.

    Raises:
        ValueError: ``order`` below 1.

    Paper: order 2 as in Based, Arora et al. 2024, arXiv:2402.18668.

    Example:
        >>> import torch
        >>> phi = Taylor(2, order=2, scale=1.0)
        >>> phi.num_features
        6
        >>> x, y = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, -1.0]])
        >>> (phi.query(x) * phi.key(y)).sum()  # 1 + 1 + 1/2
        tensor(2.5000)
    """

    def __init__(self, head_dim: int, *, order: int = 2, scale: float | None = None) -> None:
        super().__init__(head_dim, scale=scale)
        self.order = check_count("order", order)
        self.positive = order % 2 == 0
        self.monomials = Monomials(head_dim, order)

    @property
    def num_features(self) -> int:
        """F = C(D+N, N)."""
        return math.comb(self.head_dim + self.order, self.order)

    def features(self, x: Tensor, side: Side, positions: Tensor | None) -> Tensor:
        """1 and the weighted monomials of degree 1 to N."""
        return self.monomials(x, least=0)

    def extra_repr(self) -> str:
        """The base's settings and the order."""
        return f"{super().extra_repr()}, order={self.order}"


class Monomials(nn.Module):
    """Weighted monomials (∏ α_i!)^-½ ∏ x_i^{α_i}, degree by degree, each once.

    A monomial of degree n is one of degree n−1 (its parent) times x_j, where j is its largest index. They are kept in
    order of j, so that the parents of the block j are the first C(j+n−1, n−1) monomials of degree n−1: the block is a
    slice times a column. The parents that end in x_j themselves are the slice's tail; only there does ∏ α_i! grow, by
    the new exponent of x_j.

    Args:
        dim: D, how many variables.
        degree: the largest degree, ≥ 1.
    """

    def __init__(self, dim: int, degree: int) -> None:
        super().__init__()
        self.dim = dim
        self.degree = degree
        last = torch.arange(dim)  # each monomial's largest index
        run = torch.ones(dim, dtype=torch.int64)  # and that index's exponent
        for n in range(2, degree + 1):
            sizes = [_prefix(j, n - 1) for j in range(dim)]
            parent = torch.cat([torch.arange(size) for size in sizes])
            factor = torch.arange(dim).repeat_interleave(torch.tensor(sizes))
            # The tables follow from D and the degree, so they are no part of the state dict.
            self.register_buffer(f"last_{n}", last, persistent=False)
            self.register_buffer(f"run_{n}", run, persistent=False)
            run = torch.where(last[parent] == factor, run[parent] + 1, 1)
            last = factor
            self.register_buffer(f"parent_{n}", parent, persistent=False)
            self.register_buffer(f"factor_{n}", factor, persistent=False)
            self.register_buffer(f"exponent_{n}", run, persistent=False)

    def forward(self, x: Tensor, *, least: int) -> Tensor:
        """``[...,D]`` to the monomials of degree ``least`` (≥ 0) to ``degree``, in order of degree: ``[...,F]``."""
        pieces = [x.new_ones(*x.shape[:-1], 1)] if least == 0 else []
        sliced = x.device.type == "cpu" and x.shape[:-1].numel() >= _SLICE_FROM
        parts = [x]
        for n in range(1, self.degree + 1):
            if n > 1:
                lower = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
                parts = self._by_slices(lower, x, n) if sliced else [self._by_gather(lower, x, n)]
            if n >= least:
                pieces += parts
        return torch.cat(pieces, -1)

    def _by_slices(self, lower: Tensor, x: Tensor, n: int) -> list[Tensor]:
        """Degree n in pieces, not yet joined: a copy of the largest degree is what this costs most of."""
        tails = lower * x[..., self.get_buffer(f"last_{n}")]
        tails = tails * (self.get_buffer(f"run_{n}") + 1).to(x.dtype).rsqrt()
        parts = []
        for j in range(self.dim):
            start, stop = _prefix(j - 1, n - 1), _prefix(j, n - 1)
            parts += [lower[..., :start] * x[..., j : j + 1], tails[..., start:stop]]
        return parts

    def _by_gather(self, lower: Tensor, x: Tensor, n: int) -> Tensor:
        parent, factor = self.get_buffer(f"parent_{n}"), self.get_buffer(f"factor_{n}")
        shape = (*x.shape[:-1], len(parent))
        weight = self.get_buffer(f"exponent_{n}").to(x.dtype).rsqrt()
        return lower.gather(-1, parent.expand(shape)) * x.gather(-1, factor.expand(shape)) * weight


def _prefix(j: int, degree: int) -> int:
    """How many monomials of ``degree`` have no index above j."""
    return math.comb(j + degree, degree) if j >= 0 else 0
