"""What a stand-in checks before it computes: that tensors are in memory, of a shape and in types the kernels take."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

from phistate.ops.checks import check_float, check_side_input

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""What every op computes with."""


def on_cpu(package: str, name: str, x: Tensor, layout: str, dims: int | None = None) -> None:
    """``x``, the first argument of a stand-in for ``package``, is a floating tensor in memory, called ``layout``.

    ``dims`` of None: of any rank.

    Raises:
        ValueError: another device or rank.
        TypeError: no tensor, or none of floats.

    >>> on_cpu("fla", "q", torch.zeros(1, 2), "[B,T,H,K]", 4)
    Traceback (most recent call last):
    ValueError: q: got shape (1, 2); takes [B,T,H,K]
    """
    if dims is None:
        dims = x.ndim if isinstance(x, Tensor) else 0
    check_float(name, x, layout, dims)
    if x.device.type not in ("cpu", "meta"):
        raise ValueError(
            f"{name}: got a tensor on {x.device}; these stand-ins for {package} run on the CPU only "
            f"(x.cpu(), or a process without them, with {package} itself)"
        )


@overload
def beside(name: str, x: Tensor, first: Tensor, *shapes: tuple[int, ...]) -> Tensor: ...


@overload
def beside(name: str, x: Tensor | None, first: Tensor, *shapes: tuple[int, ...]) -> Tensor | None: ...


def beside(name: str, x: Tensor | None, first: Tensor, *shapes: tuple[int, ...]) -> Tensor | None:
    """``x`` of one of ``shapes`` in a type that ops take beside ``first``: its own, or the wide one, losing nothing.

    Raises:
        ValueError: another shape or device.
        TypeError: no tensor, or none of floats.

    >>> beside("B", torch.ones(2, dtype=torch.bfloat16), torch.ones(1), (2,)).dtype
    torch.float32
    """
    check_side_input(name, x, first, shapes, FLOATING)
    if x is None or x.dtype in (first.dtype, torch.float32):
        return x
    return x.to(wide(first))


def wide(x: Tensor) -> torch.dtype:
    """The type that sums beside ``x`` are kept in: float64 for float64, float32 for everything else."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
