"""The short causal convolution that stands before the mixer in every hybrid layer."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from phistate.ops.backends import causal_conv1d as cpu
from phistate.ops.backends import torch_scan
from phistate.ops.checks import (
    check_float,
    check_mask,
    check_no_gradient,
    check_side_input,
    check_state,
    packed_offsets,
    use_native,
)
from phistate.values import overwritten

MAX_WIDTH = 8
"""The widest filter taken."""


@overload
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = ...,
    activation: str | None = ...,
    initial_state: Tensor | None = ...,
    return_state: Literal[False] = ...,
    mask: Tensor | None = ...,
    cu_seqlens: Tensor | None = ...,
    backend: str = ...,
) -> Tensor: ...


@overload
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = ...,
    activation: str | None = ...,
    initial_state: Tensor | None = ...,
    *,
    return_state: Literal[True],
    mask: Tensor | None = ...,
    cu_seqlens: Tensor | None = ...,
    backend: str = ...,
) -> tuple[Tensor, Tensor]: ...


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Each channel filtered by its own few taps, seeing nothing ahead.

    Per channel::

        y_t = Σ_{w<W} weight_w x_{t-W+1+w} + bias          before the first step stands the initial state, or 0
        y_t = silu(y_t)                                    activation="silu"

    Args:
        x: ``[B,T,C]`` inputs, float64, float32, bfloat16 or float16. A strided view is fine; both ``[B,T,C]`` and a
            transposed ``[B,C,T]`` in memory run without a copy; native output has x's layout.
        weight: ``[C,W]``, W from 2 to 8, the last tap at the present. In x's dtype or float32.
        bias: ``[C]``, in x's dtype or float32; None: 0.
        activation: ``"silu"`` or None.
        initial_state: ``[B,C,W-1]`` in x's dtype, the inputs before the first, oldest first; None: zeros.
        return_state: give the state after the last step too, whatever T is.
        mask: ``[B,T]`` bool, True = token. A padded step is not there: no window contains it, the state does not
            remember it; its row is 0.
        cu_seqlens: ``[N+1]`` offsets of N packed sequences, B == 1, from 0 to T; a state then has batch N.
        backend: ``"auto"``, ``"cpu"`` (native kernels) or ``"torch"``.

    Returns:
        ``[B,T,C]`` in x's dtype, and the state if asked. Sums are float32 (float64 for float64).

    Raises:
        ValueError: shapes, values or choices that do not fit, naming the argument, what came and what is taken.
        TypeError: a wrong type or dtype.

    >>> import torch, phistate
    >>> x, weight = torch.randn(1, 6, 8), torch.randn(8, 4)
    >>> whole = phistate.causal_conv1d(x, weight, activation="silu")
    >>> first, state = phistate.causal_conv1d(x[:, :2], weight, activation="silu", return_state=True)
    >>> rest = phistate.causal_conv1d(x[:, 2:], weight, activation="silu", initial_state=state)
    >>> torch.allclose(whole, torch.cat([first, rest], 1), atol=1e-6)
    True
    """
    check_float("x", x, "[B,T,C]", 3)
    _check(x, weight, bias, activation)
    check_mask(mask, x)
    offsets = packed_offsets(cu_seqlens, x)
    if initial_state is not None:
        rows = x.shape[0] if offsets is None else offsets.numel() - 1
        check_side_input("initial_state", initial_state, x, [(rows, x.shape[2], weight.shape[1] - 1)], [x.dtype])
    if use_native(backend, cpu.reasons_against(x, weight, bias, initial_state)):
        y, state = cpu.convolve(x, weight, bias, activation == "silu", initial_state, mask, offsets)
    else:
        y, state = torch_scan.causal_conv1d(x, weight, bias, activation == "silu", initial_state, mask, offsets)
    return (y, state) if return_state else y


def causal_conv1d_step_(
    state: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    backend: str = "auto",
) -> Tensor:
    """One token of :func:`causal_conv1d`, the state updated in place: the decode step. Records no gradient.

    Args:
        state: ``[B,C,W-1]``, or longer (models keep W or more): the last inputs, oldest first; overwritten by the
            state after this token, with a place for every element. Any floating type. A call that fails leaves it as
            it was.
        x: ``[B,C]`` inputs.
        weight: ``[C,W]``, W from 2 to 8. In x's dtype or float32.
        bias: ``[C]`` or None.
        activation: ``"silu"`` or None.
        backend: ``"auto"``, ``"cpu"`` or ``"torch"``.

    Returns:
        ``[B,C]`` in x's dtype.

    Raises:
        ValueError: shapes or choices that do not fit, or inputs whose gradient would be lost.
        TypeError: a wrong type or dtype.

    >>> import torch, phistate
    >>> x, weight, state = torch.randn(1, 8), torch.randn(8, 4), torch.zeros(1, 8, 3)
    >>> y = phistate.causal_conv1d_step_(state, x, weight)
    >>> torch.equal(state[..., -1], x), torch.allclose(y, weight[:, -1] * x)
    (True, True)
    """
    check_float("x", x, "[B,C]", 2)
    _check(x, weight, bias, activation)
    width = weight.shape[1]
    kept = state.shape[2] if isinstance(state, Tensor) and state.ndim == 3 else 0
    check_state(state, "[B,C,W-1 or more]", (*x.shape, max(kept, width - 1)), x)
    check_no_gradient(state, x, weight, bias)
    if use_native(backend, cpu.reasons_against(x, weight, bias, state)):
        y = cpu.step_(state, x, weight, bias, activation == "silu")
        overwritten(state)
        return y
    past = state[..., kept - width + 1 :].to(x.dtype)
    y, _ = torch_scan.causal_conv1d(x.unsqueeze(1), weight, bias, activation == "silu", past, None, None)
    state.copy_(torch.cat([state[..., 1:], x.unsqueeze(-1).to(state.dtype)], -1))
    return y.squeeze(1)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> None:
    channels = x.shape[-1]
    if not isinstance(weight, Tensor):
        raise TypeError(f"weight: got {type(weight).__name__}; takes a torch.Tensor")
    if weight.ndim != 2 or not 2 <= weight.shape[1] <= MAX_WIDTH:
        raise ValueError(f"weight: got shape {tuple(weight.shape)}; takes [C,W] with W from 2 to {MAX_WIDTH}")
    check_side_input("weight", weight, x, [(channels, weight.shape[1])])
    check_side_input("bias", bias, x, [(channels,)])
    if activation not in (None, "silu"):
        raise ValueError(f"activation: got {activation!r}; takes 'silu' or None")
