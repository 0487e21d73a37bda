"""Maps that act on each channel by itself, and the constant map (the uniform average)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from phistate.features.base import ExponentialFeatureMap, FeatureMap, Side, check_count, check_features


class Elu(FeatureMap):
    """elu(x) + 1, the positive map of the first linear transformer.

    φ(x)_i = x_i + 1 for x_i ≥ 0, exp(x_i) below, written so that nothing cancels: ``elu(x) + 1`` as it is
    usually spelt rounds exp(x) away against 1 (to exactly 0 from x < −17 in float32, from x < −6 in
    bfloat16).

    Args:
        head_dim: D; the map makes D features.
        scale: softmax scale, None: D ** -0.5.

    Paper: Katharopoulos et al. 2020, arXiv:2006.16236.

    Example:
        >>> import torch
        >>> Elu(2, scale=1.0).query(torch.tensor([[1.0, -30.0]])).log()
        tensor([[  0.6931, -30.0000]])
    """

    pointwise: str | None = "elu"

    @property
    def num_features(self) -> int:
        """F = D."""
        return self.head_dim

    def features(self, x: Tensor, side: Side, positions: Tensor | None) -> Tensor:
        """max(x, 0) + exp(min(x, 0)): exp never sees a positive number, so no gradient overflows."""
        return x.relu() + x.clamp(max=0).exp()


class Relu(FeatureMap):
    """relu(x) + ε: nonnegative, and zero on half of the line unless ε says otherwise.

    Args:
        head_dim: D; the map makes D features.
        epsilon: ε ≥ 0, a constant added to every feature (part of φ, so of the kernel).
        scale: softmax scale, None: D ** -0.5.

    Raises:
        ValueError: a negative or non-finite ``epsilon``.

    Example:
        >>> import torch
        >>> Relu(2, scale=1.0).key(torch.tensor([[2.0, -3.0]]))
        tensor([[2., 0.]])
    """

    pointwise: str | None = "relu"

    def __init__(self, head_dim: int, *, epsilon: float = 0.0, scale: float | None = None) -> None:
        super().__init__(head_dim, scale=scale)
        self.epsilon = _check_epsilon(epsilon)
        if self.epsilon:
            self.pointwise = None

    @property
    def num_features(self) -> int:
        """F = D."""
        return self.head_dim

    def features(self, x: Tensor, side: Side, positions: Tensor | None) -> Tensor:
        """relu(x) + ε."""
        return x.relu() + self.epsilon if self.epsilon else x.relu()

    def extra_repr(self) -> str:
        """The base's settings and ε."""
        return f"{super().extra_repr()}, epsilon={self.epsilon:.9g}"


class ReluSquared(FeatureMap):
    """relu(x)² + ε: sharper than relu, still nonnegative.

    Args:
        head_dim: D; the map makes D features.
        epsilon: ε ≥ 0, a constant added to every feature (part of φ, so of the kernel).
        scale: softmax scale, None: D ** -0.5.

    Raises:
        ValueError: a negative or non-finite ``epsilon``.

    Example:
        >>> import torch
        >>> ReluSquared(2, scale=1.0).key(torch.tensor([[2.0, -3.0]]))
        tensor([[4., 0.]])
    """

    def __init__(self, head_dim: int, *, epsilon: float = 0.0, scale: float | None = None) -> None:
        super().__init__(head_dim, scale=scale)
        self.epsilon = _check_epsilon(epsilon)

    @property
    def num_features(self) -> int:
        """F = D."""
        return self.head_dim

    def features(self, x: Tensor, side: Side, positions: Tensor | None) -> Tensor:
        """relu(x)² + ε."""
        squared = x.relu().square()
        return squared + self.epsilon if self.epsilon else squared

    def extra_repr(self) -> str:
        """The base's settings and ε."""
        return f"{super().extra_repr()}, epsilon={self.epsilon:.9g}"


