"""Mamba-1's and Mamba-2's scans and steps, under the signatures transformers' layers call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phistate.compat.packing import packing
from phistate.compat.states import state_of
from phistate.hf.handover import current
from phistate.ops.backends import native
from phistate.ops.mamba2 import mamba2_scan
from phistate.ops.selective_scan import selective_scan, selective_scan_step_

_NO_LIMIT = (0.0, float("inf"))


def selective(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    use_mambapy: bool = False,
    use_associative_scan: bool = False,
    **kwargs: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Mamba-1 over all tokens; ``hidden_states, dt, z [B,D,T]``, ``B, C [B,N,T]``, state ``[B,D,N]``.

    The two ``use_`` flags choose among transformers' own ways to compute the same.
    """
    x, dt, B, C = (t.transpose(1, 2) for t in (hidden_states, dt, B, C))
    z = None if z is None else z.transpose(1, 2)
    call = current()
    kept = call.take_state()
    if kept is not None:
        kept = kept.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    pack = call.pack
    if pack is not None:
        x, dt, B, C = (pack.fold(t) for t in (x, dt, B, C))
        z = None if z is None else pack.fold(z)
        kept = pack.enter(kept)
    offsets = None if pack is None else pack.offsets
    out, state = selective_scan(
        x, dt, A, B, C, D, z, delta_bias, delta_softplus, kept, return_state=True, cu_seqlens=offsets
    )
    if pack is not None:
        out, state = pack.unfold(out), pack.leave(state)
    out = out.transpose(1, 2)
    return (out, state) if return_last_state else out


def selective_update(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Mamba-1's decode step; ``state [B,D,N]`` in place, everything else without time."""
    if native.why_not() is not None:
        return original

    def update(
        state: Tensor,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        z: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if torch.is_grad_enabled():
            return original(state, hidden_states, dt, A, B, C, D, dt_bias, dt_softplus, z)
        return selective_scan_step_(state, hidden_states, dt, A, B, C, D, z, dt_bias, dt_softplus)

    return update


def ssd(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] | None = _NO_LIMIT,
    return_final_states: bool = False,
    z: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    seq_idx: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Mamba-2 over all tokens: ``hidden_states [B,T,H,P]``, ``dt [B,T,H]``, ``B, C [B,T,G,N]``, state ``[B,H,P,N]``."""
    pack = packing(hidden_states, None, cu_seq_lens_q, seq_idx)
    if pack is not None:
        hidden_states, dt, B, C = (pack.fold(x) for x in (hidden_states, dt, B, C))
        z = None if z is None else pack.fold(z)
        initial_states = pack.enter(initial_states)
    out, state = mamba2_scan(
        hidden_states,
        dt,
        A,
        B,
        C,
        D,
        z,
        dt_bias,
        dt_softplus,
        _NO_LIMIT if dt_limit is None else (dt_limit[0], dt_limit[1]),
        None if initial_states is None else state_of(initial_states.transpose(2, 3), hidden_states),
        return_state=True,
        cu_seqlens=None if pack is None else pack.offsets,
    )
    # The cache keeps the layout of the first state it is given, and the step wants this one.
    s = state.s.transpose(2, 3).contiguous()
    if pack is not None:
        out, s = pack.unfold(out), pack.leave(s)
    # FalconH1 calls view() on it.
    out = out.contiguous()
    return (out, s) if return_final_states else out


def ssd_update(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Mamba-2's decode step; ``state [B,H,P,N]`` in place, x and dt ``[B,H,P]``, ``A [H,P,N]`` with one rate a head."""
    no_kernels = native.why_not() is not None

    def update(
        state: Tensor,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        z: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        limits = current().limits
        if limits is not None:
            # No step knows limits, so Δ is made here.
            dt = dt.float() if dt_bias is None else dt.float() + dt_bias
            dt = (F.softplus(dt) if dt_softplus else dt).clamp(*limits)
            dt_bias, dt_softplus = None, False
        one_rate = A.stride(1) == A.stride(2) == 0
        if no_kernels or torch.is_grad_enabled() or not one_rate or not state.is_contiguous():
            return original(state, hidden_states, dt, A, B, C, D, dt_bias, dt_softplus, z)
        rows, heads, P, N = state.shape
        channels = heads * P
        # A head's channels share a rate, a Δ and a group: Mamba-2's step is Mamba-1's on H·P channels.
        out = selective_scan_step_(
            state.view(rows, channels, N),
            hidden_states.reshape(rows, channels),
            dt.reshape(rows, channels),
            A[:, :, 0].reshape(channels, 1).expand(channels, N),
            B,
            C,
            None if D is None else D.reshape(channels),
            None if z is None else z.reshape(rows, channels),
            None if dt_bias is None else dt_bias.reshape(channels),
            dt_softplus,
        )
        return out.view(rows, heads, P)

    return update


def no_shortcut(*args: Any, **kwargs: Any) -> None:
    """The fused training call of layers that fall back to the same path as inference when it gives None."""
