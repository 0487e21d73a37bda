"""Packed sequences by their offsets ``[N+1]``: as the numbers a loop needs, and by tensor operations alone.

A trace for the compiler has no numbers, and neither has a meta or a fake tensor; one graph then serves every packing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phistate.values import values


def bounds_of(offsets: Tensor) -> list[int] | None:
    """The offsets as numbers; None where there are none to read."""
    read = values(offsets)
    return None if read is None else read.tolist()


def sequence_of(offsets: Tensor, T: int) -> Tensor:
    """``[T]`` which sequence each step belongs to. An empty one has no step.

    >>> import torch
    >>> sequence_of(torch.tensor([0, 2, 2, 3]), 3)
    tensor([0, 0, 2])
    """
    return torch.searchsorted(offsets[1:].contiguous(), torch.arange(T, device=offsets.device), right=True)


class Rows:
    """Packed sequences as the rows of a batch of N, each as long as all of them together, the rest of it padding.

    Where the offsets cannot be read no loop runs and no row can be shorter: memory and work grow with N · T.

    Args:
        offsets: ``[N+1]``.
        x: ``[1,T,…]``, any of the tensors that are packed.
        mask: ``[1,T]`` bool, True = token; None: all are.

    >>> import torch
    >>> rows = Rows(torch.tensor([0, 2, 3]), torch.zeros(1, 3, 1), None)
    >>> rows.spread(torch.tensor([[7, 8, 9]])).masked_fill(~rows.mask, 0)
    tensor([[7, 8, 0],
            [9, 0, 0]])
    """

    def __init__(self, offsets: Tensor, x: Tensor, mask: Tensor | None) -> None:
        offsets, T = offsets.to(x.device), x.shape[1]
        step = torch.arange(T, device=x.device)
        sequence = sequence_of(offsets, T)
        self._taken = (offsets[:-1, None] + step).clamp(max=T - 1)
        self._put = sequence * T + step - offsets[sequence]
        self.mask = step < offsets.diff()[:, None]
        if mask is not None:
            self.mask = self.mask & self.spread(mask)

    def spread(self, x: Tensor) -> Tensor:
        """``[1,T,…] -> [N,T,…]``."""
        return x.squeeze(0)[self._taken]

    def gather(self, x: Tensor) -> Tensor:
        """``[N,T,…] -> [1,T,…]``."""
        return x.flatten(0, 1)[self._put].unsqueeze(0)
