"""The short convolution's kernels as torch operators: forward, backward, and the one-token step in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phistate.ops.backends import abi, derivatives, native, torch_scan
from phistate.ops.backends.abi import address, layout, series
from phistate.ops.backends.selective_scan import readable, reasons_against
from phistate.values import has_numbers

__all__ = ["convolve", "reasons_against", "step_"]

_HEAD = "bytes layout channels width silu x"
_FORWARD = abi.form(abi.Conv, f"{_HEAD} y weight bias s0 s")
_BACKWARD = abi.form(abi.Conv, f"{_HEAD} weight bias s0 d_y d_s d_x d_s0 d_weight d_bias")
_STEP = abi.form(abi.ConvStep, "bytes batch channels width kept silu x y weight bias s")

_SCHEMA = "Tensor x, Tensor weight, Tensor? bias, Tensor? s, Tensor? mask, Tensor? cu_seqlens, bool silu"

library = torch.library.Library("phistate", "FRAGMENT")
library.define(f"causal_conv1d({_SCHEMA}) -> (Tensor, Tensor)")
library.define(f"causal_conv1d_backward({_SCHEMA}, Tensor d_y, Tensor d_s) -> (Tensor, Tensor, Tensor, Tensor)")
library.define("causal_conv1d_step_(Tensor(a!) state, Tensor x, Tensor weight, Tensor? bias, bool silu) -> Tensor")


def _state(s: Tensor | None) -> tuple[int, ...]:
    """A state ``[N,C,W-1]`` as ``phistate_series``: its last dimension is time."""
    return abi.ABSENT_SERIES if s is None else series(s.transpose(1, 2))


def _outputs(x: Tensor, weight: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    return torch.empty_like(x), x.new_empty(sequences, x.shape[2], weight.shape[1] - 1)


def _head(x: Tensor, weight: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, silu: bool) -> tuple[int, ...]:
    """The values of the fields ``_HEAD``. The tensors must outlive the call."""
    return _FORWARD.size, *layout(x, mask, cu_seqlens), x.shape[2], weight.shape[1], silu, *series(x)


def _convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    s: Tensor | None,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    silu: bool,
) -> tuple[Tensor, Tensor]:
    weight, bias = weight.contiguous(), None if bias is None else bias.contiguous()
    outputs = y, last = _outputs(x, weight, cu_seqlens)
    fields = (
        *_head(x, weight, mask, cu_seqlens, silu),
        *(*series(y), weight.data_ptr(), address(bias), *_state(s), *_state(last)),
    )
    if native.kernel("causal_conv1d")(_FORWARD.pack(*fields)):
        native.check(-1)
    return outputs


def _fake_convolve(*arguments: Any) -> tuple[Tensor, Tensor]:
    return _outputs(arguments[0], arguments[1], arguments[5])


def _gradients(*arguments: Any) -> tuple[Tensor, ...]:
    """Of x, weight, bias, s; empty where there is no such input."""
    x, weight, bias, s = arguments[:4]
    dense = [x.new_empty(0) if t is None else t.new_empty(t.shape) for t in (weight, bias, s)]
    return torch.empty_like(x), *dense


def _convolve_backward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    s: Tensor | None,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    silu: bool,
    d_y: Tensor,
    d_s: Tensor,
) -> tuple[Tensor, ...]:
    weight, bias = weight.contiguous(), None if bias is None else bias.contiguous()
    d_y = readable(d_y)
    outputs = d_x, d_weight, d_bias, d_s0 = _gradients(x, weight, bias, s)
    fields = (
        *_head(x, weight, mask, cu_seqlens, silu),
        *(weight.data_ptr(), address(bias), *_state(s)),
        *(*series(d_y), *_state(d_s), *series(d_x), *(abi.ABSENT_SERIES if s is None else _state(d_s0))),
        *(d_weight.data_ptr(), 0 if bias is None else d_bias.data_ptr()),
    )
    if native.kernel("causal_conv1d_backward")(_BACKWARD.pack(*fields)):
        native.check(-1)
    return outputs


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, silu = inputs
    ctx.save_for_backward(*tensors)
    ctx.silu = silu


def _backward(ctx: Any, d_y: Tensor, d_s: Tensor) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():  # create_graph=True: what is computed here will be differentiated
        *inputs, mask, cu_seqlens = ctx.saved_tensors
        found = derivatives.gradients(
            lambda x, weight, bias, past: torch_scan.causal_conv1d(x, weight, bias, ctx.silu, past, mask, cu_seqlens),
            inputs,
            ctx.needs_input_grad[:4],
            (d_y, d_s),
        )
        return (*found, None, None, None)
    gradients = torch.ops.phistate.causal_conv1d_backward(*ctx.saved_tensors, ctx.silu, d_y, d_s)
    wanted = (g if want else None for g, want in zip(gradients, ctx.needs_input_grad[:4], strict=True))
    return (*wanted, None, None, None)


def _step(state: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    weight, bias = weight.contiguous(), None if bias is None else bias.contiguous()
    held = state
    if state.stride(2) != 1 or state.dtype not in abi.DTYPES:
        state = state.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    y = torch.empty_like(x)
    B, C, kept = state.shape
    fields = (
        *(_STEP.size, B, C, weight.shape[1], kept, silu),
        *(x.data_ptr(), x.stride(0), 0, 0, x.stride(1), abi.DTYPES[x.dtype]),
        *(y.data_ptr(), y.stride(0), 0, 0, y.stride(1), abi.DTYPES[y.dtype]),
        *(weight.data_ptr(), address(bias)),
        *(state.data_ptr(), state.stride(0), 1, 0, state.stride(1), abi.DTYPES[state.dtype]),
    )
    if native.kernel("causal_conv1d_step")(_STEP.pack(*fields)):
        native.check(-1)
    if held is not state:
        held.copy_(state)
    return y


def _fake_step(state: Tensor, x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


library.impl("causal_conv1d", _convolve, "CPU")
library.impl("causal_conv1d_backward", _convolve_backward, "CPU")
library.impl("causal_conv1d_step_", _step, "CPU")
torch.library.register_fake("phistate::causal_conv1d", _fake_convolve, lib=library)
torch.library.register_fake("phistate::causal_conv1d_backward", _gradients, lib=library)
torch.library.register_fake("phistate::causal_conv1d_step_", _fake_step, lib=library)
torch.library.register_autograd("phistate::causal_conv1d", _backward, setup_context=_setup, lib=library)


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    initial_state: Tensor | None,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """y and the final state of a checked call, ``cu_seqlens`` int64 and dense in memory."""
    taps, shift = weight.float(), None if bias is None else bias.float()
    return torch.ops.phistate.causal_conv1d(x, taps, shift, initial_state, mask, cu_seqlens, silu)


def step_(state: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """One token of a checked call."""
    run = torch.ops.phistate.causal_conv1d_step_ if torch.compiler.is_compiling() or not has_numbers(x) else _step
    return run(state, x, weight.float(), None if bias is None else bias.float(), silu)
