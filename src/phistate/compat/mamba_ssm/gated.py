"""What people import from mamba_ssm to normalise in groups, with a gate before or after."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phistate.compat.arguments import beside, on_cpu, wide


def layernorm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
) -> Tensor:
    """Layer norm, or RMS norm, of each group of channels, and a gate; in float32 (float64 for float64).

    Args:
        x: ``[…,D]``.
        weight: ``[D]``.
        bias: ``[D]`` or None.
        z: as x, or None: no gate.
        eps: added to the mean square.
        group_size: channels that share a mean and a variance, a divisor of D; None: D.
        norm_before_gate: ``norm(x) · silu(z)``; False: ``norm(x · silu(z))``.
        is_rms_norm: the root mean square instead of mean and variance.

    Returns:
        As x, in its dtype.

    Raises:
        ValueError: shapes that do not fit.
        TypeError: a wrong type or dtype.

    >>> layernorm_fn(torch.tensor([3.0, 3.0, 5.0, 5.0]), torch.ones(4), None, eps=0.0, group_size=2, is_rms_norm=True)
    tensor([1., 1., 1., 1.])
    """
    on_cpu("mamba_ssm", "x", x, "[…,D]")
    channels = x.shape[-1]
    weight, bias = beside("weight", weight, x, (channels,)), beside("bias", bias, x, (channels,))
    z = beside("z", z, x, tuple(x.shape))
    size = channels if group_size is None else group_size
    if size < 1 or channels % size:
        raise ValueError(f"group_size: got {group_size}; takes a divisor of D = {channels}")
    y = x.to(wide(x))
    gate = None if z is None else F.silu(z.to(wide(x)))
    if gate is not None and not norm_before_gate:
        y = y * gate
    groups = y.unflatten(-1, (-1, size))
    groups = F.rms_norm(groups, (size,), None, eps) if is_rms_norm else F.layer_norm(groups, (size,), eps=eps)
    y = groups.flatten(-2) * weight
    y = y if bias is None else y + bias
    if gate is not None and norm_before_gate:
        y = y * gate
    return y.to(x.dtype)


def rmsnorm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
) -> Tensor:
    """RMS norm of each group of channels, and a gate: :func:`layernorm_fn` with is_rms_norm."""
    return layernorm_fn(x, weight, bias, z, eps, group_size, norm_before_gate, True)


class LayerNorm(nn.Module):
    """Layer norm with a gate: :func:`layernorm_fn` as a module.

    Args:
        hidden_size: D.
        eps: added to the variance.
        group_size: as there.
        norm_before_gate: as there.
        device: of weight and bias.
        dtype: of weight and bias.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.group_size = group_size
        self.norm_before_gate = norm_before_gate
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights of one, biases of zero."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """The norm of ``x``, gated by ``z``."""
        return layernorm_fn(x, self.weight, self.bias, z, self.eps, self.group_size, self.norm_before_gate)


class RMSNorm(nn.Module):
    """RMS norm with a gate: :func:`rmsnorm_fn` as a module.

    Args:
        hidden_size: D.
        eps: added to the mean square.
        group_size: as there.
        norm_before_gate: as there.
        device: of the weight.
        dtype: of the weight.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.group_size = group_size
        self.norm_before_gate = norm_before_gate
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights of one."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """The norm of ``x``, gated by ``z``."""
        return rmsnorm_fn(x, self.weight, None, z, self.eps, self.group_size, self.norm_before_gate)
