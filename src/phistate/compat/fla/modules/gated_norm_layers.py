"""fla's modules of a norm and an output gate, for machines that cannot import it."""

from __future__ import annotations

from torch import Tensor

from phistate.compat.fla.modules import gated_norms
from phistate.compat.fla.modules.norm_layers import Affine, Device, Dtype
from phistate.compat.fla.modules.norms import Normed


def _known(activation: str) -> str:
    if activation not in gated_norms.GATES:
        raise ValueError(f"activation: got {activation!r}; takes {', '.join(map(repr, gated_norms.GATES))}")
    return activation


class _CentredGated(Affine):
    activation: str

    def forward(
        self,
        x: Tensor,
        g: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Normed:
        """The gated norm, and the sum too if ``prenorm``."""
        return gated_norms.layer_norm_gated(
            x, g, self.weight, self.bias, self.activation, residual, prenorm, residual_in_fp32, self.eps
        )


class _Gated(Affine):
    activation: str

    def forward(
        self,
        x: Tensor,
        g: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Normed:
        """The gated norm, and the sum too if ``prenorm``."""
        return gated_norms.rms_norm_gated(
            x, g, self.weight, self.bias, self.activation, residual, prenorm, residual_in_fp32, self.eps
        )


class FusedLayerNormGated(_CentredGated):
    """LayerNorm of ``x + residual``, times the gate of ``g``."""

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        bias: bool = False,
        activation: str = "swish",
        eps: float = 1e-5,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__(hidden_size, elementwise_affine, bias, eps, device, dtype)
        self.activation = _known(activation)


class FusedRMSNormGated(_Gated):
    """RMSNorm of ``x + residual``, times the gate of ``g``."""

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        eps: float = 1e-5,
        activation: str = "swish",
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__(hidden_size, elementwise_affine, False, eps, device, dtype)
        self.activation = _known(activation)


class FusedLayerNormSwishGate(_CentredGated):
    """LayerNorm of ``x + residual``, times ``silu(g)``."""

    activation = "swish"

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


class FusedRMSNormSwishGate(_Gated):
    """RMSNorm of ``x + residual``, times ``silu(g)``."""

    activation = "swish"

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        eps: float = 1e-5,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__(hidden_size, elementwise_affine, False, eps, device, dtype)


class _Biasless(Affine):
    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        eps: float = 1e-5,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__(hidden_size, elementwise_affine, False, eps, device, dtype)


class FusedLayerNormGatedLinear(_Biasless):
    """A linear layer, whose parameters the call brings, of the LayerNorm of ``x + residual``, times ``silu(g)``."""

    def forward(
        self,
        x: Tensor,
        g: Tensor,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Normed:
        """Its output, and the sum too if ``prenorm``."""
        return gated_norms.layer_norm_swish_gate_linear(
            x, g, self.weight, self.bias, weight, bias, residual, prenorm, residual_in_fp32, self.eps
        )


class FusedRMSNormGatedLinear(_Biasless):
    """A linear layer, whose parameters the call brings, of the RMSNorm of ``x + residual``, times ``silu(g)``."""

    def forward(
        self,
        x: Tensor,
        g: Tensor,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Normed:
        """Its output, and the sum too if ``prenorm``."""
        return gated_norms.rms_norm_swish_gate_linear(
            x, g, self.weight, self.bias, weight, bias, residual, prenorm, residual_in_fp32, self.eps
        )
