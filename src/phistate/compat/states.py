"""Tensors that other libraries' caches keep, as the State our ops go on from."""

from __future__ import annotations

import torch
from torch import Tensor

from phistate.compat.arguments import wide
from phistate.ops.state import State


def state_of(s: Tensor, like: Tensor) -> State:
    """A tensor that a cache kept, as the State an op on ``like`` goes on from."""
    return State(s=s.to(wide(like)), tokens=torch.zeros(s.shape[0], dtype=torch.int64, device=s.device))
