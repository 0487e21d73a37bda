"""The precision fla's kernels compute in: float32 inside, the input's type outside."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor


@overload
def wide(x: Tensor) -> Tensor: ...


@overload
def wide(x: None) -> None: ...


def wide(x: Tensor | None) -> Tensor | None:
    """``x`` in float32; float64 stays what it is, None too."""
    return x if x is None or x.dtype == torch.float64 else x.float()
