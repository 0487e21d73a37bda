"""fla's rotary position embedding: ``fla.modules.rotary``."""

from __future__ import annotations

import torch
from torch import Tensor

from phistate.compat.fla.precision import widened
from phistate.ops.checks import packed_offsets
from phistate.values import values


def rotary_embedding(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
) -> Tensor:
    """The first 2R channels of each head of ``x [B,T,H,D]`` turned by the angles of their position.

    Args:
        x: ``[B,T,H,D]``.
        cos: ``[P,R]`` of positions 0 to P - 1, without a gradient.
        sin: as cos.
        interleaved: a pair is channels 2r and 2r + 1, not r and r + R.
        inplace: overwrite x and give it back.
        seqlen_offsets: position of the first step, one for all or ``[N]``, one for each sequence. A step before
            position 0 (left padding) becomes 0; in place it stays what it is.
        cu_seqlens: ``[N+1]`` offsets of packed sequences, B == 1.
        chunk_indices: not needed here.
    """
    if cos.ndim != 2 or cos.shape != sin.shape:
        raise ValueError(f"sin: got shape {tuple(sin.shape)} beside cos {tuple(cos.shape)}; takes [P,R] for both")
    pairs = cos.shape[1]
    if 2 * pairs > x.shape[-1]:
        raise ValueError(f"cos: got {pairs} angles for heads of {x.shape[-1]} channels; takes at most half as many")

    left_padded = isinstance(seqlen_offsets, Tensor) or seqlen_offsets < 0
    positions = _positions(x, seqlen_offsets, packed_offsets(cu_seqlens, x))
    if cu_seqlens is None and isinstance(seqlen_offsets, int):
        needed = seqlen_offsets + x.shape[1]
    else:
        read = values(positions)
        needed = 0 if read is None or read.numel() == 0 else int(read.max()) + 1
    if needed > cos.shape[0]:
        raise ValueError(f"cos: got {cos.shape[0]} positions; takes at least {needed}, as the offsets say")
    c, s = (widened(table.detach())[positions.clamp_min(0)].unsqueeze(2) for table in (cos, sin))

    turned = widened(x[..., : 2 * pairs])
    if interleaved:
        a, b = turned.unflatten(-1, (pairs, 2)).unbind(-1)
        turned = torch.stack([a * c - b * s, a * s + b * c], -1).flatten(-2)
    else:
        a, b = turned.unflatten(-1, (2, pairs)).unbind(-2)
        turned = torch.cat([a * c - b * s, a * s + b * c], -1)
    turned = turned.to(x.dtype)
    if left_padded:
        before = (positions < 0)[..., None, None]
        turned = torch.where(before, x[..., : 2 * pairs] if inplace else 0, turned)
    y = torch.cat([turned, x[..., 2 * pairs :]], -1)
    return x.copy_(y) if inplace else y


def _positions(x: Tensor, start: int | Tensor, offsets: Tensor | None) -> Tensor:
    """``[B or 1,T]``: the position of each step in its sequence."""
    B, T = x.shape[:2]
    step = torch.arange(T, device=x.device).unsqueeze(0)
    sequences = B if offsets is None else offsets.numel() - 1
    if isinstance(start, Tensor) and start.shape != (sequences,):
        raise ValueError(f"seqlen_offsets: got shape {tuple(start.shape)}; takes an int or ({sequences},)")
    if offsets is None:
        return step + (start.unsqueeze(1) if isinstance(start, Tensor) else start)
    first = start - offsets[:-1]
    return step + first.repeat_interleave(offsets.diff()).unsqueeze(0)
