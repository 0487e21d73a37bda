"""Random features: unbiased estimates of the softmax kernel exp(x·y), each with the variance it has."""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from torch import Tensor

from phistate.features.base import MAX_FEATURES, ExponentialFeatureMap, FeatureMap, Side, check_count
from phistate.features.rows import Rows, draw_rows, pair_excess, variance_of_mean


class RandomFeatureMap(FeatureMap):
    """A map made of random rows ω ~ N(0, I), drawn once at construction and again only by ``redraw``.

    The rows are a float32 buffer, ``directions [m,D]``, so that a state dict carries the draw.

    Args:
        head_dim: D.
        directions: m, how many rows are drawn.
        rows: how rows of one block of D are coupled.
        generator: where the draw comes from; None: torch's default generator.
        scale: softmax scale, None: D ** -0.5.
    """

    directions: Tensor

    def __init__(
        self,
        head_dim: int,
        directions: int,
        rows: Rows,
        generator: torch.Generator | None,
        scale: float | None,
    ) -> None:
        super().__init__(head_dim, scale=scale)
        self.rows: Rows = rows
        drawn = draw_rows(directions, head_dim, rows, generator)
        self.register_buffer("directions", drawn.float())

    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Draw new rows in place. A state made with the old ones belongs to another map from then on."""
        rows = draw_rows(len(self.directions), self.head_dim, self.rows, generator)
        with torch.no_grad():
            self.directions.copy_(rows)

    def relative_variance(self, x: Tensor, y: Tensor) -> Tensor:
        """Var κ̂(x, y) / κ(x, y)² over the draw of the rows, in float64.

        Args:
            x: queries ``[...,D]``, as ``query`` takes them (not yet scaled).
            y: keys ``[...,D]``, broadcast against x.
        """
        return self._relative_variance(self._checked("x", x), self._checked("y", y))

    def _checked(self, name: str, given: Tensor) -> Tensor:
        """One side of a pair whose statistics are asked for, scaled and in float64."""
        if given.shape[-1] != self.head_dim:
            raise ValueError(f"{name}: got last dimension {given.shape[-1]}; takes head_dim = {self.head_dim}")
        return given.double() * math.sqrt(self.scale)

    @abstractmethod
    def _relative_variance(self, x: Tensor, y: Tensor) -> Tensor:
        """``relative_variance`` of scaled float64 inputs."""

    def _of_mean(self, own: Tensor, excess: Tensor) -> Tensor:
        return variance_of_mean(own, excess, len(self.directions), self.head_dim)

    def extra_repr(self) -> str:
        """The base's settings, how many features, and how the rows are coupled."""
        return f"{super().extra_repr()}, num_features={self.num_features}, rows={self.rows}"


class PositiveRandomFeatures(RandomFeatureMap, ExponentialFeatureMap):
    """φ(x) = exp(Ωx − ‖x‖²/2) / √m, whatever couples the rows of Ω."""

    @property
    def num_features(self) -> int:
        """F = m."""
        return len(self.directions)

    def log_features(self, x: Tensor, side: Side, positions: Tensor | None) -> Tensor:
        """Ωx − ‖x‖²/2 − ½ log m."""
        return (x @ self.directions.to(x.dtype).mT).add_(half_norm(x) - math.log(self.num_features) / 2)

    def _relative_variance(self, x: Tensor, y: Tensor) -> Tensor:
        squared = (x + y).square().sum(-1)
        return self._of_mean(squared.expm1(), pair_excess(squared, self.head_dim, self.rows))


