"""Maps made of monomials: (x·y)^p and the Taylor polynomial of exp(x·y), exact for the kernel they name."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from phistate.features.base import FeatureMap, Side, check_count, check_features

# From this many vectors on, blocks beat the table on a CPU (8192 vectors, D = 64, order 2: 2.3× forward, 1.5×
# backward); below, D small calls cost more than one gather.
_BLOCKS_FROM = 256


class Polynomial(FeatureMap):
    """The polynomial kernel (x·y)^p, exactly.

    φ_α(x) = √(p! / ∏ α_i!) · ∏ x_i^{α_i} for every multi-index α with |α| = p, so that φ(x)·φ(y) = (x·y)^p.
    F = C(D+p−1, p): each monomial once.

    Args:
        head_dim: D.
        p: the power, ≥ 1. The kernel is nonnegative for even p only.
        scale: softmax scale, None: D ** -0.5.

    Raises:
        ValueError: ``p`` below 1, or one that makes more than 2²⁰ features.

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
        check_features("p", f"{p} for head_dim = {head_dim}", self.num_features)
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
        ValueError: ``order`` below 1, or one that makes more than 2²⁰ features.

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
        check_features("order", f"{order} for head_dim = {head_dim}", self.num_features)
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
    order of j, so that the parents of the block j are the first C(j+n−1, n−1) monomials of degree n−1. ``forward``
    reads parents and factors from a table; on a CPU, many vectors at once are done block by block instead, each a
    slice times a column.

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
            sizes = [_count(j + 1, n - 1) for j in range(dim)]
            parent = torch.cat([torch.arange(size) for size in sizes])
            factor = torch.arange(dim).repeat_interleave(torch.tensor(sizes))
            run = torch.where(last[parent] == factor, run[parent] + 1, 1)
            last = factor
            # The tables follow from D and the degree, so they are no part of the state dict.
            self.register_buffer(f"parent_{n}", parent, persistent=False)
            self.register_buffer(f"factor_{n}", factor, persistent=False)
            self.register_buffer(f"run_{n}", run, persistent=False)

    def forward(self, x: Tensor, *, least: int) -> Tensor:
        """``[...,D]`` to the monomials of degree ``least`` (≥ 0) to ``degree``, in order of degree: ``[...,F]``."""
        many = x.device.type == "cpu" and x.shape[:-1].numel() >= _BLOCKS_FROM
        if many and not torch.compiler.is_compiling():  # a compiler fuses the gathers
            return _Blocks.apply(x, self, least)
        return self.gather(x, least)

    def gather(self, x: Tensor, least: int) -> Tensor:
        """``forward`` by table."""
        degrees = [x.new_ones(*x.shape[:-1], 1), x]
        for n in range(2, self.degree + 1):
            parent, factor = self.get_buffer(f"parent_{n}"), self.get_buffer(f"factor_{n}")
            shape = (*x.shape[:-1], len(parent))
            # ∏ α_i! grows by the new exponent of x_j.
            weight = self.get_buffer(f"run_{n}").to(x.dtype).rsqrt()
            degrees.append(degrees[-1].gather(-1, parent.expand(shape)) * x.gather(-1, factor.expand(shape)) * weight)
        return torch.cat(degrees[least:], -1)

    def blocks(self, n: int) -> list[tuple[int, int, int]]:
        """For each block j of degree n: where it begins, and where the parents that end in x_j begin and end."""
        ends = [_count(j + 1, n - 1) for j in range(self.dim)]
        begins = [0, *accumulate(ends)]
        return [(begins[j], ends[j - 1] if j else 0, ends[j]) for j in range(self.dim)]

    def tail_weight(self, n: int, like: Tensor) -> Tensor:
        """What the parents of degree n−1 are to be weighted with where their own last variable comes once more."""
        run = self.get_buffer(f"run_{n - 1}") if n > 2 else torch.ones(self.dim, dtype=torch.int64)
        return (run + 1).to(like).rsqrt()


class _Blocks(torch.autograd.Function):
    """``Monomials.gather``, written block by block into one output: nothing as large as the features is made twice.

    Of the parents of a block, only its last ones (those that end in x_j) are weighted, and no earlier block has them:
    the copy of the parents starts out weighted, and each tail is put back to plain once its own block is done.
    """

    @staticmethod
    def forward(x: Tensor, monomials: Monomials, least: int) -> Tensor:
        dim, degree = monomials.dim, monomials.degree
        out = x.new_empty(*x.shape[:-1], sum(_count(dim, n) for n in range(least, degree + 1)))
        raised = _split(out, dim, least, degree)
        if least == 0:
            raised[0].fill_(1)
        if least <= 1:
            raised[1].copy_(x)
        lower = x
        for n in range(2, degree + 1):
            level = raised[n] if n in raised else x.new_empty(*x.shape[:-1], _count(dim, n))
            parents = lower * monomials.tail_weight(n, x)
            for j, (at, start, stop) in enumerate(monomials.blocks(n)):
                torch.mul(parents[..., :stop], x[..., j : j + 1], out=level[..., at : at + stop])
                parents[..., start:stop] = lower[..., start:stop]
            lower = level
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Monomials, int], output: Tensor) -> None:
        x, ctx.monomials, ctx.least = inputs
        ctx.save_for_backward(x, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x, out), monomials, least = ctx.saved_tensors, ctx.monomials, ctx.least
        if torch.is_grad_enabled():  # a gradient that is differentiated again comes from the twin
            again = monomials.gather(x, least)
            return torch.autograd.grad(again, x, grad, create_graph=True)[0], None, None
        dim, degree = monomials.dim, monomials.degree
        lowest = min(least, 1)
        if least > 1:  # the lower degrees were not kept
            out = _Blocks.forward(x, monomials, lowest)
        raised, grads = _split(out, dim, lowest, degree), _split(grad, dim, least, degree)
        of_x = torch.zeros_like(x)
        of_level = grads[degree]
        for n in range(degree, 1, -1):
            weight = monomials.tail_weight(n, x)
            parents = raised[n - 1] * weight
            of_lower = torch.zeros_like(parents)
            for j, (at, start, stop) in enumerate(monomials.blocks(n)):
                block = of_level[..., at : at + stop]
                of_x[..., j] += (block * parents[..., :stop]).sum(-1)
                of_lower[..., :stop].addcmul_(block, x[..., j : j + 1])
                of_lower[..., start:stop] *= weight[start:stop]
                parents[..., start:stop] = raised[n - 1][..., start:stop]
            of_level = of_lower + grads[n - 1] if n - 1 in grads else of_lower
        return of_x + of_level, None, None

    @staticmethod
    def vmap(
        info: object, in_dims: tuple[int, None, None], x: Tensor, monomials: Monomials, least: int
    ) -> tuple[Tensor, int]:
        return _Blocks.apply(x.movedim(in_dims[0], 0), monomials, least), 0


def _count(dim: int, degree: int) -> int:
    """How many monomials of ``degree`` there are in ``dim`` variables."""
    return math.comb(dim + degree - 1, degree)


def _split(features: Tensor, dim: int, least: int, degree: int) -> dict[int, Tensor]:
    """The part of each degree."""
    degrees = range(least, degree + 1)
    return dict(zip(degrees, features.split([_count(dim, n) for n in degrees], -1), strict=True))
