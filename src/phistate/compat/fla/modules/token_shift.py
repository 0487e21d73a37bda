"""fla's token shift, the difference to the token before: ``fla.modules.token_shift``."""

from __future__ import annotations

import torch
from torch import Tensor

from phistate.ops.checks import packed_offsets


def token_shift(
    x: Tensor,
    cu_seqlens: Tensor | None = None,
    cache: Tensor | None = None,
    output_cache: bool = False,
    chunk_indices: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``x_{t-1} - x_t``, where ``cache`` or 0 stands before the first token.

    Args:
        x: ``[B,T,D]``.
        cu_seqlens: ``[N+1]`` offsets of packed sequences, B == 1.
        cache: ``[N,D]``, the last token of each sequence before.
        output_cache: give the last tokens ``[N,D]`` too.
        chunk_indices: not needed here.
    """
    offsets = packed_offsets(cu_seqlens, x)
    if offsets is None:
        offsets = torch.arange(x.shape[0] + 1) * x.shape[1]
    steps = x.flatten(0, 1)
    N, D = offsets.numel() - 1, x.shape[-1]
    if cache is not None and cache.numel() != N * D:
        raise ValueError(f"cache: got shape {tuple(cache.shape)}; takes [N,D] = {(N, D)}")
    past = x.new_zeros(N, D) if cache is None else cache.reshape(N, D).to(x.dtype)

    filled = (offsets.diff() > 0).nonzero().flatten()
    before = torch.cat([steps[:1], steps[:-1]]).index_copy(0, offsets[filled], past[filled])
    delta = (before - steps).view(x.shape)
    return (delta, past.index_copy(0, filled, steps[offsets[filled + 1] - 1])) if output_cache else delta
