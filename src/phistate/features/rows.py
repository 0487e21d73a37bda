"""Random rows ω ~ N(0, I): independent, orthogonal or simplex, and what a pair of them has in common."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Rows = Literal["independent", "orthogonal", "simplex"]
"""How the rows of one block of D lie to each other; every row by itself is N(0, I) in each."""


def draw_rows(count: int, dim: int, rows: Rows, generator: torch.Generator | None = None) -> Tensor:
    """``count`` rows ω ~ N(0, I_D), coupled within blocks of D: ``[count, D]`` in float64.

    Orthogonal and simplex rows are directions turned by one Haar rotation a block, times independent chi(D)
    norms. Every block is a fresh draw, and rows beyond a whole block are cut from a fresh block.

    Args:
        count: how many rows.
        dim: D.
        rows: ``"independent"``, ``"orthogonal"`` or ``"simplex"`` (D ≥ 2).
        generator: where the draw comes from; None: torch's default generator.

    Papers: orthogonal rows, Yu et al. 2016, arXiv:1610.09072; simplex rows, Reid et al. 2023,
    arXiv:2301.13856.
    """
    device = torch.device("cpu") if generator is None else generator.device

    def gaussian(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, device=device, generator=generator)

    if rows == "independent":
        return gaussian(count, dim)
    blocks = -(-count // dim)
    rotation, upper = torch.linalg.qr(gaussian(blocks, dim, dim))
    # Householder QR leaves signs that depend on the block, which is Haar only once diag R is made positive.
    rotation = rotation * torch.where(upper.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).unsqueeze(-2)
    if rows == "simplex":
        rotation = simplex(dim).to(device) @ rotation
    norms = gaussian(blocks * dim, dim).norm(dim=-1)
    return rotation.reshape(-1, dim)[:count] * norms[:count, None]


def simplex(dim: int) -> Tensor:
    """D unit vectors with pairwise products −1/(D−1), summing to zero: ``[D, D]`` in float64.

    s_i = √(D/(D−1)) e_i − (√D+1)/(D−1)^{3/2} (1,…,1,0) for i < D; s_D = (1,…,1,0)/√(D−1).

    Raises:
        ValueError: ``dim`` below 2, where there is no simplex.

    Paper: Reid et al. 2023, arXiv:2301.13856.
    """
    if dim < 2:
        raise ValueError(f"head_dim: got {dim}; simplex rows take at least 2")
    ones = torch.ones(dim, dtype=torch.float64)
    ones[-1] = 0
    vectors = math.sqrt(dim / (dim - 1)) * torch.eye(dim, dtype=torch.float64)
    vectors -= (math.sqrt(dim) + 1) / (dim - 1) ** 1.5 * ones
    vectors[-1] = ones / math.sqrt(dim - 1)
    return vectors


def pair_excess(squared: Tensor, dim: int, rows: Rows, *, sign: int = 1) -> Tensor:
    """How much two rows of one block agree on z: E[e^{±(ω₁+ω₂)·z}] / e^{±‖z‖²} − 1; 0 if independent.

    ω₁+ω₂ has a uniform direction and squared length S·(1 − c·sin φ), where S ~ chi²(2D), c = −cos of the
    angle between the rows (0, or 1/(D−1) for a simplex) and φ has density ∝ sin^{D−1} on (0, π). With t =
    ‖z‖²/2 that gives e^{−2t} E_φ[₁F₁(D; D/2; t(1 − c·sin φ))], and the same with t → −t for cosines.

    Args:
        squared: ‖z‖², float64.
        dim: D.
        rows: how the rows are coupled.
        sign: 1 for exponentials e^{ω·z}; −1 for cosines, E[cos(ω₁·z)cos(ω₂·z)] / e^{−‖z‖²} − 1 (orthogonal
            rows only).
    """
    if rows == "independent":
        return torch.zeros_like(squared)
    half = sign * squared / 2
    if rows == "orthogonal":
        return (-half).exp() * _kummer(dim, half) - 1
    # An even number of midpoints on (0, π): the integrand is smooth and periodic, so the rule converges
    # exponentially.
    angle = (torch.arange(256, dtype=torch.float64) + 0.5) * (math.pi / 256)
    weight = angle.sin() ** (dim - 1)
    weight /= weight.sum()
    shrink = 1 - angle.sin() / (dim - 1)
    reduced = half.unsqueeze(-1) * shrink
    return ((reduced - 2 * half.unsqueeze(-1)).exp() * _kummer(dim, reduced) * weight).sum(-1) - 1


def _kummer(dim: int, t: Tensor) -> Tensor:
    """e^{−t} ₁F₁(D; D/2; t) = ₁F₁(−D/2; D/2; −t), by its series."""
    terms = 64 + int(4 * float(t.abs().max())) if t.numel() else 1
    k = torch.arange(terms, dtype=torch.float64)
    ratio = (dim / 2 - k) / ((dim / 2 + k) * (k + 1)) * t.unsqueeze(-1)
    return 1 + ratio.cumprod(-1).sum(-1)


def variance_of_mean(own: Tensor, excess: Tensor, count: int, dim: int) -> Tensor:
    """Variance of a mean over rows: ``own`` for each, covariance ``excess`` within blocks of D."""
    whole, rest = divmod(count, dim)
    pairs = whole * dim * (dim - 1) + rest * (rest - 1)
    return (count * own + pairs * excess) / count**2
