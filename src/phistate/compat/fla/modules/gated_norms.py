"""fla's norms with an output gate: ``fla.modules.norm.fused_norm_gate``."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from phistate.compat.fla.modules.norms import Normed, add_residual, linear, normalized
from phistate.compat.fla.precision import widened

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
    return (y * GATES[activation](widened(g)).reshape(x.shape)).to(x.dtype), residual


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
    linear_weight: Tensor | None,
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
    linear_weight: Tensor | None,
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
