"""Delta writes that erase by another key than they write: Comba and Gated DeltaNet-2."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phistate.compat.fla.ops.call import LEAST, Result, attend, check_options, refuse, take_layout
from phistate.compat.fla.ops.gates import check_bound, fused_kda_gate
from phistate.compat.fla.precision import l2norm, widened


def chunk_comba(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor | None,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> Result:
    """Comba (Hu et al. 2025, arXiv:2506.02475): S_t = e^g_t S_{t-1} + β_t k_t (v_t − S_{t-1}ᵀ p_t)ᵀ.

    ``p [B,T,H,K]``, None: k. It reads the state before its decay; the equation, the one after: β e^−g and v e^g put
    that right.
    """
    p = k if p is None else p
    if p.shape[2] != k.shape[2]:
        raise ValueError(f"p: got {p.shape[2]} heads; takes {k.shape[2]}, as k has")
    if use_qk_l2norm_in_kernel:
        p = l2norm(widened(p))
    dtype = q.dtype
    if dtype == torch.float16:  # e^60 is beyond it
        q, k, v = q.float(), k.float(), v.float()
    g = widened(g).clamp(min=LEAST)
    gain = (-g).exp()
    if beta is not None:
        gain = widened(beta) * (gain if beta.ndim == 3 else gain.unsqueeze(-1))
    return attend(
        q,
        k,
        (widened(v) * g.exp().unsqueeze(-1)).to(v.dtype),
        decay=g,
        beta=gain,
        erase=p.to(k.dtype),
        write="delta",
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        qk_l2norm=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        dtype=dtype,
    )


def fused_recurrent_comba(
    q: Tensor,
    k: Tensor,
    p: Tensor | None,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """As :func:`chunk_comba`, with p before v."""
    return chunk_comba(
        q, k, v, p, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
    )


def chunk_gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cp_context: Any = None,
    **kwargs: Any,
) -> Result:
    """Gated DeltaNet-2: S_t = S'_t + k_t (w_t ⊙ v_t − S'_tᵀ (b_t ⊙ k_t))ᵀ, a decay per channel.

    ``g, b [B,T,H,K]``, ``w [B,T,H,V]``. ``use_gate_in_kernel``: as in :func:`~phistate.compat.fla.ops.delta.chunk_kda`.
    """
    state_v_first = take_layout(state_v_first, kwargs)
    A_log, dt_bias = kwargs.pop("A_log", None), kwargs.pop("dt_bias", None)
    check_options(kwargs, (64,))
    refuse(cp_context=cp_context, return_intermediate_states=return_intermediate_states)
    check_bound(lower_bound, safe_gate and use_gate_in_kernel)
    gate = (A_log, dt_bias, lower_bound) if use_gate_in_kernel else None
    return _gdn2(
        q,
        k,
        v,
        g,
        b,
        w,
        gate,
        use_qk_l2norm_in_kernel,
        scale,
        initial_state,
        output_final_state,
        state_v_first,
        cu_seqlens,
        q.dtype,
    )


def fused_recurrent_gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> Result:
    """As :func:`chunk_gdn2`; v, g, b and w may have more heads than q and k, in groups."""
    state_v_first = take_layout(state_v_first, kwargs)
    check_options(kwargs)
    gate = (A_log, dt_bias, lower_bound) if use_gate_in_kernel else None
    return _gdn2(
        q,
        k,
        v,
        g,
        b,
        w,
        gate,
        use_qk_l2norm_in_kernel,
        scale,
        initial_state,
        output_final_state,
        state_v_first,
        cu_seqlens,
        v.dtype,
    )


def _gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    gate: tuple[Tensor | None, Tensor | None, float | None] | None,
    normalise: bool,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
    dtype: torch.dtype,
) -> Result:
    if normalise:
        q, k = l2norm(q), l2norm(k)
    if k.shape[2] != v.shape[2]:  # the erase key is each value head's own
        k = k.repeat_interleave(v.shape[2] // k.shape[2], 2)
    return attend(
        q,
        k,
        (widened(w) * widened(v)).to(v.dtype),
        decay=g if gate is None else fused_kda_gate(g, *gate),
        erase=(widened(b) * widened(k)).to(k.dtype),
        write="delta",
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        dtype=dtype,
    )
