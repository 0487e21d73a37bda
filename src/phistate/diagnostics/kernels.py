"""Kernels given by their logarithm: what a comparison takes beside feature maps, and two baselines."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

LogKernel: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A kernel given by its logarithm, ``(logits [..., Q, J], query positions [Q], key positions [J]) -> log
κ̂``, where ``logits`` are softmax's own and −inf means weight zero."""


def uniform_kernel(logits: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """The uniform average, κ̂ = 1: the baseline that looks at nothing.

    Example:
        >>> uniform_kernel(torch.tensor([[3.0, -1.0]]), torch.tensor([1]), torch.tensor([0, 1]))
        tensor([[0., 0.]])
    """
    return torch.zeros_like(logits)


def window_kernel(window: int, sinks: int = 0) -> LogKernel:
    """Exact softmax on a window and sinks, nothing elsewhere: κ̂_ij = κ_ij where i − j < window or j <
    sinks, else 0.

    Args:
        window: keys a query sees, itself included.
        sinks: first keys that every query sees.

    Raises:
        ValueError: ``window`` below 1 or ``sinks`` below 0.

    Example:
        >>> kernel = window_kernel(window=1, sinks=1)
        >>> kernel(torch.zeros(1, 3), torch.tensor([2]), torch.tensor([0, 1, 2]))
        tensor([[0., -inf, 0.]])
    """
    if window < 1:
        raise ValueError(f"window: got {window}; takes an integer ≥ 1")
    if sinks < 0:
        raise ValueError(f"sinks: got {sinks}; takes an integer ≥ 0")

    def kernel(logits: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        seen = (queries[:, None] - keys < window) | (keys < sinks)
        return logits.masked_fill(~seen, -math.inf)

    return kernel