class Exp(ExponentialFeatureMap):
    """exp of each channel, or softmax over the channels.

    φ(x) = exp(x), or exp(x) / Σ_i exp(x_i) with ``softmax=True``, whose features sum to one.

    Args:
        head_dim: D; the map makes D features.
        softmax: divide by the sum over the channels.
        scale: softmax scale, None: D ** -0.5.

    Paper: softmax features as in efficient attention, Shen et al. 2018, arXiv:1812.01243 (both sides over
    channels here, so that a key's features do not depend on the keys after it).

    Example:
        >>> import torch
        >>> Exp(2, softmax=True, scale=1.0).key(torch.tensor([[0.0, 0.0]]))
        tensor([[0.5000, 0.5000]])
    """

    def __init__(self, head_dim: int, *, softmax: bool = False, scale: float | None = None) -> None:
        super().__init__(head_dim, scale=scale)
        self.softmax = softmax

    @property
    def num_features(self) -> int:
        """F = D."""
        return self.head_dim

    def log_features(self, x: Tensor, side: Side, positions: Tensor | None) -> Tensor:
        """The input itself, or its log softmax."""
        return x.log_softmax(-1) if self.softmax else x

    def extra_repr(self) -> str:
        """The base's settings and whether the channels are normalised."""
        return f"{super().extra_repr()}, softmax={self.softmax}"


class DPFP(FeatureMap):
    """Deterministic parameter-free projection: products of rectified channels, sparse and nonnegative.

    With r = [relu(x), relu(−x)], φ(x) = [r_i · r_{(i+j) mod 2D}] for i = 1..2D and j = 1..ν.

    Args:
        head_dim: D; the map makes 2Dν features.
        nu: ν, from 1 to 2D − 1.
        scale: softmax scale, None: D ** -0.5.

    Raises:
        ValueError: ``nu`` out of range, or one that makes more than 2²⁰ features.

    Paper: Schlag et al. 2021, arXiv:2102.11174.

    Example:
        >>> import torch
        >>> DPFP(2, nu=1, scale=1.0).key(torch.tensor([[2.0, -3.0]]))  # r = [2, 0, 0, 3]
        tensor([[0., 0., 0., 6.]])
    """

    def __init__(self, head_dim: int, *, nu: int = 1, scale: float | None = None) -> None:
        super().__init__(head_dim, scale=scale)
        self.nu = check_count("nu", nu)
        if nu >= 2 * head_dim:
            raise ValueError(f"nu: got {nu}; takes 1 to 2·head_dim − 1 = {2 * head_dim - 1}")
        check_features("nu", f"{nu} for head_dim = {head_dim}", self.num_features)

    @property
    def num_features(self) -> int:
        """F = 2Dν."""
        return 2 * self.head_dim * self.nu

    def features(self, x: Tensor, side: Side, positions: Tensor | None) -> Tensor:
        """r times r turned by 1 to ν places."""
        r = torch.cat((x.relu(), (-x).relu()), -1)
        return torch.cat([r * r.roll(-j, -1) for j in range(1, self.nu + 1)], -1)

    def extra_repr(self) -> str:
        """The base's settings and ν."""
        return f"{super().extra_repr()}, nu={self.nu}"


class Uniform(FeatureMap):
    """φ ≡ 1: every key weighs the same, the average that any other map has to beat.

    Args:
        head_dim: D; the map makes one feature, whatever D.
        scale: kept for the contract; the map does not depend on it.

    Example:
        >>> import torch
        >>> Uniform(64).key(torch.randn(1, 3, 2, 64)).shape
        torch.Size([1, 3, 2, 1])
    """

    @property
    def num_features(self) -> int:
        """F = 1."""
        return 1

    def features(self, x: Tensor, side: Side, positions: Tensor | None) -> Tensor:
        """One."""
        return x.new_ones(*x.shape[:-1], 1)


def _check_epsilon(epsilon: float) -> float:
    if not (epsilon >= 0 and math.isfinite(epsilon)):
        raise ValueError(f"epsilon: got {epsilon}; takes a finite number ≥ 0")
    return float(epsilon)
