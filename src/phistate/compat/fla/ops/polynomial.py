"""Based and ReBased: attention by a polynomial of q·k, as linear attention over its features."""

from __future__ import annotations

import torch
from torch import Tensor

from phistate.compat.arguments import wide
from phistate.compat.fla.ops.call import attend
from phistate.features.polynomial import Polynomial, Taylor


def parallel_based(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, use_norm: bool = True) -> Tensor:
    """o = Σ κ v / (Σ κ + 1e-6), κ = 1 + s + s²/2, s = scale · q·k (Arora et al. 2024, arXiv:2402.18668)."""
    taylor = Taylor(q.shape[-1], order=2, scale=scale)
    return _smoothed(taylor.query(q), taylor.key(k), v, 1e-6 if use_norm else None)


def fused_chunk_based(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, use_norm: bool = True) -> Tensor:
    """As :func:`parallel_based`."""
    return parallel_based(q, k, v, scale, use_norm)


def parallel_rebased(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eps: float = 1e-05,
    use_scale: bool = True,
    use_normalize: bool = True,
    return_both: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """o = Σ κ v / (Σ κ + eps), κ = (q·k)² / K (Aksenov et al. 2024, arXiv:2402.10644).

    ``return_both``: numerator ``[B,H,T,V]`` and denominator ``[B,H,T]`` apart.
    """
    square = Polynomial(q.shape[-1], p=2, scale=None if use_scale else 1.0)
    phi_q, phi_k = square.query(q), square.key(k)
    if return_both:
        o, total = _sums(phi_q, phi_k, v)
        return o.transpose(1, 2).to(q.dtype), total.squeeze(-1).transpose(1, 2).to(q.dtype)
    return _smoothed(phi_q, phi_k, v, eps if use_normalize else None)


def _smoothed(phi_q: Tensor, phi_k: Tensor, v: Tensor, eps: float | None) -> Tensor:
    if eps is None:
        return attend(phi_q, phi_k, v, scale=1.0)[0]
    o, total = _sums(phi_q, phi_k, v)
    return (o / (total + eps)).to(phi_q.dtype)


def _sums(phi_q: Tensor, phi_k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Numerator and denominator, before any rounding: the kernel's sum is a column of ones beside v."""
    with_ones = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    o, total = attend(phi_q, phi_k, with_ones, scale=1.0, dtype=wide(v))[0].split([v.shape[-1], 1], -1)
    return o, total
