"""What people import from mamba_ssm to normalise: a residual is added, its sum is normalised, both are given."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phistate.compat.arguments import beside, on_cpu, wide


def layer_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
) -> Tensor | tuple[Tensor | None, ...]:
    """Layer norm, or RMS norm, of ``dropout(x · rowscale) + dropout(x1) + residual``; in float32 (float64 for float64).

    Args:
        x: ``[…,D]``.
        weight: ``[D]``.
        bias: ``[D]`` or None.
        residual: as x, of any floating type, or None.
        x1: as x, or None; not with rowscale.
        weight1: ``[D]``: a second norm of the same sum; None: there is one.
        bias1: ``[D]`` or None.
        eps: added to the mean square.
        dropout_p: of x and x1, from 0 to below 1. The elements dropped are torch's to draw, not Triton's.
        rowscale: ``[…]`` or None.
        prenorm: give the sum too, in residual's type.
        residual_in_fp32: without a residual, give it in float32.
        is_rms_norm: the root mean square instead of mean and variance.
        return_dropout_mask: give what of x, and of x1, was kept too; None where nothing was dropped.

    Returns:
        The norm in x's dtype; then, as asked for, the second norm, the sum, and the two masks.

    Raises:
        ValueError: shapes or choices that do not fit.
        TypeError: a wrong type or dtype.

    >>> x = torch.tensor([[3.0, 4.0]])
    >>> y, total = layer_norm_fn(x, torch.ones(2), None, residual=x, prenorm=True, eps=0.0, is_rms_norm=True)
    >>> (y * 12.5**0.5).tolist(), total.tolist()
    ([[3.0, 4.0]], [[6.0, 8.0]])
    """
    on_cpu("mamba_ssm", "x", x, "[…,D]")
    shape, channels = tuple(x.shape), tuple(x.shape[-1:])
    weight, bias = beside("weight", weight, x, channels), beside("bias", bias, x, channels)
    weight1, bias1 = beside("weight1", weight1, x, channels), beside("bias1", bias1, x, channels)
    x1, rowscale = beside("x1", x1, x, shape), beside("rowscale", rowscale, x, shape[:-1])
    if x1 is not None and rowscale is not None:
        raise ValueError("rowscale: got it beside x1; takes one of the two")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p: got {dropout_p}; takes 0 to below 1")
    kept_in = torch.float32 if residual_in_fp32 else x.dtype
    if residual is not None:
        kept_in, residual = residual.dtype, beside("residual", residual, x, shape)
    total = x.to(wide(x))
    if rowscale is not None:
        total = total * rowscale.unsqueeze(-1)
    total, mask = _dropped(total, dropout_p)
    mask1 = None
    if x1 is not None:
        second, mask1 = _dropped(x1.to(wide(x)), dropout_p)
        total = total + second
    if residual is not None:
        total = total + residual
    norm = rms_norm if is_rms_norm else layer_norm
    y = norm(total, weight, bias, eps).to(x.dtype)
    out: list[Tensor | None] = [y]
    if weight1 is not None:
        out.append(norm(total, weight1, bias1, eps).to(x.dtype))
    if prenorm:
        out.append(total.to(kept_in))
    if return_dropout_mask:
        out += [mask, mask1]
    return tuple(out) if len(out) > 1 else y


def rms_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> Tensor | tuple[Tensor | None, ...]:
    """RMS norm of ``dropout(x · rowscale) + dropout(x1) + residual``: :func:`layer_norm_fn` with is_rms_norm."""
    inputs = (x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm, residual_in_fp32)
    return layer_norm_fn(*inputs, True, return_dropout_mask)


class RMSNorm(nn.Module):
    """RMS norm with a weight, and with a residual that is added first: :func:`rms_norm_fn` as a module.

    Args:
        hidden_size: D.
        eps: added to the mean square.
        dropout_p: of the input, while training.
        device: of the weight.
        dtype: of the weight.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        dropout_p: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.drop = nn.Dropout(dropout_p) if dropout_p > 0.0 else None
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights of one."""
        nn.init.ones_(self.weight)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Tensor | tuple[Tensor | None, ...]:
        """The norm, and the sum with the residual where prenorm asks for it."""
        return rms_norm_fn(
            x,
            self.weight,
            None,
            residual=residual,
            eps=self.eps,
            dropout_p=self.drop.p if self.drop is not None and self.training else 0.0,
            prenorm=prenorm,
            residual_in_fp32=residual_in_fp32,
        )


def rms_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """x over the root of its mean square plus eps, weighted, along the last dimension; x's dtype, float32 inside."""
    y = F.rms_norm(x.to(wide(x)), x.shape[-1:], weight.to(wide(x)), eps)
    return (y if bias is None else y + bias.to(y.dtype)).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """As :func:`rms_norm`, with the mean taken off first."""
    shift = None if bias is None else bias.to(wide(x))
    return F.layer_norm(x.to(wide(x)), x.shape[-1:], weight.to(wide(x)), shift, eps).to(x.dtype)


def _dropped(x: Tensor, p: float) -> tuple[Tensor, Tensor | None]:
    if p == 0.0:
        return x, None
    kept = torch.rand_like(x) >= p
    return x * kept / (1.0 - p), kept
