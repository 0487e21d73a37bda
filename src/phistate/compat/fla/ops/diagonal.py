"""HGRN: h_t = e^g_t h_{t-1} + x_t, one number per channel."""

from __future__ import annotations

import torch
from torch import Tensor

from phistate.compat.arguments import on_cpu
from phistate.compat.diagonal import diagonal_scan
from phistate.compat.fla.ops.call import Result, check_packed
from phistate.compat.fla.precision import widened
from phistate.ops.checks import check_log


def fused_recurrent_hgrn(
    x: Tensor,
    g: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """HGRN (Qin et al. 2023, arXiv:2311.04823): ``x, g [B,T,D]``, state ``[N,D]`` float32.

    Packed sequences are one: where the next begins nothing is kept, and its own first state is written with its x.
    """
    on_cpu("fla", "x", x, "[B,T,D]", 3)
    check_packed(x, cu_seqlens, None if initial_state is None else initial_state.shape[0])
    check_log("g", g)
    a, u = widened(g).exp(), widened(x)
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    before = u.new_zeros(sequences, x.shape[2]) if initial_state is None else initial_state.to(u.dtype)
    if cu_seqlens is None:
        h, last = diagonal_scan(a, u, before)
    else:
        offsets = cu_seqlens.to(x.device, torch.int64)
        full = offsets.diff() > 0
        begins = offsets[:-1][full]
        u = u.index_add(1, begins, (a[0, begins] * before[full]).unsqueeze(0))
        a = a.index_fill(1, begins, 0.0)
        h, _ = diagonal_scan(a, u, before.new_zeros(1, x.shape[2]))
        last = before.index_copy(0, full.nonzero().flatten(), h[0, offsets[1:][full] - 1])
    return h.to(x.dtype), last if output_final_state else None


def chunk_hgrn(x: Tensor, g: Tensor, initial_state: Tensor | None = None, output_final_state: bool = False) -> Result:
    """As :func:`fused_recurrent_hgrn`."""
    return fused_recurrent_hgrn(x, g, initial_state, output_final_state)
