"""Rows of a larger state that a step goes on from, as caches for many conversations choose them."""

from __future__ import annotations

import torch
from torch import Tensor


def row_numbers(name: str, numbers: Tensor | None, rows: int) -> Tensor | None:
    """``numbers [rows]`` as int64; None: none were given.

    Raises:
        ValueError: another shape.
        TypeError: no tensor, or none of int32 or int64.
    """
    if numbers is None:
        return None
    if not isinstance(numbers, Tensor) or numbers.dtype not in (torch.int32, torch.int64):
        got = numbers.dtype if isinstance(numbers, Tensor) else type(numbers).__name__
        raise TypeError(f"{name}: got {got}; takes an int32 or int64 tensor or None")
    if numbers.shape != (rows,):
        raise ValueError(f"{name}: got shape {tuple(numbers.shape)}; takes [B] = {(rows,)}")
    return numbers.to(torch.int64)


def chosen(state: Tensor, numbers: Tensor | None) -> Tensor:
    """The rows of ``state`` that ``numbers`` name, a copy; itself where there are none. Negative ones name no row."""
    return state if numbers is None else state.index_select(0, numbers.clamp(min=0))


def put_back(state: Tensor, rows: Tensor, y: Tensor, numbers: Tensor | None) -> Tensor:
    """Write ``rows`` to where :func:`chosen` took them from; ``y [B,…]`` with zeros where no row was named.

    >>> state, numbers = torch.zeros(3, 1), torch.tensor([2, -1])
    >>> put_back(state, chosen(state, numbers) + 5, torch.ones(2, 1), numbers).tolist(), state.tolist()
    ([[1.0], [0.0]], [[0.0], [0.0], [5.0]])
    """
    if numbers is None:
        return y
    named = numbers >= 0
    state[numbers[named]] = rows[named]
    return y.masked_fill(~named.view(-1, *[1] * (y.ndim - 1)), 0.0)