class FavorPlus(PositiveRandomFeatures):
    """Positive random features of FAVOR+: an unbiased, positive estimate of exp(x·y).

    φ(x) = exp(Ωx − ‖x‖²/2) / √m with rows ω ~ N(0, I_D). The relative variance of κ̂(x, y) is
    (exp(‖x+y‖²) − 1)/m for independent rows, a little less for orthogonal ones: it grows without bound where
    queries and keys agree, and does not average out over the keys.

    Args:
        head_dim: D.
        num_features: F = m.
        orthogonal: rows orthogonal within blocks of D; else independent.
        generator: where the rows are drawn from; None: torch's default generator.
        scale: softmax scale, None: D ** -0.5.

    Raises:
        ValueError: ``num_features`` below 1 or above 2²⁰.

    Paper: Choromanski et al. 2020, arXiv:2009.14794, Lemma 1-2.

    Example:
        >>> import torch
        >>> phi = FavorPlus(4, num_features=4096, generator=torch.Generator().manual_seed(0), scale=1.0)
        >>> x, y = torch.full((2, 1, 4), 0.25)
        >>> ratio = (phi.query(x) * phi.key(y)).sum() / (x * y).sum().exp()
        >>> abs(ratio - 1) < 4 * phi.relative_variance(x, y).sqrt()
        tensor([True])
    """

    def __init__(
        self,
        head_dim: int,
        *,
        num_features: int = 256,
        orthogonal: bool = True,
        generator: torch.Generator | None = None,
        scale: float | None = None,
    ) -> None:
        rows: Rows = "orthogonal" if orthogonal else "independent"
        super().__init__(head_dim, check_count("num_features", num_features, most=MAX_FEATURES), rows, generator, scale)


class Simplex(PositiveRandomFeatures):
    """FAVOR+ with the rows of a block along a randomly turned simplex: less variance than orthogonal rows.

    φ(x) = exp(Ωx − ‖x‖²/2) / √m, with pairwise products −1/(D−1) between the directions of a block of D rows
    and independent chi(D) norms.

    Args:
        head_dim: D ≥ 2.
        num_features: F = m.
        generator: where the rows are drawn from; None: torch's default generator.
        scale: softmax scale, None: D ** -0.5.

    Raises:
        ValueError: ``num_features`` below 1 or above 2²⁰, ``head_dim`` below 2.

    Paper: Reid et al. 2023, arXiv:2301.13856.

    Example:
        >>> import torch
        >>> x = torch.full((1, 4), 0.5)
        >>> plain, simplex = FavorPlus(4, num_features=4), Simplex(4, num_features=4)
        >>> bool(simplex.relative_variance(x, x) < plain.relative_variance(x, x))
        True
    """

    def __init__(
        self,
        head_dim: int,
        *,
        num_features: int = 256,
        generator: torch.Generator | None = None,
        scale: float | None = None,
    ) -> None:
        super().__init__(
            head_dim, check_count("num_features", num_features, most=MAX_FEATURES), "simplex", generator, scale
        )


class Hyperbolic(RandomFeatureMap, ExponentialFeatureMap):
    """Hyperbolic positive random features: FAVOR+ that uses each row ω in both directions.

    φ(x) = exp(−‖x‖²/2) [exp(Ωx), exp(−Ωx)] / √(2m). The relative variance of κ̂(x, y) is (cosh(‖x+y‖²) − 1)/m
    for independent rows, less than that of 2m independent rows of FAVOR+.

    Args:
        head_dim: D.
        num_features: F, even; m = F/2 directions are drawn.
        orthogonal: rows orthogonal within blocks of D; else independent.
        generator: where the rows are drawn from; None: torch's default generator.
        scale: softmax scale, None: D ** -0.5.

    Raises:
        ValueError: ``num_features`` below 2, above 2²⁰ or odd.

    Paper: Choromanski et al. 2020, arXiv:2009.14794, Lemma 1-2.

    Example:
        >>> import torch
        >>> phi = Hyperbolic(4, num_features=8, generator=torch.Generator().manual_seed(0))
        >>> phi.key(torch.zeros(1, 4)).square().sum()
        tensor(1.0000)
    """

    def __init__(
        self,
        head_dim: int,
        *,
        num_features: int = 256,
        orthogonal: bool = True,
        generator: torch.Generator | None = None,
        scale: float | None = None,
    ) -> None:
        rows: Rows = "orthogonal" if orthogonal else "independent"
        super().__init__(head_dim, half_count(num_features), rows, generator, scale)

    @property
    def num_features(self) -> int:
        """F = 2m."""
        return 2 * len(self.directions)

    def log_features(self, x: Tensor, side: Side, positions: Tensor | None) -> Tensor:
        """±Ωx − ‖x‖²/2 − ½ log 2m."""
        w = self.directions.to(x.dtype)
        # Twice the product costs less than a copy of it.
        return (x @ torch.cat((w, -w)).mT).add_(half_norm(x) - math.log(self.num_features) / 2)

    def _relative_variance(self, x: Tensor, y: Tensor) -> Tensor:
        squared = (x + y).square().sum(-1)
        return self._of_mean(cosh_minus_1(squared), pair_excess(squared, self.head_dim, self.rows))


