"""Checks of arguments that several ops share: each failure names the argument, what came and what is taken."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from phistate.values import any_tangent, values

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_layout(*, q: Tensor, k: Tensor, v: Tensor) -> None:
    """q, k, v are ``[B,T,H,·]`` of one batch, one length, one dtype and one device."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: got {type(x).__name__}; takes a torch.Tensor")
        if x.ndim != 4:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}; takes [B,T,H,D]")
    if q.dtype not in _DTYPES:
        raise TypeError(f"q: got {q.dtype}; takes float64, float32, bfloat16 or float16")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: got {x.dtype}; takes {q.dtype}, as q has")
        if x.device != q.device:
            raise ValueError(f"{name}: got device {x.device}; takes {q.device}, where q is")
        if x.shape[0] != q.shape[0]:
            raise ValueError(f"{name}: got batch {x.shape[0]}; takes {q.shape[0]}, as q has")
    if v.shape[1] != k.shape[1]:
        raise ValueError(f"v: got length {v.shape[1]}; takes {k.shape[1]}, as k has")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k: got last dimension {k.shape[-1]}; takes {q.shape[-1]}, as q has")


def check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    """One length, and head counts that each divide the largest."""
    if k.shape[1] != q.shape[1]:
        raise ValueError(f"k: got length {k.shape[1]}; takes {q.shape[1]}, as q has")
    most = max(x.shape[2] for x in (q, k, v))
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.shape[2] == 0 or most % x.shape[2]:
            raise ValueError(f"{name}: got {x.shape[2]} heads; takes a count that divides the largest, {most}")
    states = max(k.shape[2], v.shape[2])
    for name, x in (("k", k), ("v", v)):
        if states % x.shape[2]:
            raise ValueError(f"{name}: got {x.shape[2]} heads; takes a count that divides the states' {states}")


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name}: got {value!r}; takes {', '.join(map(repr, choices))}")


def check_mask(mask: Tensor | None, x: Tensor) -> None:
    """``mask`` is a bool tensor ``[B,T]`` beside ``x [B,T,…]``, or None."""
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"mask: got {got}; takes a bool tensor, True = token")
    if mask.shape != x.shape[:2]:
        raise ValueError(f"mask: got shape {tuple(mask.shape)}; takes [B,T] = {tuple(x.shape[:2])}")
    if mask.device != x.device:
        raise ValueError(f"mask: got device {mask.device}; takes {x.device}, where the inputs are")


def check_side_input(
    name: str,
    x: Tensor | None,
    q: Tensor,
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype] | None = None,
) -> None:
    """``x`` is None or has one of ``shapes``, q's device and one of ``dtypes``; None: q's dtype or float32."""
    if x is None:
        return
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}; takes a torch.Tensor or None")
    if tuple(x.shape) not in shapes:
        raise ValueError(f"{name}: got shape {tuple(x.shape)}; takes {' or '.join(map(str, dict.fromkeys(shapes)))}")
    dtypes = (q.dtype, torch.float32) if dtypes is None else dtypes
    if x.dtype not in dtypes:
        raise TypeError(f"{name}: got {x.dtype}; takes {' or '.join(map(str, dict.fromkeys(dtypes)))}")
    if x.device != q.device:
        raise ValueError(f"{name}: got device {x.device}; takes {q.device}, where the inputs are")


