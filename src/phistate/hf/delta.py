"""Gated delta rule and Kimi delta attention, under the signatures transformers' layers call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from phistate.compat.packing import packing
from phistate.compat.states import state_of
from phistate.ops.backends import native
from phistate.ops.linear_attention import linear_attention, linear_attention_step_

Result = tuple[Tensor, Tensor | None]


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    seq_idx: Tensor | None = None,
    **kwargs: Any,
) -> Result:
    """S ← e^g S + β k (v − (e^g S)ᵀ k)ᵀ, o = K^-½ Sᵀ q, over all tokens; g per head, or per head and channel (KDA).

    ``query, key [B,T,Hk,K]``, ``value [B,T,Hv,V]``, ``g [B,T,Hv]`` or ``[B,T,Hv,K]``, ``beta [B,T,Hv]``, states
    ``[B,Hv,K,V]`` float32. ``chunk_size`` only says how transformers would cut the work. Layers hand on whatever their
    own caller gave them, so what is left in ``kwargs`` is not for this function, exactly as in transformers.
    """
    pack = packing(query, cu_seqlens, cu_seq_lens_q, seq_idx)
    if pack is not None:
        query, key, value, g, beta = (pack.fold(x) for x in (query, key, value, g, beta))
        initial_state = pack.enter(initial_state)
    out, state = linear_attention(
        query,
        key,
        value,
        decay=g,
        beta=beta,
        write="delta",
        qk_l2norm=use_qk_l2norm_in_kernel,
        initial_state=None if initial_state is None else state_of(initial_state, query),
        return_state=True,
        cu_seqlens=None if pack is None else pack.offsets,
    )
    if pack is None:
        return out, state.s if output_final_state else None
    return pack.unfold(out), pack.leave(state.s) if output_final_state else None


def delta_rule_steps(original: Callable[..., Result]) -> Callable[..., Result]:
    """One token after a cached state, which is overwritten: the cache would copy the new state into it anyhow.

    A call that wants no state back, or a gradient, leaves the state as it is. Without native kernels transformers' own
    step is as good.
    """
    if native.why_not() is not None:
        return original

    def steps(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> Result:
        state = None if initial_state is None else state_of(initial_state, query)
        packed = any(kwargs.get(name) is not None for name in ("cu_seqlens", "cu_seq_lens_q", "seq_idx"))
        one = query.shape[1] == 1 and not packed and not torch.is_grad_enabled()
        if state is None or state.s is not initial_state or not (one and output_final_state):
            return delta_rule(
                query, key, value, g, beta, 64, initial_state, output_final_state, use_qk_l2norm_in_kernel, **kwargs
            )
        out = linear_attention_step_(
            state, query, key, value, decay=g, beta=beta, write="delta", qk_l2norm=use_qk_l2norm_in_kernel
        )
        return out, state.s

    return steps
