"""fla's norms with an output gate: ``fla.modules.norm.fused_norm_gate`` and ``layernorm_gated`` (Mamba-2's)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from phistate.compat.fla.modules.norms import Normed, add_residual, linear, normalized
from phistate.compat.fla.modules.precision import wide

GATES = {"swish": F.silu, "silu": F.silu, "sigmoid": F.sigmoid}


def _gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
    residual_in_fp32: bool,
    eps: float,
    rms: bool,
) -> tuple[Tensor, Tensor]:
    """The norm of ``x + residual`` times the gate of ``g``, and that sum."""
    if activation not in GATES:
        raise ValueError(f"activation: got {activation!r}; takes {', '.join(map(repr, GATES))}")
    total, residual = add_residual(x, residual, residual_in_fp32)
    y = normalized(total, weight, bias, eps, rms)
    return (y * GATES[activation](wide(g)).reshape(x.shape)).to(x.dtype), residual


def layer_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Normed:
    """LayerNorm of ``x + residual``, times the gate of ``g``."""
    y, residual = _gated(x, g, weight, bias, activation, residual, residual_in_fp32, eps, False)
    return (y, residual) if prenorm else y


def rms_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Normed:
    """RMSNorm of ``x + residual``, times the gate of ``g``."""
    y, residual = _gated(x, g, weight, bias, activation, residual, residual_in_fp32, eps, True)
    return (y, residual) if prenorm else y


def layer_norm_swish_gate_linear(
    x: Tensor,
    g: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Normed:
    """A linear layer of the LayerNorm of ``x + residual``, times ``silu(g)``."""
    y, residual = _gated(x, g, norm_weight, norm_bias, "swish", residual, residual_in_fp32, eps, False)
    y = linear(y, linear_weight, linear_bias)
    return (y, residual) if prenorm else y


def rms_norm_swish_gate_linear(
    x: Tensor,
    g: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Normed:
    """A linear layer of the RMSNorm of ``x + residual``, times ``silu(g)``."""
    y, residual = _gated(x, g, norm_weight, norm_bias, "swish", residual, residual_in_fp32, eps, True)
    y = linear(y, linear_weight, linear_bias)
    return (y, residual) if prenorm else y


def layernorm_fn(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
) -> Tensor:
    """The norm of each ``group_size`` channels, with ``silu(z)`` times its output or, before it, times its input."""
    channels = x.shape[-1]
    size = channels if group_size is None else group_size
    if size < 1 or channels % size:
        raise ValueError(f"group_size: got {group_size}; takes a divisor of the {channels} channels")
    if z is not None and z.shape != x.shape:
        raise ValueError(f"z: got shape {tuple(z.shape)}; takes {tuple(x.shape)}, as x has")
    y = wide(x)
    if z is not None and not norm_before_gate:
        y = y * F.silu(wide(z))
    y = normalized(y, weight, bias, eps, is_rms_norm, channels // size)
    if z is not None and norm_before_gate:
        y = y * F.silu(wide(z))
    return y.to(x.dtype)


def rmsnorm_fn(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
) -> Tensor:
    """:func:`layernorm_fn` with the root mean square alone."""
    return layernorm_fn(x, weight, bias, z, eps, group_size, norm_before_gate, True)