class TrigonometricFeatures(RandomFeatureMap):
    """Random Fourier features of the softmax kernel: unbiased, signed.

    φ(x) = exp(‖x‖²/2) [cos Ωx, sin Ωx] / √m, so that κ̂ = exp((‖x‖²+‖y‖²)/2) · mean_ω cos(ω·(x−y)). The
    relative variance of κ̂(x, y) is (cosh(‖x−y‖²) − 1)/m for independent rows: exact where query and key
    agree, and hopeless where they do not, so a normaliser made of it can be of any sign.

    Args:
        head_dim: D.
        num_features: F, even; m = F/2 directions are drawn.
        orthogonal: rows orthogonal within blocks of D; else independent.
        generator: where the rows are drawn from; None: torch's default generator.
        scale: softmax scale, None: D ** -0.5.

    Raises:
        ValueError: ``num_features`` below 2, above 2²⁰ or odd.

    Papers: Rahimi & Recht 2007; Peng et al. 2021, arXiv:2103.02143; the variance as in arXiv:2009.14794,
    Lemma 2.

    Example:
        >>> import torch
        >>> phi = TrigonometricFeatures(4, num_features=64, scale=1.0)
        >>> x = torch.ones(1, 4)
        >>> (phi.query(x) * phi.key(x)).sum().log()
        tensor(4.)
    """

    positive = False

    def __init__(
        self,
        head_dim: int,
        *,
        num_features: int = 256,
        orthogonal: bool = True,
        generator: torch.Generator | None = None,
        scale: float | None = None,
    ) -> None:
        rows: Rows = "orthogonal" if orthogonal else "independent"
        super().__init__(head_dim, half_count(num_features), rows, generator, scale)

    @property
    def num_features(self) -> int:
        """F = 2m."""
        return 2 * len(self.directions)

    def features(self, x: Tensor, side: Side, positions: Tensor | None) -> Tensor:
        """exp(‖x‖²/2)/√m times cosines and sines."""
        return self._waves(x, (-half_norm(x)).exp() * len(self.directions) ** -0.5)

    def waves(self, x: Tensor) -> Tensor:
        """φ(x) exp(−‖x‖²/2) for scaled x: [cos Ωx, sin Ωx]/√m, the Gaussian kernel's features, finite for any ‖x‖."""
        return self._waves(x, len(self.directions) ** -0.5)

    def _waves(self, x: Tensor, size: Tensor | float) -> Tensor:
        w = self.directions.to(x.dtype)
        if x.requires_grad:
            angle = x @ w.mT
            return torch.cat((angle.cos(), angle.sin()), -1) * size
        # Without a gradient to keep the angles for, they become the waves in place.
        waves = x @ torch.cat((w, w)).mT
        waves[..., : len(w)].cos_()
        waves[..., len(w) :].sin_()
        return waves.mul_(size)

    def _relative_variance(self, x: Tensor, y: Tensor) -> Tensor:
        squared = (x - y).square().sum(-1)
        return self._of_mean(cosh_minus_1(squared), pair_excess(squared, self.head_dim, self.rows, sign=-1))


def half_norm(x: Tensor) -> Tensor:
    """−‖x‖²/2, kept as a last dimension of one."""
    return torch.linalg.vecdot(x, x).unsqueeze(-1) * -0.5


def cosh_minus_1(x: Tensor) -> Tensor:
    """cosh x − 1 as 2 sinh²(x/2), which keeps its digits for small x."""
    return 2 * (x / 2).sinh().square()


def half_count(num_features: int) -> int:
    """How many directions make ``num_features`` features, two from each."""
    check_count("num_features", num_features, least=2, most=MAX_FEATURES)
    if num_features % 2:
        raise ValueError(f"num_features: got {num_features}; takes an even number, two features a direction")
    return num_features // 2
