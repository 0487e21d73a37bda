"""fla's activations and gated linear units: ``fla.modules.activations``."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from phistate.compat.fla.precision import widened


def sigmoid(x: Tensor) -> Tensor:
    """``1 / (1 + e^-x)``."""
    return x.sigmoid()


def elu_p1(x: Tensor) -> Tensor:
    """``elu(x) + 1``, without cancellation where x is negative."""
    y = widened(x)
    return torch.where(y >= 0, y + 1, y.clamp_max(0).exp()).to(x.dtype)


def logsigmoid(x: Tensor, temperature: float = 1.0) -> Tensor:
    """``log sigmoid(x) / temperature``."""
    return (F.logsigmoid(widened(x)) / temperature).to(x.dtype)


def swish(x: Tensor) -> Tensor:
    """``x sigmoid(x)``."""
    return F.silu(x)


def bias_gelu(input: Tensor, bias: Tensor) -> Tensor:
    """The tanh form of GELU of ``input + bias``."""
    return F.gelu(input + bias, approximate="tanh").to(input.dtype)


def fast_gelu(input: Tensor) -> Tensor:
    """The tanh form of GELU."""
    return F.gelu(input, approximate="tanh")


def sqrelu(input: Tensor) -> Tensor:
    """``relu(x)²``."""
    return F.relu(widened(input)).square().to(input.dtype)


def _unit(gate: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    if x.shape != y.shape:
        raise ValueError(f"y: got shape {tuple(y.shape)}; takes {tuple(x.shape)}, as x has")
    return (gate(widened(x)) * widened(y)).to(x.dtype)


def swiglu(x: Tensor, y: Tensor) -> Tensor:
    """``silu(x) y``."""
    return _unit(F.silu, x, y)


def swiglu_linear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer of ``silu(x) y``."""
    return F.linear(swiglu(x, y), weight, bias)


def sigmoidglu(x: Tensor, y: Tensor) -> Tensor:
    """``sigmoid(x) y``."""
    return _unit(torch.sigmoid, x, y)


def sigmoidglu_linear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer of ``sigmoid(x) y``."""
    return F.linear(sigmoidglu(x, y), weight, bias)


def powglu(x: Tensor, y: Tensor, power: float = 3.0) -> Tensor:
    """``x^(power / (sqrt(x) + 1)) sigmoid(x) y`` where x is positive, ``silu(x) y`` elsewhere."""

    def gate(x: Tensor) -> Tensor:
        positive = x > 0
        # The branch not taken must be differentiable too, or its NaN would reach the gradient of the one that is.
        base = torch.where(positive, x, 1.0)
        return torch.where(positive, base.pow(power / (base.sqrt() + 1)), x) * x.sigmoid()

    return _unit(gate, x, y)


def powglu_linear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, power: float = 3.0) -> Tensor:
    """A linear layer of :func:`powglu`."""
    return F.linear(powglu(x, y, power), weight, bias)


ACT2FN: dict[str, Callable[..., Tensor]] = {
    "relu": F.relu,
    "sigmoid": sigmoid,
    "logsigmoid": logsigmoid,
    "silu": swish,
    "swish": swish,
    "sqrelu": sqrelu,
    "gelu": fast_gelu,
    "bias_gelu": bias_gelu,
}
"""fla's table of activations by the names its configurations use."""
