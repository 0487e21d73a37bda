"""Two passes through a few slots, and keys normalised by their own running sum: GSA and LightNet."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from phistate.compat.arguments import wide
from phistate.compat.fla.ops.call import Result, attend, check_options, check_packed
from phistate.compat.fla.precision import widened

Pair = tuple[Tensor | None, Tensor | None]


def fused_additive_gate(
    x: Tensor,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
    gate_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """k_t = e^(x_t − z_t) and g_t = z_{t-1} − z_t, z_t = log Σ_{s≤t} e^x_s: weights that sum to one at every step.

    ``x [B,T,H,K]``; z to begin with and at the end ``[N,1,H,K]``, float32. The first g of a sequence that begins from
    nothing is 0.
    """
    check_packed(x, cu_seqlens, None)
    bounds = [0, x.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    sequences = x.shape[0] if cu_seqlens is None else len(bounds) - 1
    if initial_state is None:
        before = x.new_full((sequences, 1, *x.shape[2:]), -torch.inf, dtype=wide(x))
    elif initial_state.shape != (sequences, 1, *x.shape[2:]):
        takes = (sequences, 1, *x.shape[2:])
        raise ValueError(f"initial_state: got shape {tuple(initial_state.shape)}; takes {takes}")
    else:
        before = initial_state.to(wide(x))
    sums, last = [], []
    for i, (begin, end) in enumerate(itertools.pairwise(bounds)):
        first = before if cu_seqlens is None else before[i : i + 1]
        z = torch.cat([first, torch.logaddexp(first, widened(x[:, begin:end]).logcumsumexp(1))], 1)
        sums.append(z)
        last.append(z[:, -1:])
    z, past = (torch.cat(parts, 1) for parts in ([z[:, 1:] for z in sums], [z[:, :-1] for z in sums]))
    share = (widened(x) - z).exp()
    # What is kept is 1 - share; the difference of the sums is that too, rounded to a unit of z.
    fresh = past == -torch.inf
    kept = torch.where(share < 0.5, torch.log1p(-share.clamp(max=0.5)), past.masked_fill(fresh, 0.0) - z)
    g = kept.masked_fill(fresh, 0.0).clamp(max=0.0)
    return share.to(output_dtype or x.dtype), g.to(gate_dtype or x.dtype), torch.cat(last)


def fused_recurrent_lightnet(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Pair | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor | None, Tensor]]:
    """LightNet (Qin et al. 2024, arXiv:2405.21022): GLA whose keys and decays :func:`fused_additive_gate` makes of k.

    States are (S, z), z given back always.
    """
    s, z = (None, None) if initial_state is None else initial_state
    keys, g, z = fused_additive_gate(k, z, cu_seqlens)
    o, s = attend(
        q,
        keys,
        v,
        decay=g,
        scale=scale,
        initial_state=s,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
    )
    return o, (s, z)


def chunk_lightnet(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Pair | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor | None, Tensor]]:
    """As :func:`fused_recurrent_lightnet`."""
    return fused_recurrent_lightnet(q, k, v, scale, initial_state, output_final_state, state_v_first, cu_seqlens)


def fused_recurrent_gsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_state: Pair | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, list[Tensor | None]]:
    """Gated slot attention (Zhang et al. 2024, arXiv:2409.07146): softmax over M slots that the past was written into.

    Per head, with s_t how much each slot takes and e^g_t what it keeps::

        Hk_t = Hk_{t-1} Diag(e^g_t) + k_t s_tᵀ            K × M: the decay is one of values
        Hv_t = Diag(e^g_t) Hv_{t-1} + s_t v_tᵀ            M × V
        o_t  = Hv_tᵀ softmax(scale · Hk_tᵀ q_t)

    ``s, g [B,T,H,M]``; g None: both are made of s by :func:`fused_additive_gate`. States are [Hk, Hv].
    """
    states = None if initial_state is None or initial_state[0] is None else initial_state[0].shape[0]
    check_packed(q, cu_seqlens, states)
    if g is None:
        s, g, _ = fused_additive_gate(s, None, cu_seqlens, k.dtype, wide(s))
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"q: got {q.shape[2]} heads; takes a multiple of the keys' {k.shape[2]}")
    hk, hv = (None, None) if initial_state is None else initial_state
    group = q.shape[2] // k.shape[2]

    def run(q: Tensor, k: Tensor, v: Tensor, **gate: Any) -> Result:
        return attend(q, k, v, output_final_state=output_final_state, reverse=reverse, cu_seqlens=cu_seqlens, **gate)

    keys, slots, gates = (x.repeat_interleave(group, 2) if group > 1 else x for x in (k, s, g))
    if hk is not None and group > 1:
        hk = hk.repeat_interleave(group, 1)
    scores, hk = run(q, keys, slots, decay_of_values=gates, scale=scale, initial_state=hk)
    read = widened(scores).softmax(-1).to(q.dtype)
    o, hv = run(read, s, v, decay=g, scale=1.0, initial_state=hv)
    return o, [hk if hk is None else hk[:, ::group].contiguous(), hv]


def chunk_gsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_state: Pair | None = None,
    output_final_state: bool = False,
    checkpoint_level: int = 2,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, list[Tensor | None]]:
    """As :func:`fused_recurrent_gsa`; ``checkpoint_level`` (0, 1 or 2) changes nothing here."""
    check_options(kwargs)
    if checkpoint_level not in (0, 1, 2):
        raise ValueError(f"checkpoint_level: got {checkpoint_level!r}; takes 0, 1 or 2")
    return fused_recurrent_gsa(q, k, v, s, g, scale, initial_state, output_final_state, False, cu_seqlens)
