"""What people import from mamba_ssm for Mamba-1: its scan, the layer's fused function and the decode step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from phistate.compat.arguments import FLOATING, beside, on_cpu
from phistate.compat.causal_conv1d import causal_conv1d_fn
from phistate.compat.mamba_ssm.norms import rms_norm
from phistate.compat.rows import chosen, put_back, row_numbers
from phistate.ops.checks import check_float, check_side_input
from phistate.ops.mamba2 import mamba2_step_
from phistate.ops.selective_scan import selective_scan, selective_scan_step_


def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """selective_scan: Mamba-1's scan over all tokens.

    Args:
        u: ``[B,D,L]`` inputs.
        delta: ``[B,D,L]`` step sizes.
        A: ``[D,N]`` log-rates. Complex ones are refused.
        B: ``[B,N,L]``, ``[B,G,N,L]`` with G dividing D, or constant in time, ``[D,N]``.
        C: as B, one of the three by itself.
        D: ``[D]`` skip connection, or None.
        z: ``[B,D,L]`` gate, or None.
        delta_bias: ``[D]`` or None.
        delta_softplus: Δ = log(1 + exp(delta + bias)).
        return_last_state: give the state after the last token too.

    Returns:
        ``[B,D,L]`` in u's dtype, and ``[B,D,N]`` float32 if asked; the state has a gradient here, in mamba_ssm none.

    Raises:
        ValueError: shapes that do not fit.
        TypeError: a wrong type or dtype; a complex A.

    >>> u, A, B = torch.ones(1, 2, 3), torch.zeros(2, 1), torch.ones(1, 1, 3)
    >>> selective_scan_fn(u, u, A, B, B)[0, 0].tolist()
    [1.0, 2.0, 3.0]
    """
    on_cpu("mamba_ssm", "u", u, "[B,D,L]", 3)
    A = _rates(A, u, u.shape[1:2])
    delta, z = beside("delta", delta, u, tuple(u.shape)), beside("z", z, u, tuple(u.shape))
    D, delta_bias = beside("D", D, u, (u.shape[1],)), beside("delta_bias", delta_bias, u, (u.shape[1],))
    write, read = _per_token("B", B, u, A.shape[1]), _per_token("C", C, u, A.shape[1])
    if write.shape != read.shape:
        write, read = _per_channel(write, u.shape[1]), _per_channel(read, u.shape[1])
    y, state = selective_scan(
        u.transpose(1, 2),
        delta.transpose(1, 2),
        A,
        write,
        read,
        D,
        None if z is None else z.transpose(1, 2),
        delta_bias,
        delta_softplus,
        return_state=True,
    )
    y = y.transpose(1, 2)
    return (y, state) if return_last_state else y


def selective_scan_ref(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """selective_scan, as :func:`selective_scan_fn`, under the name of the package's reference."""
    return selective_scan_fn(u, delta, A, B, C, D, z, delta_bias, delta_softplus, return_last_state)


