"""What comes in: tensors and positions that fit, and how many queries are looked at at a time."""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK_ELEMENTS = 2**18  # 2 MB of float64: the temporaries of one block stay in the second-level cache
_MIN_BLOCK = 16  # fewer queries at a time make the matrix products slower than the memory they save is worth


def evenly_spaced(length: int, count: int) -> Tensor:
    """At most ``count`` ascending positions spread evenly over 0 … length − 1, the last among them.

    Example:
        >>> evenly_spaced(10, 5)
        tensor([1, 3, 5, 7, 9])
    """
    count = min(count, length)
    return torch.div(torch.arange(1, count + 1) * length, count, rounding_mode="floor") - 1


def check_shapes(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int, int, int]:
    """Agree on (B, T, Hq, Hk) or say what does not fit."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}; takes [B,T,H,D]")
    batch, length, heads, dim = q.shape
    if length == 0:
        raise ValueError("q: got T = 0; takes at least one position")
    if k.shape[:2] != (batch, length) or k.shape[3] != dim:
        raise ValueError(f"k: got shape {tuple(k.shape)}; takes [B,T,Hk,D] that fits q's {tuple(q.shape)}")
    if k.shape[2] == 0 or heads % k.shape[2]:
        raise ValueError(f"k: got {k.shape[2]} heads; takes a number that divides q's {heads}")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v: got shape {tuple(v.shape)}; takes [B,T,Hk,V] that fits k's {tuple(k.shape)}")
    return batch, length, heads, k.shape[2]


def check_positions(queries: Tensor | None, length: int, device: torch.device) -> Tensor:
    """The query positions to look at, checked."""
    if queries is None:
        return torch.arange(length, device=device)
    if queries.dim() != 1 or queries.numel() == 0 or queries.is_floating_point() or queries.dtype == torch.bool:
        shape = f"{queries.dtype} {tuple(queries.shape)}"
        raise ValueError(f"queries: got {shape}; takes a non-empty 1-D integer tensor or None")
    if queries.min() < 0 or queries.max() >= length or (queries.diff() <= 0).any():
        raise ValueError(f"queries: got {queries.tolist()[:8]}…; takes ascending positions within 0…{length - 1}")
    return queries.to(device=device, dtype=torch.int64)


def queries_at_once(elements: int) -> int:
    """How many queries make a block, of which each has ``elements`` temporaries."""
    return max(_MIN_BLOCK, _BLOCK_ELEMENTS // elements)
