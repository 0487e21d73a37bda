"""Mamba-1's selective scan: a decay of its own for every entry of the state."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from phistate.ops.backends import selective_scan as cpu
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


@overload
def selective_scan(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = ...,
    z: Tensor | None = ...,
    delta_bias: Tensor | None = ...,
    delta_softplus: bool = ...,
    initial_state: Tensor | None = ...,
    return_state: Literal[False] = ...,
    mask: Tensor | None = ...,
    cu_seqlens: Tensor | None = ...,
    backend: str = ...,
) -> Tensor: ...


@overload
def selective_scan(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = ...,
    z: Tensor | None = ...,
    delta_bias: Tensor | None = ...,
    delta_softplus: bool = ...,
    initial_state: Tensor | None = ...,
    *,
    return_state: Literal[True],
    mask: Tensor | None = ...,
    cu_seqlens: Tensor | None = ...,
    backend: str = ...,
) -> tuple[Tensor, Tensor]: ...


def selective_scan(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Mamba-1: every channel keeps N numbers, each forgetting at its own, input-dependent rate.

    Per channel, with Δ_t = delta_t + bias (through softplus if asked)::

        h_t = exp(Δ_t A) ⊙ h_{t-1} + Δ_t x_t B_t          N entries
        y_t = h_tᵀ C_t + D x_t
        y_t = y_t · silu(z_t)                             with a gate

    Args:
        x: ``[B,T,D]`` inputs, float64, float32, bfloat16 or float16. As every tensor here it may be a strided view;
            both ``[B,T,D]`` and a transposed ``[B,D,T]`` in memory run without a copy; native output has x's layout.
        delta: ``[B,T,D]`` step sizes. Like every tensor below but the state: in x's dtype or float32.
        A: ``[D,N]`` log-rates, negative where the state is to forget.
        B: ``[B,T,N]`` what a step writes, or ``[B,T,G,N]``: channel d uses group d // (D // G).
        C: as B, what a step reads.
        D: ``[D]`` skip connection; None: none.
        z: ``[B,T,D]`` gate; None: none.
        delta_bias: ``[D]`` added to delta; None: 0.
        delta_softplus: Δ = log(1 + exp(delta + bias)).
        initial_state: ``[B,D,N]`` float32 (float64 for float64 inputs), h before the first step; None: 0.
        return_state: give the final state too.
        mask: ``[B,T]`` bool, True = token. A padded step changes nothing: no write, no decay; its row is 0.
        cu_seqlens: ``[N+1]`` offsets of N packed sequences, B == 1, from 0 to T; a state then has batch N.
        backend: ``"auto"``, ``"cpu"`` (native kernels) or ``"torch"``.

    Returns:
        ``[B,T,D]`` in x's dtype, and the state if asked. Sums and state are float32 (float64 for float64).

    Raises:
        ValueError: shapes, values or choices that do not fit, naming the argument, what came and what is taken.
        TypeError: a wrong type or dtype.

    Source: Gu and Dao 2023 (arXiv:2312.00752), algorithm 2.

    >>> import torch, phistate
    >>> x, delta, A = torch.randn(1, 6, 8), torch.rand(1, 6, 8), -torch.rand(8, 4)
    >>> B, C = torch.randn(2, 1, 6, 4).unbind()
    >>> whole = phistate.selective_scan(x, delta, A, B, C)
    >>> first, h = phistate.selective_scan(x[:, :4], delta[:, :4], A, B[:, :4], C[:, :4], return_state=True)
    >>> rest = phistate.selective_scan(x[:, 4:], delta[:, 4:], A, B[:, 4:], C[:, 4:], initial_state=h)
    >>> torch.allclose(whole, torch.cat([first, rest], 1), atol=1e-5)
    True
    """
    check_float("x", x, "[B,T,D]", 3)
    _check(x, delta, A, B, C, D, z, delta_bias)
    check_mask(mask, x)
    offsets = packed_offsets(cu_seqlens, x)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    if initial_state is not None:
        rows = x.shape[0] if offsets is None else offsets.numel() - 1
        check_side_input("initial_state", initial_state, x, [(rows, *A.shape)], [wide])
    if use_native(backend, cpu.reasons_against(x, delta, A, B, C, D, z, delta_bias, initial_state)):
        y, h = cpu.scan(x, delta, A, B, C, D, z, delta_bias, delta_softplus, initial_state, mask, offsets)
    else:
        y, h = torch_scan.selective_scan(
            x, delta, A, B, C, D, z, delta_bias, delta_softplus, initial_state, mask, offsets
        )
    return (y, h) if return_state else y


