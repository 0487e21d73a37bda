"""What people import from mamba_ssm for Mamba-2: its scan, and the layer's fused function."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from phistate.compat.arguments import beside, on_cpu
from phistate.compat.causal_conv1d import causal_conv1d_fn
from phistate.compat.mamba_ssm.gated import rmsnorm_fn
from phistate.compat.packing import Packing, packing
from phistate.compat.states import state_of
from phistate.ops.mamba2 import mamba2_scan
from phistate.ops.packing import sequence_of

Limits = tuple[float, float]
NO_LIMIT: Limits = (0.0, float("inf"))
"""Of a step size."""


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: Limits = NO_LIMIT,
    return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """mamba2_scan: Mamba-2's scan over all tokens.

    Args:
        x: ``[B,L,H,P]`` inputs.
        dt: ``[B,L,H]`` step sizes.
        A: ``[H]`` log-rates, ≤ 0.
        B: ``[B,L,G,N]``.
        C: as B.
        chunk_size: 1 or more. The kernels choose their own; the answer does not depend on it.
        D: ``[H]`` or ``[H,P]`` skip connection, or None.
        z: ``[B,L,H,P]`` gate, or None.
        dt_bias: ``[H]`` or None.
        initial_states: ``[B,H,P,N]`` or None. With seq_idx they are before a first sequence of number 0, as there.
        seq_idx: ``[B,L]`` a number per token: where it changes, another sequence begins from nothing.
        cu_seqlens: ``[N+1]`` where N sequences begin in a batch of one; read for return_varlen_states alone, as there.
        dt_softplus: Δ = log(1 + exp(dt + bias)).
        dt_limit: Δ is clamped to these two.
        return_final_states: give the state after the last token of each row too.
        return_varlen_states: give the state after each sequence of cu_seqlens too. They are then kept apart, which
            there needs seq_idx as well.

    Returns:
        ``[B,L,H,P]`` in x's dtype; then, as asked for, ``[B,H,P,N]`` float32 and ``[N,H,P,N]`` in C's dtype.

    Raises:
        ValueError: shapes or choices that do not fit.
        TypeError: a wrong type or dtype.

    >>> x, ones = torch.ones(1, 3, 1, 1), torch.ones(1, 3, 1, 1)
    >>> mamba_chunk_scan_combined(x, torch.ones(1, 3, 1), torch.zeros(1), ones, ones, chunk_size=64).flatten().tolist()
    [1.0, 2.0, 3.0]
    """
    on_cpu("mamba_ssm", "x", x, "[B,L,H,P]", 4)
    if return_varlen_states and cu_seqlens is None:
        raise ValueError("cu_seqlens: got None with return_varlen_states; takes [N+1] offsets")
    y, pack, states = _scan(
        x,
        dt,
        A,
        B,
        C,
        chunk_size,
        D,
        z,
        dt_bias,
        initial_states,
        seq_idx,
        cu_seqlens if return_varlen_states else None,
        dt_softplus,
        dt_limit,
    )
    out = [y]
    if return_final_states:
        out.append(states if pack is None else pack.leave(states))
    if return_varlen_states:
        out.append(states.to(C.dtype))
    return tuple(out) if len(out) > 1 else y


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_limit: Limits = NO_LIMIT,
    return_final_states: bool = False,
    activation: str | None = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """Mamba-2's layer after its first projection: causal_conv1d, mamba2_scan, the gated norm and the last product.

    Args:
        zxbcdt: ``[B,L,2M+2HP+2GN+H]``: M gates and M inputs of an MLP (M ≥ 0), the gate z, then x, B and C, then dt.
        conv1d_weight: ``[HP+2GN,W]``.
        conv1d_bias: ``[HP+2GN]`` or None.
        dt_bias: ``[H]``.
        A: ``[H]`` log-rates, ≤ 0.
        D: ``[H]`` or ``[H,P]``.
        chunk_size: as in :func:`mamba_chunk_scan_combined`.
        initial_states: as there.
        seq_idx: as there.
        dt_limit: as there.
        return_final_states: as there.
        activation: of the convolution: ``"silu"``, ``"swish"`` or None.
        rmsnorm_weight: ``[HP]`` of the gated norm, in G groups; None: no norm, the gate alone.
        rmsnorm_eps: its eps.
        outproj_weight: ``[E,M+HP]``; None: no product.
        outproj_bias: ``[E]`` or None.
        headdim: P; None: as D has it.
        ngroups: G.
        norm_before_gate: ``norm(y) · silu(z)``; False: ``norm(y · silu(z))``.

    Returns:
        ``[B,L,E]``, and the final states ``[B,H,P,N]`` if asked.

    Raises:
        ValueError: shapes or choices that do not fit.
        TypeError: a wrong type or dtype.
    """
    out, pack, states = split_scan(
        zxbcdt,
        conv1d_weight,
        conv1d_bias,
        dt_bias,
        A,
        D,
        chunk_size,
        initial_states,
        seq_idx,
        None,
        dt_limit,
        activation,
        rmsnorm_weight,
        rmsnorm_eps,
        outproj_weight,
        outproj_bias,
        headdim,
        ngroups,
        norm_before_gate,
    )
    return (out, states if pack is None else pack.leave(states)) if return_final_states else out


def split_scan(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    initial_states: Tensor | None,
    seq_idx: Tensor | None,
    cu_seqlens: Tensor | None,
    dt_limit: Limits,
    activation: str | None,
    rmsnorm_weight: Tensor | None,
    rmsnorm_eps: float,
    outproj_weight: Tensor | None,
    outproj_bias: Tensor | None,
    headdim: int | None,
    ngroups: int,
    norm_before_gate: bool,
) -> tuple[Tensor, Packing | None, Tensor]:
    """What :func:`mamba_split_conv1d_scan_combined` computes, with the state after every sequence of cu_seqlens."""
    on_cpu("mamba_ssm", "zxbcdt", zxbcdt, "[B,L,2M+2HP+2GN+H]", 3)
    if outproj_bias is not None and outproj_weight is None:
        raise ValueError("outproj_bias: got one without outproj_weight; takes None there")
    if D.ndim == 2:
        headdim = D.shape[1]
    if headdim is None:
        raise ValueError("headdim: got None beside a D of [H]; takes P")
    heads = D.shape[0]
    dim = heads * headdim
    taps = conv1d_weight.shape[0]  # HP + 2GN
    mlp = zxbcdt.shape[-1] - dim - taps - heads  # 2M
    if mlp < 0 or mlp % 2:
        raise ValueError(
            f"zxbcdt: got {zxbcdt.shape[-1]} columns; takes {dim + taps + heads} for these heads and weights, "
            "and an even number more for an MLP"
        )
    gated, z, xBC, dt = zxbcdt.split([mlp, dim, taps, heads], dim=-1)
    convolved = causal_conv1d_fn(
        xBC.transpose(1, 2), conv1d_weight, conv1d_bias, _numbers(seq_idx, cu_seqlens, xBC), activation=activation
    )
    assert isinstance(convolved, Tensor)
    each = (taps - dim) // 2
    x, B, C = convolved.transpose(1, 2).split([dim, each, each], dim=-1)
    x = x.unflatten(-1, (heads, headdim))
    y, pack, states = _scan(
        x,
        dt,
        A,
        B.unflatten(-1, (ngroups, -1)),
        C.unflatten(-1, (ngroups, -1)),
        chunk_size,
        D,
        z.unflatten(-1, (heads, headdim)) if rmsnorm_weight is None else None,
        dt_bias,
        initial_states,
        seq_idx,
        cu_seqlens,
        True,
        dt_limit,
    )
    y = y.flatten(-2)
    if rmsnorm_weight is not None:
        y = rmsnorm_fn(y, rmsnorm_weight, None, z, rmsnorm_eps, dim // ngroups, norm_before_gate)
    if mlp:
        gate, value = gated.chunk(2, dim=-1)
        y = torch.cat([F.silu(gate) * value, y], dim=-1)
    return (y if outproj_weight is None else F.linear(y, outproj_weight, outproj_bias)), pack, states


def _scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    initial_states: Tensor | None,
    seq_idx: Tensor | None,
    cu_seqlens: Tensor | None,
    dt_softplus: bool,
    dt_limit: Limits,
) -> tuple[Tensor, Packing | None, Tensor]:
    """The output, how sequences are packed, and the state ``[·,H,P,N]`` after each of them (after each row: None)."""
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
        raise ValueError(f"chunk_size: got {chunk_size!r}; takes an int of 1 or more")
    batch, length, heads, P = x.shape
    groups, N = (B.shape[2], B.shape[3]) if B.ndim == 4 else (1, 1)
    dt, A = beside("dt", dt, x, (batch, length, heads)), beside("A", A, x, (heads,))
    B, C = (beside(name, t, x, (batch, length, groups, N)) for name, t in (("B", B), ("C", C)))
    D, dt_bias = beside("D", D, x, (heads,), (heads, P)), beside("dt_bias", dt_bias, x, (heads,))
    z = beside("z", z, x, tuple(x.shape))
    before = beside("initial_states", initial_states, x, (batch, heads, P, N))
    pack = packing(x, cu_seqlens, None, seq_idx)
    if pack is not None:
        if pack.rows is None:  # every sequence is one of the only row's
            pack = Packing(pack.offsets, 1, pack.offsets.new_tensor([pack.offsets.numel() - 1]))
        if before is not None and seq_idx is not None:
            before = before * (seq_idx[:, 0] == 0)[:, None, None, None]
        x, dt, B, C = (pack.fold(t) for t in (x, dt, B, C))
        z = None if z is None else pack.fold(z)
        before = pack.enter(before)
    y, state = mamba2_scan(
        x,
        dt,
        A,
        B,
        C,
        D,
        z,
        dt_bias,
        dt_softplus,
        dt_limit,
        None if before is None else state_of(before.mT, x),
        return_state=True,
        cu_seqlens=None if pack is None else pack.offsets,
    )
    return (y if pack is None else pack.unfold(y)), pack, state.s.mT.contiguous()


def _numbers(seq_idx: Tensor | None, cu_seqlens: Tensor | None, x: Tensor) -> Tensor | None:
    """The number of each token's sequence, ``[B,L]``: given, or by offsets."""
    if seq_idx is not None or cu_seqlens is None:
        return seq_idx
    return sequence_of(cu_seqlens.to(x.device, torch.int64), x.shape[1]).unsqueeze(0)
