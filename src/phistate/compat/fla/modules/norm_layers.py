"""fla's modules of a norm, for machines that cannot import it: same constructors, parameters and calls."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from phistate.compat.fla.modules import norms
from phistate.compat.fla.modules.norms import Normed

Device = torch.device | None
Dtype = torch.dtype | None


class Affine(nn.Module):
    """A weight of ones and a bias of zeros, or None for either."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, hidden_size: int, affine: bool, bias: bool, eps: float, device: Device, dtype: Dtype) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.elementwise_affine = affine
        self.eps = eps
        for name, there in (("weight", affine), ("bias", affine and bias)):
            parameter = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype)) if there else None
            self.register_parameter(name, parameter)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Ones and zeros."""
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        """As torch's norms say it."""
        return f"{self.hidden_size}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"


class _Norm(Affine):
    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        bias: bool = False,
        eps: float = 1e-5,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__(hidden_size, elementwise_affine, bias, eps, device, dtype)


class _Grouped(Affine):
    def __init__(
        self,
        num_groups: int,
        hidden_size: int,
        elementwise_affine: bool = True,
        bias: bool = False,
        eps: float = 1e-5,
        is_rms_norm: bool = False,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        if hidden_size % num_groups:
            raise ValueError(f"hidden_size: got {hidden_size}; takes a multiple of the {num_groups} groups")
        super().__init__(hidden_size, elementwise_affine, bias, eps, device, dtype)
        self.num_groups = num_groups
        self.is_rms_norm = is_rms_norm


class LayerNorm(_Norm):
    """LayerNorm of ``x + residual``."""

    def forward(
        self, x: Tensor, residual: Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False
    ) -> Normed:
        """Its output, and the sum too if ``prenorm``."""
        return norms.layer_norm(x, self.weight, self.bias, residual, self.eps, prenorm, residual_in_fp32)


class RMSNorm(_Norm):
    """RMSNorm of ``x + residual``."""

    def forward(
        self, x: Tensor, residual: Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False
    ) -> Normed:
        """Its output, and the sum too if ``prenorm``."""
        return norms.rms_norm(x, self.weight, self.bias, residual, self.eps, prenorm, residual_in_fp32)


class GroupNorm(_Grouped):
    """The norm of each group of channels of ``x + residual``."""

    def forward(
        self, x: Tensor, residual: Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False
    ) -> Normed:
        """Its output, and the sum too if ``prenorm``."""
        return norms.group_norm(
            *(x, self.weight, self.bias, residual, self.eps, prenorm, residual_in_fp32),
            *(self.is_rms_norm, self.num_groups),
        )


class LayerNormLinear(_Norm):
    """A linear layer, whose parameters the call brings, of the LayerNorm of ``x + residual``."""

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Normed:
        """Its output, and the sum too if ``prenorm``."""
        return norms.layer_norm_linear(
            x, self.weight, self.bias, weight, bias, residual, self.eps, prenorm, residual_in_fp32
        )


class RMSNormLinear(_Norm):
    """A linear layer, whose parameters the call brings, of the RMSNorm of ``x + residual``."""

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Normed:
        """Its output, and the sum too if ``prenorm``."""
        return norms.rms_norm_linear(
            x, self.weight, self.bias, weight, bias, residual, self.eps, prenorm, residual_in_fp32
        )


class GroupNormLinear(_Grouped):
    """A linear layer, whose parameters the call brings, of the norm of each group of channels of ``x + residual``."""

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Normed:
        """Its output, and the sum too if ``prenorm``."""
        return norms.group_norm_linear(
            *(x, self.weight, self.bias, weight, bias, residual, self.eps, prenorm, residual_in_fp32),
            *(self.is_rms_norm, self.num_groups),
        )


class L2Norm(nn.Module):
    """``x / sqrt(Σ x² + eps)``."""

    def __init__(self, eps: float = 1e-6, output_dtype: Dtype = None) -> None:
        super().__init__()
        self.eps = eps
        self.output_dtype = output_dtype

    def forward(self, x: Tensor) -> Tensor:
        """Over the last dimension."""
        return norms.l2norm(x, self.eps, self.output_dtype)
