"""What stands around the recurrence in an RWKV layer: ``fla.ops.rwkv7``, all but the recurrence."""

from __future__ import annotations

import torch
from torch import Tensor

from phistate.compat.fla.precision import widened


def fused_addcmul_rwkv7(
    hidden_states: Tensor,
    delta: Tensor,
    xr: Tensor,
    xw: Tensor,
    xk: Tensor,
    xv: Tensor,
    xa: Tensor,
    xg: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """``hidden_states + delta · x`` for each of the mixing weights; None for one that is None."""
    h, d = widened(hidden_states), widened(delta)
    r, w, k, v, a = ((h + d * widened(x)).to(hidden_states.dtype) for x in (xr, xw, xk, xv, xa))
    return r, w, k, v, a, None if xg is None else (h + d * widened(xg)).to(hidden_states.dtype)


def fused_k_rwkv7(
    k: Tensor, a: Tensor, ka: Tensor, cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None
) -> Tensor:
    """``k (1 + (a - 1) ka)``, token by token: how they are packed does not matter."""
    return (widened(k) * (1 + (widened(a) - 1) * widened(ka))).to(k.dtype)


def gate_output_correction(o: Tensor, r: Tensor, k: Tensor, r_k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """``(o + (r · k · r_k) v) g`` with ``r, k, v [B,T,H,D]``, ``r_k [H,D]`` and ``o, g [B,T,H·D]``."""
    bonus = (widened(r) * widened(k) * widened(r_k)).sum(-1, keepdim=True) * widened(v)
    return ((widened(o) + bonus.reshape(o.shape)) * widened(g)).to(o.dtype)


def channel_mixing_rwkv7(
    x: Tensor, x_prev: Tensor, x_k: Tensor, key_weight: Tensor, value_weight: Tensor, inplace: bool = True
) -> tuple[Tensor, Tensor]:
    """``relu((x_t + (x_{t-1} - x_t) x_k) key_weight)² value_weight``, and the last row of ``x``.

    ``x [B,T,D]`` follows ``x_prev [B,D]``. ``inplace`` saves memory in fla and changes nothing here.
    """
    if x.ndim != 3:
        raise ValueError(f"x: got shape {tuple(x.shape)}; takes [B,T,D]")
    current = widened(x)
    before = torch.cat([widened(x_prev).reshape(x.shape[0], 1, x.shape[2]), current[:, :-1]], 1)
    mixed = (current + (before - current) * widened(x_k)).to(x.dtype)
    key = widened(mixed @ key_weight).relu().square().to(x.dtype)
    return key @ value_weight, x[-1]
