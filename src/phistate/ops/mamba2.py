"""Mamba-2's scan in its own arguments: a row of the mixer table, run by linear_attention."""

from __future__ import annotations

from typing import Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from phistate.ops.checks import check_float, check_mask, check_side_input
from phistate.ops.linear_attention import linear_attention
from phistate.ops.state import State


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
        dt: ``[B,T,H]`` step sizes. Like A, D, dt_bias: in x's dtype or float32.
        A: ``[H]`` log-rates, ≤ 0.
        B: ``[B,T,G,N]`` what a step writes, in x's dtype; head h uses group h // (H // G).
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
    rows, T, heads, P = x.shape
    for name, value in (("dt", dt), ("A", A), ("B", B), ("C", C)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name}: got {type(value).__name__}; takes a torch.Tensor")
    check_side_input("dt", dt, x, [(rows, T, heads)])
    check_side_input("A", A, x, [(heads,)])
    check_side_input("D", D, x, [(heads,), (heads, P)])
    check_side_input("z", z, x, [tuple(x.shape)])
    check_side_input("dt_bias", dt_bias, x, [(heads,)])
    if B.ndim != 4 or B.shape[2] == 0 or heads % B.shape[2]:
        raise ValueError(f"B: got shape {tuple(B.shape)}; takes [B,T,G,N], G a count that divides H = {heads}")
    if C.shape != B.shape:
        raise ValueError(f"C: got shape {tuple(C.shape)}; takes {tuple(B.shape)}, as B has")
    low, high = dt_limit
    if not low <= high:
        raise ValueError(f"dt_limit: got {dt_limit}; takes a lower and an upper limit")
    check_mask(mask, x)
    padded = None if mask is None else ~mask[:, :, None]
    if padded is not None:
        # linear_attention drops padded rows of q, k and v; what it is not given must be dropped here.
        x, dt = x.masked_fill(padded.unsqueeze(-1), 0.0), dt.masked_fill(padded, 0.0)
        z = None if z is None else z.masked_fill(padded.unsqueeze(-1), 0.0)
    step = dt.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    if dt_bias is not None:
        step = step + dt_bias.to(step.dtype)
    if dt_softplus:
        step = F.softplus(step)
    if low > 0.0 or high != float("inf") or not dt_softplus:
        step = step.clamp(low, high)
    o = linear_attention(
        C,
        B,
        (x * step.unsqueeze(-1)).to(x.dtype),
        decay=step * A.to(step.dtype),
        scale=1.0,
        initial_state=initial_state,
        return_state=True,
        mask=mask,
        cu_seqlens=cu_seqlens,
        backend=backend,
    )
    y, state = o
    if D is not None:
        y = y + (D.unsqueeze(-1) if D.ndim == 1 else D).to(x.dtype) * x
    if z is not None:
        y = y * F.silu(z).to(x.dtype)
    return (y, state) if return_state else y