def selective_scan_step_(
    state: Tensor,
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    backend: str = "auto",
) -> Tensor:
    """One token of :func:`selective_scan`, the state updated in place: the decode step. Records no gradient.

    Args:
        state: ``[B,D,N]``, overwritten by the state after this token, with a place for every element. Any floating
            type; sums are float32 all the same. A call that fails leaves it as it was.
        x: ``[B,D]`` inputs.
        delta: ``[B,D]`` step sizes.
        A: ``[D,N]`` log-rates. One rate per channel expanded to ``[D,N]`` (Mamba-2) costs one exponential per channel.
        B: ``[B,N]`` or ``[B,G,N]``.
        C: as B.
        D: ``[D]`` or None.
        z: ``[B,D]`` or None.
        delta_bias: ``[D]`` or None.
        delta_softplus: as there.
        backend: as there.

    Returns:
        ``[B,D]`` in x's dtype.

    Raises:
        ValueError: shapes or choices that do not fit, or inputs whose gradient would be lost.
        TypeError: a wrong type or dtype.

    >>> import torch, phistate
    >>> x, delta, A = torch.randn(1, 8), torch.rand(1, 8), -torch.rand(8, 4)
    >>> B, C = torch.randn(2, 1, 4).unbind()
    >>> state = torch.zeros(1, 8, 4)
    >>> y = phistate.selective_scan_step_(state, x, delta, A, B, C)
    >>> torch.allclose(state, (delta * x).unsqueeze(-1) * B.unsqueeze(1))
    True
    """
    check_float("x", x, "[B,D]", 2)
    _check(x, delta, A, B, C, D, z, delta_bias)
    check_state(state, "[B,D,N]", (x.shape[0], *A.shape), x)
    check_no_gradient(state, x, delta, A, B, C, D, z, delta_bias)
    if use_native(backend, cpu.reasons_against(x, delta, A, B, C, D, z, delta_bias, state)):
        y = cpu.step_(state, x, delta, A, B, C, D, z, delta_bias, delta_softplus)
        overwritten(state)
        return y
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    one, steps, write, read = (t.unsqueeze(1) for t in (x, delta, B, C))
    gate = None if z is None else z.unsqueeze(1)
    y, h = torch_scan.selective_scan(
        one, steps, A, write, read, D, gate, delta_bias, delta_softplus, state.to(wide), None, None
    )
    state.copy_(h)
    return y.squeeze(1)


def _check(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
) -> None:
    """What stands beside x, with time or, in a step, without it."""
    *steps, channels = x.shape
    for name, value in (("delta", delta), ("A", A), ("B", B), ("C", C)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name}: got {type(value).__name__}; takes a torch.Tensor")
    check_side_input("delta", delta, x, [(*steps, channels)])
    if A.ndim != 2 or A.shape[0] != channels:
        raise ValueError(f"A: got shape {tuple(A.shape)}; takes [D,N] with D = {channels}, as x has")
    N = A.shape[1]
    check_side_input("A", A, x, [(channels, N)])
    shapes: list[tuple[int, ...]] = [(*steps, N)]
    if B.ndim == x.ndim + 1:
        groups = B.shape[-2]
        if groups == 0 or channels % groups:
            raise ValueError(f"B: got {groups} groups; takes a count that divides D = {channels}")
        shapes = [(*steps, groups, N)]
    check_side_input("B", B, x, shapes)
    check_side_input("C", C, x, shapes)
    check_side_input("z", z, x, [(*steps, channels)])
    check_side_input("D", D, x, [(channels,)])
    check_side_input("delta_bias", delta_bias, x, [(channels,)])