def check_float(name: str, x: Tensor, layout: str, dims: int) -> None:
    """``x`` is a floating tensor of ``dims`` dimensions, called ``layout`` in the message."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}; takes a torch.Tensor")
    if x.ndim != dims:
        raise ValueError(f"{name}: got shape {tuple(x.shape)}; takes {layout}")
    if x.dtype not in _DTYPES:
        raise TypeError(f"{name}: got {x.dtype}; takes float64, float32, bfloat16 or float16")


def check_no_gradient(state: Tensor, *inputs: Tensor | None) -> None:
    """A step in place records no gradient, so none may be asked for."""
    asked = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (state, *inputs))
    if asked or any_tangent((state, *inputs)):
        raise ValueError(
            "state: got inputs that require a gradient, which a step in place cannot record; "
            "takes them under torch.no_grad()"
        )


def check_state(state: Tensor, layout: str, shape: tuple[int, ...], x: Tensor) -> None:
    """``state`` is a floating tensor of ``shape``, called ``layout``, where x is, that a step can overwrite."""
    if not isinstance(state, Tensor):
        raise TypeError(f"state: got {type(state).__name__}; takes a torch.Tensor")
    if state.shape != shape or state.device != x.device:
        raise ValueError(
            f"state: got shape {tuple(state.shape)} on {state.device}; takes {layout} = {shape} on {x.device}"
        )
    if not state.dtype.is_floating_point:
        raise TypeError(f"state: got {state.dtype}; takes a floating type")
    check_overwritable("state", state)


def check_overwritable(name: str, x: Tensor) -> None:
    """A step can overwrite ``x``: each element has a place of its own, and torch lets it be written.

    Asked before the first write, since a step that fails halfway would leave a state of no history.
    """
    if not x.is_contiguous() and _overlaps_itself(x):
        raise ValueError(
            f"{name}: got strides {x.stride()} for shape {tuple(x.shape)}, which put elements in one place; "
            "takes a tensor with a place for each, as its clone() has"
        )
    if not torch.compiler.is_compiling() and x.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(
            f"{name}: got a tensor made under torch.inference_mode(), which cannot be overwritten outside; "
            "takes its clone(), or the step under torch.inference_mode()"
        )


def check_apart(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    """``x`` and ``other``, of one dtype, hold no element in common."""
    if torch.compiler.is_compiling() or not torch._C._is_alias_of(x, other):  # type: ignore[attr-defined]  # no stub
        return
    if values(x) is None:
        return
    first = min(x.storage_offset(), other.storage_offset())
    places = [(t.shape, t.stride(), t.storage_offset() - first) for t in (x, other)]
    reach = 1 + max(at + sum((n - 1) * d for n, d in zip(shape, step, strict=True)) for shape, step, at in places)
    taken = torch.zeros(max(reach, 1), dtype=torch.bool, device="cpu")
    taken.as_strided(*places[0]).fill_(True)
    if taken.as_strided(*places[1]).any():
        raise ValueError(f"{name}: got memory that {other_name} holds too; takes a tensor of its own")


def _overlaps_itself(x: Tensor) -> bool:
    if x.numel() == 0:
        return False
    reach = 0  # of the dimensions so far, from the densest on
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def use_native(backend: str, reasons: Sequence[str]) -> bool:
    """Whether an op of two paths takes its native kernel, against which ``reasons`` stand.

    Raises:
        ValueError: an unknown name, or ``"cpu"`` where there are reasons against it.
    """
    check_choice("backend", backend, ("auto", "cpu", "torch"))
    if backend == "cpu" and reasons:
        raise ValueError(f"backend: got 'cpu', which cannot run this call: {'; '.join(reasons)}")
    return backend != "torch" and not reasons


def check_log(name: str, x: Tensor | None, quantity: str = "") -> None:
    """``x``, or the ``quantity`` made of argument ``name``, is a log of what is kept, ≤ 0, where it can be read."""
    read = None if x is None else values(x)
    if read is None or read.numel() == 0:
        return
    largest = read.max().item()
    if not largest <= 0:  # a NaN is no maximum ≤ 0 either
        of = f" {quantity}" if quantity else ""
        raise ValueError(f"{name}: got a maximum{of} of {largest:.6g}; takes log-space values ≤ 0")


def packed_offsets(cu_seqlens: Tensor | None, x: Tensor) -> Tensor | None:
    """The offsets of packed sequences in ``x [1,T,…]`` as int64 in memory; None without packing.

    Compiled code asserts them when it runs; of meta and fake tensors the shapes are all there is.
    """
    if cu_seqlens is None:
        return None
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        got = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise TypeError(f"cu_seqlens: got {got}; takes an int32 or int64 tensor")
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() == 0:
        raise ValueError(f"cu_seqlens: got shape {tuple(cu_seqlens.shape)}; takes [N+1]")
    if x.shape[0] != 1:
        raise ValueError(f"cu_seqlens: got it with batch {x.shape[0]}; takes batch 1, sequences packed along T")
    read = values(cu_seqlens)
    if read is None:
        return _unread_offsets(cu_seqlens, x)
    if read.shape != cu_seqlens.shape:
        raise ValueError("cu_seqlens: got offsets that torch.func.vmap maps over; takes one packing for all")
    bounds: list[int] = read.tolist()
    if bounds[0] != 0:
        raise ValueError(f"cu_seqlens: got a first offset of {bounds[0]}; takes 0")
    if any(a > b for a, b in itertools.pairwise(bounds)):
        raise ValueError(f"cu_seqlens: got {bounds}, which decreases; takes offsets that never do")
    if bounds[-1] != x.shape[1]:
        raise ValueError(f"cu_seqlens: got a last offset of {bounds[-1]}; takes T = {x.shape[1]}")
    return cu_seqlens.to("cpu", torch.int64).contiguous()


def _unread_offsets(cu_seqlens: Tensor, x: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        offsets = cu_seqlens.to("cpu", torch.int64).contiguous()
        fits = (offsets[0] == 0) & (offsets.diff() >= 0).all() & (offsets[-1] == x.shape[1])
        torch._assert_async(fits, "cu_seqlens: takes offsets from 0 to T that never decrease")
        return offsets
    if values(x) is not None:
        raise ValueError("cu_seqlens: got a tensor without values beside inputs that have some; takes [N+1] offsets")
    return cu_seqlens.to(torch.int64) if cu_seqlens.is_meta else cu_seqlens.to("cpu", torch.int64).contiguous()