def mamba_inner_fn(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    A: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
    delta_softplus: bool = True,
    checkpoint_lvl: int = 1,
    b_rms_weight: Tensor | None = None,
    c_rms_weight: Tensor | None = None,
    dt_rms_weight: Tensor | None = None,
    b_c_dt_rms_eps: float = 1e-6,
) -> Tensor:
    """Mamba-1's layer after its first projection: causal_conv1d, selective_scan and the products between.

    Args:
        xz: ``[B,2D,L]``, inputs and gate.
        conv1d_weight: ``[D,1,W]``.
        conv1d_bias: ``[D]`` or None.
        x_proj_weight: ``[R+2N,D]``, from the convolved inputs to delta's R numbers, B and C.
        delta_proj_weight: ``[D,R]``.
        out_proj_weight: ``[E,D]``.
        out_proj_bias: ``[E]`` or None.
        A: ``[D,N]`` log-rates.
        B: as in :func:`selective_scan_fn`; None: from the inputs.
        C: as B.
        D: ``[D]`` or None.
        delta_bias: ``[D]`` or None.
        B_proj_bias: ``[N]`` added to a B from the inputs; None: nothing.
        C_proj_bias: as that.
        delta_softplus: as in :func:`selective_scan_fn`.
        checkpoint_lvl: 0 or 1. There it trades memory for time; here it changes nothing.
        b_rms_weight: ``[N]``: B is divided by its root mean square, plus eps, and weighted; None: it is not.
        c_rms_weight: as that, of C.
        dt_rms_weight: ``[D]``, as that, of delta.
        b_c_dt_rms_eps: eps of the three.

    Returns:
        ``[B,L,E]``.

    Raises:
        ValueError: shapes or choices that do not fit.
        TypeError: a wrong type or dtype.
    """
    on_cpu("mamba_ssm", "xz", xz, "[B,2D,L]", 3)
    if checkpoint_lvl not in (0, 1):
        raise ValueError(f"checkpoint_lvl: got {checkpoint_lvl}; takes 0 or 1")
    x, z = xz.chunk(2, dim=1)
    y = causal_conv1d_fn(x, conv1d_weight.squeeze(1), conv1d_bias, activation="silu")
    assert isinstance(y, Tensor)
    made = F.linear(y.transpose(1, 2), x_proj_weight)  # [B,L,R+2N]
    rank, N = delta_proj_weight.shape[1], A.shape[-1]
    delta = F.linear(made[..., :rank], delta_proj_weight).transpose(1, 2)
    if B is None:
        B = _shifted(made[..., rank : rank + N], B_proj_bias).transpose(1, 2)
    if C is None:
        C = _shifted(made[..., -N:], C_proj_bias).transpose(1, 2)
    B = _normed("b_rms_weight", B, b_rms_weight, b_c_dt_rms_eps)
    C = _normed("c_rms_weight", C, c_rms_weight, b_c_dt_rms_eps)
    delta = _normed("dt_rms_weight", delta, dt_rms_weight, b_c_dt_rms_eps)
    out = selective_scan_fn(y, delta, A, B, C, D, z, delta_bias, delta_softplus)
    assert isinstance(out, Tensor)
    return F.linear(out.transpose(1, 2), out_proj_weight, out_proj_bias)


def selective_state_update(
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
    state_batch_indices: Tensor | None = None,
) -> Tensor:
    """selective_scan_step_, or mamba2_step_ where the channels of a head share a rate: one token, the state in place.

    Records no gradient, as there.

    Args:
        state: ``[B,D,N]`` or, with heads, ``[B,H,P,N]``; overwritten.
        x: ``[B,D]`` or ``[B,H,P]``.
        dt: as x.
        A: ``[D,N]`` or ``[H,P,N]`` log-rates.
        B: ``[B,N]`` or ``[B,G,N]``.
        C: as B.
        D: ``[D]`` or ``[H,P]``, or None.
        z: as x, or None.
        dt_bias: as D, or None.
        dt_softplus: Δ = log(1 + exp(dt + bias)).
        state_batch_indices: ``[B]`` int, which row of a larger state each row of x goes on from; a negative one is
            padding, whose row is 0 and which touches no state.

    Returns:
        As x, in its dtype.

    Raises:
        ValueError: shapes that do not fit.
        TypeError: a wrong type or dtype; a complex A.

    >>> state, x = torch.zeros(1, 2, 1), torch.ones(1, 2)
    >>> selective_state_update(state, x, x, torch.zeros(2, 1), torch.ones(1, 1), torch.ones(1, 1)).tolist()
    [[1.0, 1.0]]
    """
    headed = isinstance(state, Tensor) and state.ndim == 4
    on_cpu("mamba_ssm", "state", state, "[B,D,N] or [B,H,P,N]", 4 if headed else 3)
    check_float("x", x, "[B,H,P]" if headed else "[B,D]", 3 if headed else 2)
    rows, *channels = x.shape
    numbers = row_numbers("state_batch_indices", state_batch_indices, rows)
    A = _rates(A, x, channels)
    N = A.shape[-1]
    kept = rows if numbers is None else state.shape[0]
    check_side_input("state", state, x, [(kept, *channels, N)], FLOATING)
    dt, z = beside("dt", dt, x, tuple(x.shape)), beside("z", z, x, tuple(x.shape))
    D, dt_bias = beside("D", D, x, tuple(channels)), beside("dt_bias", dt_bias, x, tuple(channels))
    B = beside("B", B, x, (rows, N), (rows, B.shape[1] if B.ndim == 3 else 1, N))
    C = beside("C", C, x, tuple(B.shape))
    with torch.no_grad():
        held = chosen(state, numbers)
        y = _step(held, x, dt, A, B, C, D, z, dt_bias, dt_softplus)
        return put_back(state, held, y, numbers)


