"""Packed sequences as other libraries' layers speak of them, turned into the one form our ops take."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packing:
    """N sequences in the B·T steps of a batch, taken row after row.

    Args:
        offsets: ``[N+1]`` int64, where each sequence begins in the B·T steps.
        batch: B.
        rows: ``[B]`` int64, how many sequences there are before row b ends; None when the caller counts sequences
            itself (``cu_seqlens``) and wants one state for each.
    """

    offsets: Tensor
    batch: int
    rows: Tensor | None

    def fold(self, x: Tensor) -> Tensor:
        """``[B,T,…] -> [1,B·T,…]``."""
        return x.flatten(0, 1).unsqueeze(0)

    def unfold(self, x: Tensor) -> Tensor:
        """``[1,B·T,…] -> [B,T,…]``."""
        return x.squeeze(0).unflatten(0, (self.batch, -1))

    def enter(self, state: Tensor | None) -> Tensor | None:
        """States ``[N,…]`` to begin with: the first sequence of each row goes on from that row's."""
        if state is None or self.rows is None:
            return state
        entered = state.new_zeros(self.offsets.numel() - 1, *state.shape[1:])
        first = torch.cat([self.rows.new_zeros(1), self.rows[:-1]])
        return entered.index_copy(0, first, state)

    def leave(self, state: Tensor) -> Tensor:
        """States ``[B,…]`` to keep: the last sequence's of each row; all N of them for ``cu_seqlens``."""
        return state if self.rows is None else state.index_select(0, self.rows - 1)


def packing(
    x: Tensor,
    cu_seqlens: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    seq_idx: Tensor | None = None,
) -> Packing | None:
    """How ``x [B,T,…]`` is packed, by ``cu_seqlens [N+1]`` or ``seq_idx [B,T]`` (a number per sequence); None: not.

    Layers hand on either name of the offsets, or the numbers, or both at once; then they say the same and the
    offsets are read.

    Raises:
        ValueError: offsets beside more than one row, or numbers that do not fit the batch.

    >>> packing(torch.zeros(1, 5), seq_idx=torch.tensor([[0, 0, 0, 1, 1]])).offsets
    tensor([0, 3, 5])
    """
    batch, length = x.shape[:2]
    offsets = cu_seq_lens_q if cu_seqlens is None else cu_seqlens
    if offsets is not None:
        if batch != 1:
            raise ValueError(
                f"cu_seqlens: got a batch of {batch} rows beside it; takes one row that holds the sequences"
            )
        return Packing(offsets.to("cpu", torch.int64), batch, None)
    if seq_idx is None:
        return None
    if seq_idx.shape != (batch, length):
        raise ValueError(f"seq_idx: got shape {tuple(seq_idx.shape)}; takes [B,T] = {(batch, length)}")
    starts = torch.ones(batch, length, dtype=torch.bool)
    starts[:, 1:] = (seq_idx[:, 1:] != seq_idx[:, :-1]).cpu()
    begins = starts.flatten().nonzero().flatten()
    offsets = torch.cat([begins, begins.new_tensor([batch * length])])
    return Packing(offsets, batch, starts.sum(1).cumsum(0))
