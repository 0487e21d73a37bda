"""Padded batches as packed sequences and back: ``fla.layers.utils`` and ``fla.ops.utils.index``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """The rows ``indices`` of ``x``."""
    return x[indices]


def index_put_first_axis(x: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """``first_axis_dim`` rows: those of ``x`` at ``indices``, 0 elsewhere."""
    return x.new_zeros(first_axis_dim, *x.shape[1:]).index_copy(0, indices.long(), x)


def prepare_lens(cu_seqlens: Tensor) -> Tensor:
    """Lengths ``[N]`` of the sequences that begin at the offsets ``[N+1]``."""
    return cu_seqlens.diff()


def prepare_lens_from_mask(mask: Tensor) -> Tensor:
    """Lengths ``[B]`` int32 of the rows of a mask ``[B,T]`` of tokens."""
    return mask.sum(-1, dtype=torch.int32)


def prepare_cu_seqlens_from_lens(lens: Tensor, dtype: torch.dtype | None = torch.int32) -> Tensor:
    """The offsets ``[N+1]`` of sequences of these lengths, packed.

    >>> prepare_cu_seqlens_from_lens(torch.tensor([3, 2])).tolist()
    [0, 3, 5]
    """
    return F.pad(lens.cumsum(0, dtype=dtype), (1, 0))


def prepare_cu_seqlens_from_mask(mask: Tensor, dtype: torch.dtype | None = torch.int32) -> Tensor:
    """The offsets ``[B+1]`` of the rows of a mask, packed without their padding."""
    return prepare_cu_seqlens_from_lens(prepare_lens_from_mask(mask), dtype)


def get_unpad_data(attention_mask: Tensor) -> tuple[Tensor, Tensor, int]:
    """Where the tokens of a mask ``[B,T]`` are in its B·T steps, the offsets of its rows, and its longest row.

    >>> get_unpad_data(torch.tensor([[0, 1], [1, 1]]))
    (tensor([1, 2, 3]), tensor([0, 1, 3], dtype=torch.int32), 2)
    """
    longest = int(prepare_lens_from_mask(attention_mask).max())
    return attention_mask.flatten().nonzero().flatten(), prepare_cu_seqlens_from_mask(attention_mask), longest


def unpad_input(
    q: Tensor | tuple[Tensor, ...],
    states: tuple[Tensor, ...],
    attention_mask: Tensor,
    q_len: int,
    keepdim: bool = False,
) -> tuple[Any, tuple[Tensor, ...], Tensor, tuple[Tensor, Tensor], tuple[int, int]]:
    """Queries and keys without their padding: all the steps a mask has, or of the queries the last alone.

    Args:
        q: ``[B,q_len,…]``, or several of them.
        states: ``[B,T,…]`` each.
        attention_mask: ``[B,T]``.
        q_len: T or 1.
        keepdim: put a batch of 1 before the packed steps.

    Returns:
        Packed q and states, where q's steps are in its B·q_len, both their offsets, and both their longest lengths.

    Raises:
        ValueError: another ``q_len``.
    """
    indices, offsets, longest = get_unpad_data(attention_mask)
    queries = (q,) if isinstance(q, Tensor) else q
    packed = tuple(s.flatten(0, 1)[indices] for s in states)
    if q_len == states[0].shape[1]:
        of_q = (indices, offsets, longest)
        queries = tuple(x.flatten(0, 1)[indices] for x in queries)
    elif q_len == 1:
        last = torch.arange(len(states[0]) + 1, dtype=torch.int32, device=indices.device)
        of_q = (last[:-1], last, 1)
        queries = tuple(x.squeeze(1) for x in queries)
    else:
        raise ValueError(f"q_len: got {q_len}; takes 1 or {states[0].shape[1]}, as many steps as the keys have")
    if keepdim:
        queries, packed = (tuple(x.unsqueeze(0) for x in group) for group in (queries, packed))
    found = queries[0] if isinstance(q, Tensor) else queries
    return found, packed, of_q[0], (of_q[1], offsets), (of_q[2], longest)


def pad_input(hidden_states: Tensor, indices: Tensor, batch_size: int, seq_len: int) -> Tensor:
    """Packed steps ``[Σ,…]`` back in their places of ``[batch_size,seq_len,…]``, 0 elsewhere."""
    return index_put_first_axis(hidden_states, indices, batch_size * seq_len).unflatten(0, (batch_size, seq_len))


def tensor_cache(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` itself: what fla remembers to spare a GPU a wait costs nothing here."""
    return fn
