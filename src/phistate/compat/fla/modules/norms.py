"""fla's norms with a residual before and a linear layer after: ``fla.modules.norm.layernorm`` and ``l2norm``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from phistate.compat.fla.precision import widened

Normed = Tensor | tuple[Tensor, Tensor]
"""What a norm gives back: its output, and what it normalised if ``prenorm`` asks for that."""


def add_residual(x: Tensor, residual: Tensor | None, residual_in_fp32: bool) -> tuple[Tensor, Tensor]:
    """What is normalised, in float32, and the same as it is handed on: in the residual's type, else in x's.

    ``residual_in_fp32`` decides that type only where there is no residual yet.
    """
    if residual is None:
        return widened(x), x.float() if residual_in_fp32 else x
    if residual.shape != x.shape:
        raise ValueError(f"residual: got shape {tuple(residual.shape)}; takes {tuple(x.shape)}, as x has")
    total = widened(x) + widened(residual)
    return total, total.to(residual.dtype)


def normalized(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, rms: bool, groups: int = 1) -> Tensor:
    """``x [...,D]`` in float32 normalised within each of ``groups`` runs of channels, then scaled and shifted."""
    if x.shape[-1] % groups:
        raise ValueError(f"x: got {x.shape[-1]} channels; takes a multiple of the {groups} groups")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and parameter.shape != x.shape[-1:]:
            raise ValueError(f"{name}: got shape {tuple(parameter.shape)}; takes {tuple(x.shape[-1:])}")
    y = x if groups == 1 else x.unflatten(-1, (groups, -1))
    y = F.rms_norm(y, y.shape[-1:], eps=eps) if rms else F.layer_norm(y, y.shape[-1:], eps=eps)
    y = y.reshape(x.shape)
    if weight is not None:
        y = y * widened(weight)
    return y if bias is None else y + widened(bias)


def linear(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """A linear layer in x's type, whatever type its parameters have."""
    if weight is None:
        raise ValueError("weight: got None; takes the linear layer's [O,D]")
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
) -> Normed:
    """LayerNorm, or RMSNorm, of ``x + residual``."""
    return group_norm(x, weight, bias, residual, eps, prenorm, residual_in_fp32, is_rms_norm)


def group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    num_groups: int = 1,
) -> Normed:
    """The norm of each group of channels of ``x + residual``, and that sum too if ``prenorm``."""
    total, residual = add_residual(x, residual, residual_in_fp32)
    y = normalized(total, weight, bias, eps, is_rms_norm, num_groups).to(x.dtype)
    return (y, residual) if prenorm else y


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> Normed:
    """RMSNorm of ``x + residual``."""
    return group_norm(x, weight, bias, residual, eps, prenorm, residual_in_fp32, True)


def layer_norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor | None,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    num_groups: int = 1,
) -> Normed:
    """A linear layer of the norm of ``x + residual``."""
    total, residual = add_residual(x, residual, residual_in_fp32)
    y = normalized(total, norm_weight, norm_bias, eps, is_rms_norm, num_groups).to(x.dtype)
    y = linear(y, linear_weight, linear_bias)
    return (y, residual) if prenorm else y


def rms_norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor | None,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> Normed:
    """A linear layer of the RMSNorm of ``x + residual``."""
    return layer_norm_linear(
        x, norm_weight, norm_bias, linear_weight, linear_bias, residual, eps, prenorm, residual_in_fp32, True
    )


def group_norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor | None,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    num_groups: int = 1,
) -> Normed:
    """A linear layer of the norm of each group of channels of ``x + residual``."""
    return layer_norm_linear(
        *(x, norm_weight, norm_bias, linear_weight, linear_bias, residual),
        *(eps, prenorm, residual_in_fp32, is_rms_norm, num_groups),
    )


def l2norm(x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> Tensor:
    """``x / sqrt(Σ x² + eps)`` over the last dimension."""
    y = widened(x)
    y = y * (y.square().sum(-1, keepdim=True) + eps).rsqrt()
    return y.to(x.dtype if output_dtype is None else output_dtype)
