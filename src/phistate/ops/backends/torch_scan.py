"""Mamba-1's scan and the short convolution by plain PyTorch: checked calls in the layout of ``reference_scan.py``.

Softplus, bias, skip, gate, masks, groups and packed sequences are seen to here.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from phistate.ops import reference_scan
from phistate.ops.packing import Rows, bounds_of


def selective_scan(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool,
    h: Tensor | None,
    mask: Tensor | None,
    offsets: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The op in plain PyTorch, in the accumulation type."""
    bounds = None if offsets is None else bounds_of(offsets)
    if offsets is not None and bounds is None:
        rows = Rows(offsets, x, mask)
        inputs = (rows.spread(x), rows.spread(delta), A, rows.spread(B), rows.spread(C), D)
        gate = None if z is None else rows.spread(z)
        y, h = selective_scan(*inputs, gate, delta_bias, delta_softplus, h, rows.mask, None)
        return rows.gather(y), h
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    channels = x.shape[2]
    u, step, rate, write, read = (t.to(wide) for t in (x, delta, A, B, C))
    if write.ndim == 3:
        write, read = write.unsqueeze(2), read.unsqueeze(2)
    gate = None if z is None else z.to(wide)
    padded = None if mask is None else ~mask.unsqueeze(-1)
    if padded is not None:
        u, step = u.masked_fill(padded, 0.0), step.masked_fill(padded, 0.0)
        write, read = (t.masked_fill(padded.unsqueeze(-1), 0.0) for t in (write, read))
        gate = None if gate is None else gate.masked_fill(padded, 0.0)
    if delta_bias is not None:
        step = step + delta_bias.to(wide)
    if delta_softplus:
        step = F.softplus(step)
    if padded is not None:
        step = step.masked_fill(padded, 0.0)

    groups = write.shape[2]
    sequences = x.shape[0] if bounds is None else len(bounds) - 1
    h = u.new_zeros(sequences, *A.shape) if h is None else h
    h = h.unflatten(1, (groups, channels // groups))
    rate = rate.unflatten(0, (groups, channels // groups))
    ins = (u.unflatten(2, (groups, channels // groups)), step.unflatten(2, (groups, channels // groups)))
    if bounds is None:
        y, h = reference_scan.scan(*ins, rate, write, read, h)
    else:
        ys, hs = [ins[0][:, :0]], [h[:0]]
        for n, (a, b) in enumerate(itertools.pairwise(bounds)):
            part = (ins[0][:, a:b], ins[1][:, a:b], rate, write[:, a:b], read[:, a:b], h[n : n + 1])
            piece, last = reference_scan.scan(*part)
            ys.append(piece)
            hs.append(last)
        y, h = torch.cat(ys, 1), torch.cat(hs)
    y = y.flatten(2)
    if D is not None:
        y = y + D.to(wide) * u
    if gate is not None:
        y = y * F.silu(gate)
    return y.to(x.dtype), h.flatten(1, 2)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    past: Tensor | None,
    mask: Tensor | None,
    offsets: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The op in plain PyTorch, in the accumulation type."""
    if offsets is not None:
        bounds = bounds_of(offsets)
        if bounds is None:
            packed = Rows(offsets, x, mask)
            y, state = causal_conv1d(packed.spread(x), weight, bias, silu, past, packed.mask, None)
            return packed.gather(y), state
        ys, states = [x[:, :0]], [x.new_zeros(0, x.shape[2], weight.shape[1] - 1)]
        for n, (a, b) in enumerate(itertools.pairwise(bounds)):
            before = None if past is None else past[n : n + 1]
            part = None if mask is None else mask[:, a:b]
            piece, state = causal_conv1d(x[:, a:b], weight, bias, silu, before, part, None)
            ys.append(piece)
            states.append(state)
        return torch.cat(ys, 1), torch.cat(states)
    rows, T, channels = x.shape
    keep = weight.shape[1] - 1
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    before = x.new_zeros(rows, keep, channels) if past is None else past.transpose(1, 2)
    if mask is None:
        order, tokens = None, x
        state = torch.cat([before, x], 1)[:, T:]
    else:
        # The tokens in order, then the padding: what a token sees is what it would see without any.
        order = (~mask).to(torch.uint8).argsort(dim=1, stable=True).unsqueeze(-1)
        tokens = x.masked_fill(~mask.unsqueeze(-1), 0.0).gather(1, order.expand(rows, T, channels))
        last = mask.sum(1)[:, None, None] + torch.arange(keep, device=x.device)[:, None]
        state = torch.cat([before, tokens], 1).gather(1, last.expand(rows, keep, channels))
    y = reference_scan.convolve(tokens.to(wide), weight.to(wide), before.to(wide))
    if bias is not None:
        y = y + bias.to(wide)
    if silu:
        y = F.silu(y)
    if mask is not None and order is not None:
        y = y.gather(1, order.argsort(dim=1).expand(rows, T, channels)).masked_fill(~mask.unsqueeze(-1), 0.0)
    return y.to(x.dtype), state.transpose(1, 2)
