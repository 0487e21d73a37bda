"""The native short convolution, as torch operators (csrc/causal_conv1d.cpp)."""

from __future__ import annotations

from torch import Tensor


def reasons_against(x: Tensor) -> list[str]:
    """Why the native kernels cannot filter ``x``; empty when they can."""
    return ["there is no native convolution yet"]


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    initial_state: Tensor | None,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """y and the final state."""
    raise NotImplementedError


def step_(state: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """One token in place."""
    raise NotImplementedError
