"""Additive writes: linear attention, retention, simple GLA, lightning attention and GLA.

Each is S_t = Diag(e^g_t) S_{t-1} + k_t v_tᵀ, o_t = scale · S_tᵀ q_t, with g absent, constant, per head or per channel.
fla's forms of one op (``chunk``, ``fused_chunk``, ``fused_recurrent``, ``parallel``) are one computation here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phistate.compat.arguments import wide
from phistate.compat.fla.ops.call import Result, attend, check_options, check_packed, take_layout
from phistate.compat.fla.precision import widened


def fused_recurrent_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> Result:
    """A decay per head: ``g [B,T,H]``, or ``g_gamma [H]`` the same at every step (with both, their sum)."""
    state_v_first = take_layout(state_v_first, kwargs)
    check_options(kwargs)
    decay = g if g_gamma is None else g_gamma.detach() if g is None else widened(g) + g_gamma.detach()
    return attend(
        q,
        k,
        v,
        decay=decay,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        reverse=reverse,
        cu_seqlens=cu_seqlens,
        gate="g" if g_gamma is None else "g_gamma",
    )


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **kwargs: Any,
) -> Result:
    """As :func:`fused_recurrent_simple_gla`."""
    return fused_recurrent_simple_gla(
        q, k, v, g, g_gamma, scale, initial_state, output_final_state, False, state_v_first, cu_seqlens, **kwargs
    )


def fused_chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """As :func:`fused_recurrent_simple_gla`."""
    return fused_recurrent_simple_gla(
        q, k, v, g, g_gamma, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens
    )


def parallel_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    output_attentions: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> Result:
    """As :func:`fused_recurrent_simple_gla`; the second value is the matrix of weights ``[B,H,T,T]``, if asked for."""
    o, _ = fused_recurrent_simple_gla(q, k, v, g, None, scale, cu_seqlens=cu_seqlens)
    if not output_attentions:
        return o, None
    if cu_seqlens is not None:
        raise ValueError("output_attentions: got True beside cu_seqlens; takes it for sequences that are not packed")
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    weights = torch.einsum("bthk,bshk->bhts", widened(q) * scale, widened(k))
    if g is not None:
        total = widened(g).cumsum(1).transpose(1, 2)
        weights = weights * (total.unsqueeze(-1) - total.unsqueeze(-2)).clamp(max=0).exp()
    return o, weights.tril().to(q.dtype)


def chunk_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Any]:
    """Linear attention; with ``normalize`` divided by qᵀz, z = Σ k, and the state is (S, z), given back always."""
    return fused_recurrent_linear_attn(q, k, v, scale, initial_state, output_final_state, False, normalize, cu_seqlens)


def fused_chunk_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Any]:
    """As :func:`chunk_linear_attn`."""
    return chunk_linear_attn(q, k, v, scale, initial_state, output_final_state, normalize, cu_seqlens)


def fused_recurrent_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    reverse: bool = False,
    normalize: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Any]:
    """As :func:`chunk_linear_attn`.

    The sum of the kernel is a column of ones beside v, so that q and k of either sign are taken as fla takes them; fla
    adds 1e-10 to it.
    """
    if not normalize:
        return attend(
            q,
            k,
            v,
            scale=scale,
            initial_state=initial_state,
            output_final_state=output_final_state,
            reverse=reverse,
            cu_seqlens=cu_seqlens,
        )
    s, z = initial_state if isinstance(initial_state, tuple) else (initial_state, None)
    check_packed(q, cu_seqlens, None if s is None else s.shape[0])
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    kept = None
    if s is not None or z is not None:
        shape = (sequences, k.shape[2], k.shape[3])
        s = q.new_zeros(*shape, v.shape[-1], dtype=wide(q)) if s is None else s
        z = q.new_zeros(*shape, dtype=wide(q)) if z is None else z.squeeze(1)
        kept = torch.cat([widened(s), widened(z).unsqueeze(-1)], -1)
    common = torch.promote_types(q.dtype, v.dtype)
    with_ones = torch.cat([v.to(common), torch.ones_like(v[..., :1], dtype=common)], -1)
    o, state = attend(
        q,
        k,
        with_ones,
        scale=scale,
        initial_state=kept,
        output_final_state=True,
        reverse=reverse,
        cu_seqlens=cu_seqlens,
        dtype=common,
    )
    assert state is not None  # it was asked for
    o, total = widened(o).split([v.shape[-1], 1], -1)
    s = state[..., :-1].contiguous() if output_final_state else None
    return (o / (total + 1e-10)).to(q.dtype), (s, state[..., -1].unsqueeze(1))


def fused_recurrent_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> Result:
    """Head h keeps 1 - 2^(-5-h) of its state at every step (Sun et al. 2023, arXiv:2307.08621)."""
    return fused_recurrent_simple_gla(
        q,
        k,
        v,
        None,
        _retained(q),
        scale,
        initial_state,
        output_final_state,
        reverse,
        state_v_first,
        cu_seqlens,
        **kwargs,
    )


def chunk_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> Result:
    """As :func:`fused_recurrent_retention`."""
    check_options(kwargs)
    return fused_recurrent_retention(q, k, v, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens)


def fused_chunk_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """As :func:`fused_recurrent_retention`."""
    return fused_recurrent_retention(q, k, v, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens)


def parallel_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    output_attentions: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """As :func:`fused_recurrent_retention`; the second value is the matrix of weights, if asked for."""
    return parallel_simple_gla(q, k, v, _retained(q).expand(q.shape[:3]), scale, output_attentions, cu_seqlens)


def _retained(q: Tensor) -> Tensor:
    heads = torch.arange(q.shape[2], dtype=wide(q), device=q.device)
    return (1 - 2.0 ** (-5.0 - heads)).log()


def fused_recurrent_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """Head h of layer l decays by (8/H)(1 - l/L) h nats a step (Qin et al. 2024, arXiv:2405.17381)."""
    heads = q.shape[2]
    slopes = 8 / heads * (1 - layer_idx / num_layers) * torch.arange(heads, dtype=wide(q), device=q.device)
    return fused_recurrent_simple_gla(
        q, k, v, None, -slopes, scale, initial_state, output_final_state, reverse, cu_seqlens=cu_seqlens
    )


def chunk_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> Result:
    """As :func:`fused_recurrent_lightning_attn`."""
    check_options(kwargs)
    return fused_recurrent_lightning_attn(
        q, k, v, layer_idx, num_layers, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens
    )


def fused_recurrent_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> Result:
    """A decay per channel of the keys, ``gk [B,T,H,K]``, and of the values, ``gv [B,T,H,V]``."""
    state_v_first = take_layout(state_v_first, kwargs)
    check_options(kwargs)
    return attend(
        q,
        k,
        v,
        decay=gk,
        decay_of_values=gv,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        reverse=reverse,
        cu_seqlens=cu_seqlens,
        gate="gk" if gv is None else "gk or gv",
    )


def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> Result:
    """A decay per channel of the keys, ``g [B,T,H,K]`` (Yang et al. 2023, arXiv:2312.06635)."""
    return attend(
        q,
        k,
        v,
        decay=g,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
    )
