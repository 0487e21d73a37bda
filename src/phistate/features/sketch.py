"""PolySketch: a random sketch of the quartic kernel that cannot be negative."""

from __future__ import annotations

import torch
from torch import Tensor

from phistate.features.base import Side, check_count, check_features
from phistate.features.polynomial import Monomials
from phistate.features.random import RandomFeatureMap


class PolySketch(RandomFeatureMap):
    """A nonnegative sketch of (x·y)⁴, squared from a sketch of (x·y)².

    y = (G₁x ∘ G₂x)/√r with Gaussian G₁, G₂ of r rows, φ(x) = the packed monomials of y⊗y, so κ̂ = (y_x·y_y)².
    The inner sketch is unbiased for (x·y)²; its square is biased upwards by its variance. The kernel of r²
    features y⊗y is kept with the r(r+1)/2 that differ.

    Args:
        head_dim: D.
        sketch_size: r; the map makes r(r+1)/2 features.
        generator: where the rows are drawn from; None: torch's default generator.
        scale: softmax scale, None: D ** -0.5.

    Raises:
        ValueError: ``sketch_size`` below 1, or one that makes more than 2²⁰ features.

    Paper: Kacham et al. 2023, arXiv:2310.01655.

    Example:
        >>> import torch
        >>> phi = PolySketch(4, sketch_size=8)
        >>> phi.num_features
        36
        >>> x, y = torch.randn(2, 1, 100, 4)
        >>> bool(((phi.query(x) @ phi.key(y).mT) > -1e-6).all())
        True
    """

    def __init__(
        self,
        head_dim: int,
        *,
        sketch_size: int = 16,
        generator: torch.Generator | None = None,
        scale: float | None = None,
    ) -> None:
        size = check_count("sketch_size", sketch_size)
        check_features("sketch_size", size, size * (size + 1) // 2)
        super().__init__(head_dim, 2 * size, "independent", generator, scale)
        self.sketch_size = size
        self.monomials = Monomials(size, 2)

    @property
    def num_features(self) -> int:
        """F = r(r+1)/2."""
        return self.sketch_size * (self.sketch_size + 1) // 2

    def features(self, x: Tensor, side: Side, positions: Tensor | None) -> Tensor:
        """√2 times the weighted monomials of degree 2 of the sketch."""
        first, second = (x @ self.directions.to(x.dtype).mT).chunk(2, -1)
        sketch = first * second * (2**0.25 * self.sketch_size**-0.5)
        return self.monomials(sketch, least=2)

    def relative_bias(self, x: Tensor, y: Tensor) -> Tensor:
        """E κ̂(x, y) / (x·y)⁴ − 1 over the draw, in float64; x and y as for ``relative_variance``."""
        second, _ = self._moments(self._checked("x", x), self._checked("y", y))
        return second - 1

    def _relative_variance(self, x: Tensor, y: Tensor) -> Tensor:
        second, fourth = self._moments(x, y)
        return fourth - second.square()

    def _moments(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """E S² and E S⁴ over (x·y)⁴ and (x·y)⁸, where S = mean_i Z_i is the inner sketch of (x·y)².

        Z = (g₁·x)(g₁·y)(g₂·x)(g₂·y), so E Zⁿ = (E[(g·x)ⁿ(g·y)ⁿ])², with Isserlis' moments of two Gaussians of
        correlation ρ inside: ρ, 1+2ρ², 9ρ+6ρ³, 9+72ρ²+24ρ⁴, each divided by ρⁿ.
        """
        inverse = (x.square().sum(-1) * y.square().sum(-1)) / (x * y).sum(-1).square()  # ρ⁻²
        z2 = (inverse + 2).square()
        z3 = (9 * inverse + 6).square()
        z4 = (9 * inverse.square() + 72 * inverse + 24).square()
        r = self.sketch_size
        second = (z2 + (r - 1)) / r
        fourth = z4 + (r - 1) * (4 * z3 + 3 * z2.square() + (r - 2) * (6 * z2 + (r - 3)))
        return second, fourth / r**3

    def extra_repr(self) -> str:
        """The base's settings and r."""
        return f"{super().extra_repr()}, sketch_size={self.sketch_size}"
