"""RWKV-6, and the generalised delta rule of RWKV-7: a write that erases by one key and adds by another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phistate.compat.arguments import wide
from phistate.compat.fla.ops.call import LEAST, Result, attend, check_options, check_packed, refuse, turned
from phistate.compat.fla.precision import widened


def fused_recurrent_rwkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """RWKV-6 (Peng et al. 2024, arXiv:2404.05892) reads before it writes, and gives the present token a bonus.

    ::

        o_t = scale · (S_{t-1} + Diag(u) k_t v_tᵀ)ᵀ r_t
        S_t = Diag(e^w_t) S_{t-1} + k_t v_tᵀ

    ``w [B,T,H,K]`` log-decay, ``u [H,K]``. The state before step t is what a scan over the steps before it leaves: k, v
    and w move on by one, and each sequence gets one step more, after which its last write is in the state.
    """
    check_packed(r, cu_seqlens, None if initial_state is None else initial_state.shape[0])
    if reverse:
        back = turned(r, cu_seqlens)
        r, k, v, w = (back(x) for x in (r, k, v, w))
    steps = torch.arange(r.shape[1], device=r.device)
    sequences, before = 1, torch.zeros_like(steps)
    if cu_seqlens is not None:
        offsets = cu_seqlens.to(r.device, torch.int64)
        sequences = offsets.numel() - 1
        before = torch.repeat_interleave(torch.arange(sequences, device=r.device), offsets.diff())
        cu_seqlens = offsets + torch.arange(sequences + 1, device=r.device)
    reads, writes = steps + before, steps + before + 1

    def moved(x: Tensor, to: Tensor) -> Tensor:
        longer = x.new_zeros(x.shape[0], x.shape[1] + sequences, *x.shape[2:])
        return longer.index_copy(1, to, x)

    past, state = attend(
        moved(r, reads),
        moved(k, writes),
        moved(v, writes),
        decay=moved(widened(w), writes),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        dtype=wide(r),
        gate="w",
    )
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    group = r.shape[2] // k.shape[2]
    keys, values = (widened(x).repeat_interleave(group, 2) for x in (k, v))
    bonus = (widened(r) * widened(u) * keys).sum(-1, keepdim=True) * values
    o = past.index_select(1, reads) + scale * bonus
    if reverse:
        o = back(o)
    return o.to(v.dtype), state


def chunk_rwkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **kwargs: Any,
) -> Result:
    """As :func:`fused_recurrent_rwkv6`."""
    check_options(kwargs)
    return fused_recurrent_rwkv6(r, k, v, w, u, scale, initial_state, output_final_state, False, cu_seqlens)


def fused_recurrent_dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gk: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """Diagonal plus low rank: S_t = (Diag(e^gk_t) + b_t a_tᵀ) S_{t-1} + k_t v_tᵀ, o_t = scale · S_tᵀ q_t.

    Two delta writes a token. The first decays and erases: key b, value 0, erase key −a e^−gk, since the equation erases
    from the decayed state and this one from the state before. The second adds: key k, value v, and erases by 0.
    """
    return _generalised(q, k, v, a, b, gk, scale, initial_state, output_final_state, reverse, cu_seqlens, v.dtype)


def chunk_dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gk: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False,
    chunk_size: int | None = None,
    disable_recompute: bool = False,
    cp_context: Any = None,
    lower_bound: float | None = None,
    **kwargs: Any,
) -> Result:
    """As :func:`fused_recurrent_dplr_delta_rule`.

    ``safe_gate``, ``lower_bound`` and ``disable_recompute`` change nothing here.
    """
    check_options(kwargs | {"chunk_size": chunk_size})
    refuse(cp_context=cp_context)
    if lower_bound is not None and lower_bound >= 0:
        raise ValueError(f"lower_bound: got {lower_bound}; takes a negative bound of the log-decay, or None")
    return _generalised(q, k, v, a, b, gk, scale, initial_state, output_final_state, False, cu_seqlens, q.dtype)


def fused_recurrent_iplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """Identity plus low rank: :func:`fused_recurrent_dplr_delta_rule` without decay."""
    return _generalised(q, k, v, a, b, None, scale, initial_state, output_final_state, False, cu_seqlens, v.dtype)


def chunk_iplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **kwargs: Any,
) -> Result:
    """As :func:`fused_recurrent_iplr_delta_rule`."""
    check_options(kwargs)
    return _generalised(q, k, v, a, b, None, scale, initial_state, output_final_state, False, cu_seqlens, q.dtype)


def fused_recurrent_rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """RWKV-7 (Peng et al. 2025, arXiv:2503.14456): :func:`fused_recurrent_dplr_delta_rule` in its own order."""
    return _generalised(
        r, k, v, a, b, w, scale, initial_state, output_final_state, False, cu_seqlens, v.dtype, gate="w"
    )


def chunk_rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False,
    chunk_size: int | None = None,
    disable_recompute: bool = False,
    cp_context: Any = None,
    lower_bound: float | None = None,
) -> Result:
    """As :func:`fused_recurrent_rwkv7`, with scale 1."""
    check_options({"chunk_size": chunk_size})
    refuse(cp_context=cp_context)
    return _generalised(
        r, k, v, a, b, w, scale, initial_state, output_final_state, False, cu_seqlens, r.dtype, gate="w"
    )


def fused_mul_recurrent_rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    kk: Tensor,
    a: Tensor,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """RWKV-7's step: erases by −kk and writes what it erased by kk · a."""
    return _generalised(
        r, k, v, -kk, kk * a, w, scale, initial_state, output_final_state, reverse, cu_seqlens, v.dtype, gate="w"
    )


def _generalised(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    decay: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    reverse: bool,
    cu_seqlens: Tensor | None,
    dtype: torch.dtype,
    gate: str = "gk",
) -> Result:
    check_packed(q, cu_seqlens, None if initial_state is None else initial_state.shape[0])
    if reverse:
        back = turned(q, cu_seqlens)
        q, k, v, a, b = (back(x) for x in (q, k, v, a, b))
        decay = None if decay is None else back(decay)
    erase = -a
    if decay is not None:
        decay = widened(decay).clamp(min=LEAST)
        erase = widened(erase) * (-decay).exp()
        if q.dtype == torch.float16:
            q, k, v, b = (x.float() for x in (q, k, v, b))
        erase = erase.to(q.dtype)
        decay = _pairs(decay, torch.zeros_like(decay))
    o, state = attend(
        _pairs(torch.zeros_like(q), q),
        _pairs(b, k),
        _pairs(torch.zeros_like(v), v),
        decay=decay,
        erase=_pairs(erase, torch.zeros_like(k)),
        write="delta",
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=None if cu_seqlens is None else 2 * cu_seqlens,
        dtype=dtype,
        gate=gate,
    )
    o = o[:, 1::2].contiguous()
    return back(o) if reverse else o, state


def _pairs(first: Tensor, second: Tensor) -> Tensor:
    """``[B,T,…]`` twice ``-> [B,2T,…]``: both micro-steps of each token, in turn."""
    return torch.stack([first, second], 2).flatten(1, 2)