def selective_state_update_ref(
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
) -> Tensor:
    """selective_scan_step_ or mamba2_step_, as :func:`selective_state_update`, for a state of the batch's own rows."""
    return selective_state_update(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus)


def mamba_inner_ref(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    A: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
    delta_softplus: bool = True,
) -> Tensor:
    """Mamba-1's layer after its first projection, as :func:`mamba_inner_fn`, without its last arguments."""
    first = (xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias)
    return mamba_inner_fn(*first, A, B, C, D, delta_bias, B_proj_bias, C_proj_bias, delta_softplus)


def _rates(A: Tensor, x: Tensor, channels: Sequence[int]) -> Tensor:
    """``A [*channels,N]`` as ops take it."""
    if not isinstance(A, Tensor) or A.is_complex():
        got = A.dtype if isinstance(A, Tensor) else type(A).__name__
        raise TypeError(f"A: got {got}; takes a real tensor, of which phistate's state is made")
    return beside("A", A, x, (*channels, A.shape[-1] if A.ndim else 0))


def _per_token(name: str, M: Tensor, u: Tensor, N: int) -> Tensor:
    """B or C in any of its three layouts as ``[B,L,G,N]``, without a copy."""
    batch, dim, length = u.shape
    groups = M.shape[1] if isinstance(M, Tensor) and M.ndim == 4 else 1
    M = beside(name, M, u, (batch, N, length), (batch, groups, N, length), (dim, N))
    if M.ndim == 2:
        return M.expand(batch, length, dim, N)
    return (M if M.ndim == 4 else M.unsqueeze(1)).permute(0, 3, 1, 2)


def _per_channel(M: Tensor, dim: int) -> Tensor:
    """``[B,L,G,N] -> [B,L,D,N]``."""
    groups = M.shape[2]
    if groups == 1:
        return M.expand(-1, -1, dim, -1)
    return M if groups == dim else M.repeat_interleave(dim // groups, 2)


def _shifted(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias.to(x.dtype)


def _normed(name: str, M: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """``M [B,N,L]`` or ``[B,G,N,L]``, each token's N numbers over their root mean square."""
    if weight is None:
        return M
    if M.ndim == 2:
        raise ValueError(f"{name}: got it beside values that are constant in time; takes None there")
    return rms_norm(M.transpose(-1, -2), weight, None, eps).transpose(-1, -2)


def _step(
    held: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
) -> Tensor:
    """One token, ``held [B,D,N]`` or ``[B,H,P,N]`` in place, everything beside it of its shape."""
    B, C = (t if t.ndim == 3 else t.unsqueeze(1) for t in (B, C))
    tied = A.stride()[-2:] == (0, 0) and dt.stride(-1) == 0 and (dt_bias is None or dt_bias.stride(-1) == 0)
    if held.ndim == 4 and tied:
        bias = None if dt_bias is None else dt_bias[:, 0]
        return mamba2_step_(held, x, dt[..., 0], A[:, 0, 0], B, C, D, z, bias, dt_softplus)
    # A head's channels are channels: its group is theirs.
    flat = held.flatten(1, -2)
    y = selective_scan_step_(
        flat,
        x.flatten(1),
        dt.flatten(1),
        A.flatten(0, -2),
        B,
        C,
        None if D is None else D.flatten(),
        None if z is None else z.flatten(1),
        None if dt_bias is None else dt_bias.flatten(),
        dt_softplus,
    )
    if not held.is_contiguous():  # then flat may have been a copy
        held.copy_(flat.view(held.shape))
    return y.view(x.shape)
