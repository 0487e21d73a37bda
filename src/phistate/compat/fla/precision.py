"""The precision fla's kernels compute in: float32 inside, the input's type outside."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

from phistate.compat.arguments import wide


@overload
def widened(x: Tensor) -> Tensor: ...


@overload
def widened(x: None) -> None: ...


def widened(x: Tensor | None) -> Tensor | None:
    """``x`` in float32, or in float64 if it is; None is handed on."""
    return None if x is None else x.to(wide(x))


def l2norm(x: Tensor) -> Tensor:
    """x / √(Σx² + 1e-6) along the last dimension, in x's type, as fla's kernels divide q and k."""
    whole = widened(x)
    return (whole * torch.rsqrt(whole.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)
