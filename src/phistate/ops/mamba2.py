"""Mamba-2's scan in its own arguments: a row of the mixer table, run by linear_attention."""

from __future__ import annotations

from typing import Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from phistate.ops.backends import selective_scan as cpu
from phistate.ops.checks import (
    check_float,
    check_log,
    check_mask,
    check_no_gradient,
    check_side_input,
    check_state,
    use_native,
)
from phistate.ops.linear_attention import linear_attention
from phistate.ops.state import State
from phistate.values import overwritten, transformed


@overload
def mamba2_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = ...,
    z: Tensor | None = ...,
    dt_bias: Tensor | None = ...,
    dt_softplus: bool = ...,
    dt_limit: tuple[float, float] = ...,
    initial_state: State | None = ...,
    return_state: Literal[False] = ...,
    mask: Tensor | None = ...,
    cu_seqlens: Tensor | None = ...,
    backend: str = ...,
) -> Tensor: ...


@overload
def mamba2_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = ...,
    z: Tensor | None = ...,
    dt_bias: Tensor | None = ...,
    dt_softplus: bool = ...,
    dt_limit: tuple[float, float] = ...,
    initial_state: State | None = ...,
    *,
    return_state: Literal[True],
    mask: Tensor | None = ...,
    cu_seqlens: Tensor | None = ...,
    backend: str = ...,
) -> tuple[Tensor, State]: ...


def mamba2_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    initial_state: State | None = None,
    return_state: bool = False,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, State]:
    """Mamba-2: :func:`linear_attention` with q = C, k = B, v = x·Δ, decay = Δ·A and scale 1.

    Per head, with Δ_t = dt_t + bias, through softplus if asked, then clamped to the limits::

        S_t = exp(Δ_t A) S_{t-1} + B_t (Δ_t x_t)ᵀ
        y_t = S_tᵀ C_t + D x_t
        y_t = y_t · silu(z_t)                             with a gate

    Args:
        x: ``[B,T,H,P]`` inputs, float64, float32, bfloat16 or float16.
        dt: ``[B,T,H]`` step sizes. Like every tensor below but the state: in x's dtype or float32.
        A: ``[H]`` log-rates, ≤ 0.
        B: ``[B,T,G,N]`` what a step writes; head h uses group h // (H // G).
        C: as B, what a step reads.
        D: ``[H]`` or ``[H,P]`` skip connection; None: none.
        z: ``[B,T,H,P]`` gate; None: none.
        dt_bias: ``[H]`` added to dt; None: 0.
        dt_softplus: Δ = log(1 + exp(dt + bias)).
        dt_limit: Δ is clamped to these two.
        initial_state: carries on from a :class:`State`, whose s is ``[B,H,N,P]``; None: from nothing.
        return_state: give the final State too.
        mask: ``[B,T]`` bool, True = token. A padded step changes nothing; its row is 0.
        cu_seqlens: ``[N+1]`` offsets of N packed sequences, B == 1, from 0 to T; a state then has batch N.
        backend: ``"auto"``, ``"cpu"`` (native kernels) or ``"torch"``.

    Returns:
        ``[B,T,H,P]`` in x's dtype, and the State if asked.

    Raises:
        ValueError: shapes, values or choices that do not fit, naming the argument, what came and what is taken.
        TypeError: a wrong type or dtype.

    Source: Dao and Gu 2024 (arXiv:2405.21060).

    >>> import torch, phistate
    >>> x, dt, A = torch.randn(1, 6, 4, 8), torch.rand(1, 6, 4), -torch.rand(4)
    >>> B, C = torch.randn(2, 1, 6, 2, 16).unbind()
    >>> y, state = phistate.mamba2_scan(x, dt, A, B, C, return_state=True)
    >>> y.shape, state.s.shape
    (torch.Size([1, 6, 4, 8]), torch.Size([1, 4, 16, 8]))
    """
    check_float("x", x, "[B,T,H,P]", 4)
    _check(x, dt, A, B, C, D, z, dt_bias, dt_limit)
    check_mask(mask, x)
    padded = None if mask is None else ~mask[:, :, None]
    if padded is not None:
        # linear_attention drops padded rows of q, k and v; what it is not given must be dropped here.
        x, dt = x.masked_fill(padded.unsqueeze(-1), 0.0), dt.masked_fill(padded, 0.0)
        z = None if z is None else z.masked_fill(padded.unsqueeze(-1), 0.0)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    step = _step_sizes(dt, dt_bias, dt_softplus, dt_limit, wide)
    decay = step * A.to(wide)
    try:
        check_log("dt", decay, "Δ·A")
    except ValueError:
        check_log("A", A)  # whose fault it may be
        raise
    # Where B or C is wider than x, all are: rounding them to x's type would lose what they came with.
    one = x.dtype if B.dtype == C.dtype == x.dtype else wide
    y, state = linear_attention(
        C.to(one),
        B.to(one),
        x.to(one),
        decay=decay,
        beta=step,
        scale=1.0,
        initial_state=initial_state,
        return_state=True,
        mask=mask,
        cu_seqlens=cu_seqlens,
        backend=backend,
    )
    if D is not None:
        skip = (D.unsqueeze(-1) if D.ndim == 1 else D).to(one)
        y = (torch.addcmul if transformed(y, skip) else Tensor.addcmul_)(y, skip, x.to(one))
    if z is not None:
        y = y * F.silu(z).to(one)
    y = y.to(x.dtype)
    return (y, state) if return_state else y


