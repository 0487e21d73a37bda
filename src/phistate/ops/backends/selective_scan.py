"""The selective scan's kernels as torch operators: forward, backward, and the one-token step in place."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from phistate.ops.backends import abi, derivatives, native, torch_scan
from phistate.ops.backends.abi import address, layout, series
from phistate.values import has_numbers

_HEAD = "bytes layout channels groups states softplus x delta z b c a d bias h0"
_FORWARD = abi.form(abi.Selective, f"{_HEAD} y h checkpoints")
_BACKWARD = abi.form(abi.Selective, f"{_HEAD} checkpoints d_y d_h d_x d_delta d_z parts d_b d_c d_a d_d d_bias d_h0")
_STEP = abi.form(
    abi.SelectiveStep,
    "bytes batch channels groups states repeat softplus low high x delta z b c a a_channel a_state d bias h y",
)
_UNITS_A_PART = 16  # of backward: enough for the sums over channels to be few, few enough to share out
# Asked once, at import: a compiler's trace cannot ask a library.
_MISSING = native.why_not()

_SCHEMA = (
    "Tensor x, Tensor delta, Tensor a, Tensor b, Tensor c, Tensor? d, Tensor? z, Tensor? bias, Tensor? h, "
    "Tensor? mask, Tensor? cu_seqlens, bool softplus"
)

library = torch.library.Library("phistate", "FRAGMENT")
library.define(f"selective_scan({_SCHEMA}, bool keep) -> (Tensor, Tensor, Tensor)")
library.define(
    f"selective_scan_backward({_SCHEMA}, Tensor d_y, Tensor d_h, Tensor checkpoints) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
library.define(
    "selective_scan_step_(Tensor(a!) state, Tensor x, Tensor delta, Tensor a, Tensor b, Tensor c, Tensor? d, "
    "Tensor? z, Tensor? bias, bool softplus, int repeat, float low, float high) -> Tensor"
)


def reasons_against(x: Tensor, *others: Tensor | None) -> list[str]:
    """Why the native kernels cannot work on ``x`` and what stands beside it; empty when they can."""
    reasons = [] if _MISSING is None else [_MISSING]
    if x.device.type != "cpu":
        reasons.append(f"tensors are on {x.device}, the kernels read memory")
    if x.dtype not in abi.DTYPES:
        reasons.append(f"{x.dtype}: the kernels compute in float32")
    return reasons + derivatives.reasons_against(x, *others)


def readable(gradient: Tensor) -> Tensor:
    """A gradient in an order the kernels read fast; an expanded one is spelled out."""
    return gradient if 1 in gradient.stride()[1:] else gradient.contiguous()


def _groups(b: Tensor) -> int:
    return b.shape[2] if b.ndim == 4 else 1


def _outputs(x: Tensor, a: Tensor, b: Tensor, cu_seqlens: Tensor | None, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    B, T, D = x.shape
    N, G = a.shape[1], _groups(b)
    sequences = B if cu_seqlens is None else cu_seqlens.numel() - 1
    slots = B * T // abi.SELECTIVE_SEGMENT + sequences
    kept = (slots, G * math.ceil(D // G / 16) * 16 * N) if keep else (0,)
    return (
        torch.empty_like(x),
        x.new_empty(sequences, D, N, dtype=torch.float32),
        x.new_empty(kept, dtype=torch.float32),
    )


def _head(
    x: Tensor,
    delta: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    bias: Tensor | None,
    h: Tensor | None,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    softplus: bool,
) -> tuple[int, ...]:
    """The values of the fields ``_HEAD``. The tensors must outlive the call."""
    b, c = (t.unsqueeze(2) if t.ndim == 3 else t for t in (b, c))
    return (
        _FORWARD.size,
        *layout(x, mask, cu_seqlens),
        *(x.shape[2], b.shape[2], a.shape[1]),
        softplus,
        *series(x),
        *series(delta),
        *series(z),
        *series(b),
        *series(c),
        *(a.data_ptr(), address(d), address(bias), address(h)),
    )


def _scan(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    x, delta, a, b, c, d, z, bias, h, mask, cu_seqlens, softplus, keep = arguments
    a = a.contiguous()
    d, bias, h = (None if t is None else t.contiguous() for t in (d, bias, h))
    outputs = y, last, checkpoints = _outputs(x, a, b, cu_seqlens, keep)
    fields = (
        *_head(x, delta, a, b, c, d, z, bias, h, mask, cu_seqlens, softplus),
        *series(y),
        last.data_ptr(),
        checkpoints.data_ptr() if keep else 0,
    )
    if native.kernel("selective_scan")(_FORWARD.pack(*fields)):
        native.check(-1)
    return outputs


def _fake_scan(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    x, _, a, b = arguments[:4]
    return _outputs(x, a, b, arguments[10], arguments[12])


def _gradients(*arguments: Any) -> tuple[Tensor, ...]:
    """Of x, delta, a, b, c, d, z, bias, h; empty where there is no such input."""
    x, delta, a, b, c, d, z, bias, h = arguments[:9]
    strided = [x.new_empty(0) if t is None else torch.empty_like(t) for t in (x, delta, b, c, z)]
    dense = [x.new_empty(0) if t is None else t.new_empty(t.shape) for t in (a, d, bias, h)]
    return (*strided[:2], dense[0], *strided[2:4], dense[1], strided[4], *dense[2:])


def _scan_backward(*arguments: Any) -> tuple[Tensor, ...]:
    x, delta, a, b, c, d, z, bias, h, mask, cu_seqlens, softplus, d_y, d_h, checkpoints = arguments
    a = a.contiguous()
    d, bias, h = (None if t is None else t.contiguous() for t in (d, bias, h))
    d_y, d_h = readable(d_y), d_h.contiguous()
    outputs = _gradients(x, delta, a, b, c, d, z, bias, h)
    d_x, d_delta, d_a, d_b, d_c, d_d, d_z, d_bias, d_h0 = outputs
    groups = _groups(b)
    units = max(1, math.ceil(x.shape[2] // groups / 16))
    threads = torch.get_num_threads()
    parts = min(units, max(math.ceil(units / _UNITS_A_PART), math.ceil(threads / groups)))
    sums = x.new_empty(2, parts, *b.shape, dtype=torch.float32)
    fields = (
        *_head(x, delta, a, b, c, d, z, bias, h, mask, cu_seqlens, softplus),
        checkpoints.data_ptr(),
        *series(d_y),
        d_h.data_ptr(),
        *series(d_x),
        *series(d_delta),
        *(abi.ABSENT_SERIES if z is None else series(d_z)),
        parts,
        *(sums[0].data_ptr(), sums[1].data_ptr()),
        *(d_a.data_ptr(), *(0 if t is None else g.data_ptr() for t, g in ((d, d_d), (bias, d_bias), (h, d_h0)))),
    )
    if native.kernel("selective_scan_backward")(_BACKWARD.pack(*fields)):
        native.check(-1)
    d_b.copy_(sums[0].sum(0))
    d_c.copy_(sums[1].sum(0))
    return outputs


def _fake_scan_backward(*arguments: Any) -> tuple[Tensor, ...]:
    return _gradients(*arguments)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, softplus, _keep = inputs
    ctx.save_for_backward(*tensors, output[2])
    ctx.softplus = softplus
    ctx.mark_non_differentiable(output[2])


def _backward(ctx: Any, d_y: Tensor, d_h: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, checkpoints = ctx.saved_tensors
    if torch.is_grad_enabled():  # create_graph=True: what is computed here will be differentiated
        *inputs, mask, cu_seqlens = tensors
        found = derivatives.gradients(
            lambda x, delta, a, b, c, d, z, bias, h: torch_scan.selective_scan(
                x, delta, a, b, c, d, z, bias, ctx.softplus, h, mask, cu_seqlens
            ),
            inputs,
            ctx.needs_input_grad[:9],
            (d_y, d_h),
        )
        return (*found, *(None,) * 4)
    gradients = torch.ops.phistate.selective_scan_backward(*tensors, ctx.softplus, d_y, d_h, checkpoints)
    wanted = (g if want else None for g, want in zip(gradients, ctx.needs_input_grad[:9], strict=True))
    return (*wanted, *(None,) * 4)


def _step(
    state: Tensor,
    x: Tensor,
    delta: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    bias: Tensor | None,
    softplus: bool,
    repeat: int,
    low: float,
    high: float,
) -> Tensor:
    held = state
    if state.stride(2) != 1 or state.dtype not in abi.DTYPES:
        state = state.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    B, D, N = state.shape
    y = torch.empty_like(x)
    d = None if d is None else d.contiguous()
    bias = None if bias is None else bias.contiguous()
    fields = (
        *(_STEP.size, B, D, b.shape[1] if b.ndim == 3 else 1, N, repeat, softplus, low, high),
        *_token(x),
        *_token(delta),
        *_token(z),
        *_token(b),
        *_token(c),
        *(a.data_ptr(), *a.stride(), address(d), address(bias)),
        *(state.data_ptr(), state.stride(0), 0, state.stride(1), 1, abi.DTYPES[state.dtype]),
        *_token(y),
    )
    if native.kernel("selective_scan_step")(_STEP.pack(*fields)):
        native.check(-1)
    if held is not state:
        held.copy_(state)
    return y


def _token(x: Tensor | None) -> tuple[int, ...]:
    """``phistate_series`` of one token, ``[B,C]`` or ``[B,G,N]``."""
    if x is None:
        return abi.ABSENT_SERIES
    if x.ndim == 2:
        batch, channel = x.stride()
        return x.data_ptr(), batch, 0, 0, channel, abi.DTYPES[x.dtype]
    batch, group, channel = x.stride()
    return x.data_ptr(), batch, 0, group, channel, abi.DTYPES[x.dtype]


def _fake_step(state: Tensor, x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


library.impl("selective_scan", _scan, "CPU")
library.impl("selective_scan_backward", _scan_backward, "CPU")
library.impl("selective_scan_step_", _step, "CPU")
torch.library.register_fake("phistate::selective_scan", _fake_scan, lib=library)
torch.library.register_fake("phistate::selective_scan_backward", _fake_scan_backward, lib=library)
torch.library.register_fake("phistate::selective_scan_step_", _fake_step, lib=library)
torch.library.register_autograd("phistate::selective_scan", _backward, setup_context=_setup, lib=library)


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
    """y and the final state of a checked call, ``cu_seqlens`` int64 and dense in memory."""
    # What is small is widened here, under autograd; what is large, in the kernel.
    rate = A.float()
    skip, bias = (None if t is None else t.float() for t in (D, delta_bias))
    inputs = (x, delta, rate, B, C, skip, z, bias, initial_state)
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    y, h, _ = torch.ops.phistate.selective_scan(*inputs, mask, cu_seqlens, delta_softplus, keep)
    return y, h


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
    repeat: int = 1,
    limits: tuple[float, float] = (-math.inf, math.inf),
) -> Tensor:
    """One token of a checked call; ``repeat`` neighbouring channels share delta, A and bias."""
    rate = A.float()
    skip, bias = (None if t is None else t.float() for t in (D, delta_bias))
    # What torch cannot see through is for its dispatcher; calling past it costs a decode step a fifth less.
    run = torch.ops.phistate.selective_scan_step_ if torch.compiler.is_compiling() or not has_numbers(x) else _step
    return run(state, x, delta, rate, B, C, skip, z, bias, delta_softplus, repeat, *limits)
