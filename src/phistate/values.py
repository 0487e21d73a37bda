"""The numbers of a tensor, read and written past torch: a trace, a meta and a fake tensor have none."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad


def values(x: Tensor) -> Tensor | None:
    """The numbers of ``x``, detached; None where there are none to read.

    Under :mod:`torch.func` these are the numbers of all that is mapped over at once, in a shape of their own.

    >>> import torch
    >>> values(torch.ones(2)), values(torch.ones(2, device="meta"))
    (tensor([1., 1.]), None)
    """
    if torch.compiler.is_compiling():
        return None
    x = unwrapped(x).detach()  # which a fake mode turns into a fake tensor
    return x if has_numbers(x) else None


def content(x: Tensor) -> bytes:
    """The bytes of a dense ``x`` in memory, inside a transform too, where ``x.numpy()`` is not to be had."""
    x = unwrapped(x)
    return ctypes.string_at(x.data_ptr(), x.nbytes)


def unwrapped(x: Tensor) -> Tensor:
    """``x`` without what :mod:`torch.func` wraps around it, as around all that is computed inside a transform."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def has_numbers(x: Tensor) -> bool:
    """Whether numbers stand behind ``x``, or will when a trace of it runs."""
    if type(x) is Tensor:  # asked for each decoded token, and isinstance of a tensor class is slow
        return not x.is_meta
    return not (x.is_meta or isinstance(x, FakeTensor))


def transformed(*tensors: Tensor) -> bool:
    """Whether :mod:`torch.func` maps one of these, or may while it is traced: then nothing should be done in place."""
    return torch.compiler.is_compiling() or any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors))


def any_tangent(tensors: Iterable[Tensor | None]) -> bool:
    """Whether forward mode differentiates along one of these."""
    if forward_ad._current_level < 0:
        return False
    return any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def overwritten(*tensors: Tensor) -> None:
    """Tells autograd what a kernel has written, so that no graph goes on with a tensor that it saved before."""
    if not torch.compiler.is_compiling():  # the operator's schema says it there
        torch.autograd.graph.increment_version(tensors)