def mamba2_step_(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    backend: str = "auto",
) -> Tensor:
    """One token of :func:`mamba2_scan`, the state updated in place: the decode step. Records no gradient.

    Args:
        state: ``[B,H,P,N]``, as models keep it, overwritten by the state after this token; any floating type and
            order in memory with a place for every element, fastest where N or P is dense. What a State holds is
            ``state.s.mT``. A call that fails leaves it as it was.
        x: ``[B,H,P]`` inputs.
        dt: ``[B,H]`` step sizes.
        A: ``[H]`` log-rates, ≤ 0.
        B: ``[B,G,N]``.
        C: as B.
        D: ``[H]``, ``[H,P]`` or None.
        z: ``[B,H,P]`` or None.
        dt_bias: ``[H]`` or None.
        dt_softplus: as there.
        dt_limit: as there.
        backend: as there.

    Returns:
        ``[B,H,P]`` in x's dtype.

    Raises:
        ValueError: shapes or choices that do not fit, or inputs whose gradient would be lost.
        TypeError: a wrong type or dtype.

    >>> import torch, phistate
    >>> x, dt, A = torch.randn(1, 4, 8), torch.rand(1, 4), -torch.rand(4)
    >>> B, C = torch.randn(2, 1, 2, 16).unbind()
    >>> state = torch.zeros(1, 4, 8, 16)
    >>> phistate.mamba2_step_(state, x, dt, A, B, C).shape
    torch.Size([1, 4, 8])
    """
    check_float("x", x, "[B,H,P]", 3)
    _check(x, dt, A, B, C, D, z, dt_bias, dt_limit)
    rows, heads, P = x.shape
    N = B.shape[-1]
    check_state(state, "[B,H,P,N]", (rows, heads, P, N), x)
    check_no_gradient(state, x, dt, A, B, C, D, z, dt_bias)
    native = use_native(backend, cpu.reasons_against(x, dt, A, B, C, D, z, dt_bias, state))
    if native and state.stride(3) == 1 and state.stride(1) == P * state.stride(2):
        flat = state.flatten(1, 2)
        rate = A.float().unsqueeze(1).expand(heads, N)
        skip = D if D is None else (D.repeat_interleave(P) if D.ndim == 1 else D.flatten())
        inputs = (x.flatten(1), dt, rate, B, C, skip, None if z is None else z.flatten(1), dt_bias)
        y = cpu.step_(flat, *inputs, dt_softplus, P, dt_limit).unflatten(1, (heads, P))
        overwritten(state)
        return y
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    step = _step_sizes(dt, dt_bias, dt_softplus, dt_limit, wide)
    write, read = (t.repeat_interleave(heads // t.shape[1], 1).to(wide).unsqueeze(2) for t in (B, C))
    held = state.to(wide) * (step * A.to(wide)).exp()[..., None, None]
    held = held + (step.unsqueeze(-1) * x.to(wide)).unsqueeze(-1) * write
    y = (held * read).sum(-1)
    if D is not None:
        y = y + (D.unsqueeze(-1) if D.ndim == 1 else D).to(wide) * x.to(wide)
    if z is not None:
        y = y * F.silu(z.to(wide))
    state.copy_(held)
    return y.to(x.dtype)


def _check(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_limit: tuple[float, float],
) -> None:
    """What stands beside x, with time or, in a step, without it."""
    *steps, heads, P = x.shape
    if heads == 0:
        raise ValueError("x: got 0 heads; takes one or more")
    for name, value in (("dt", dt), ("A", A), ("B", B), ("C", C)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name}: got {type(value).__name__}; takes a torch.Tensor")
    check_side_input("dt", dt, x, [(*steps, heads)])
    check_side_input("A", A, x, [(heads,)])
    check_side_input("D", D, x, [(heads,), (heads, P)])
    check_side_input("z", z, x, [tuple(x.shape)])
    check_side_input("dt_bias", dt_bias, x, [(heads,)])
    if B.ndim != x.ndim or list(B.shape[:-2]) != steps or B.shape[-2] == 0 or heads % B.shape[-2]:
        layout = "[B,T,G,N]" if x.ndim == 4 else "[B,G,N]"
        raise ValueError(f"B: got shape {tuple(B.shape)}; takes {layout}, G a count that divides H = {heads}")
    for name, value in (("B", B), ("C", C)):
        check_side_input(name, value, x, [tuple(B.shape)])
    low, high = dt_limit
    if not low <= high:
        raise ValueError(f"dt_limit: got {dt_limit}; takes a lower and an upper limit")


def _step_sizes(
    dt: Tensor, dt_bias: Tensor | None, dt_softplus: bool, dt_limit: tuple[float, float], wide: torch.dtype
) -> Tensor:
    step = dt.to(wide)
    if dt_bias is not None:
        step = step + dt_bias.to(wide)
    if dt_softplus:
        step = F.softplus(step)
    return step.clamp(*dt_limit)
