"""The native selective scan, as torch operators (csrc/selective_scan.cpp)."""

from __future__ import annotations

from torch import Tensor


def reasons_against(x: Tensor) -> list[str]:
    """Why the native kernels cannot scan ``x``; empty when they can."""
    return ["there is no native selective scan yet"]


def scan(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool,
    initial_state: Tensor | None,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """y and the final state."""
    raise NotImplementedError


def step_(
    state: Tensor,
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool,
) -> Tensor:
    """One token in place."""
    raise NotImplementedError
