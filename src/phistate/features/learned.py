"""Maps that are trained: Hedgehog and ReBased."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from phistate.features.base import FeatureMap, Side, check_count, check_features
from phistate.features.polynomial import Monomials


class Hedgehog(FeatureMap):
    """Learned softmax features, trained to mimic the attention they replace.

    φ(x) = [softmax(Wx + b), softmax(−Wx − b)] over the channels; W starts at the identity and b at zero.
    Queries and keys have a W each. Every feature lies in (0, 1), so the kernel is positive and bounded by 2.

    Args:
        head_dim: D; the map makes 2D features.
        bias: learn b too.
        query_heads: None: one W for all query heads; Hq: one for each, for x ``[B,T,Hq,D]``.
        key_heads: None: one W for all key heads; Hk: one for each.
        scale: softmax scale, None: D ** -0.5.

    Raises:
        ValueError: a head count below 1; when called, x with another head count than the weights have.

    Paper: Zhang et al. 2024, arXiv:2402.04347.

    Example:
        >>> import torch
        >>> phi = Hedgehog(4, scale=1.0)
        >>> phi.key(torch.zeros(1, 1, 1, 4)).detach()[0, 0, 0, :4]
        tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """

    def __init__(
        self,
        head_dim: int,
        *,
        bias: bool = False,
        query_heads: int | None = None,
        key_heads: int | None = None,
        scale: float | None = None,
    ) -> None:
        super().__init__(head_dim, scale=scale)
        self.query_projection = HeadwiseLinear("query_heads", query_heads, head_dim, bias=bias)
        self.key_projection = HeadwiseLinear("key_heads", key_heads, head_dim, bias=bias)

    @property
    def num_features(self) -> int:
        """F = 2D."""
        return 2 * self.head_dim

    def features(self, x: Tensor, side: Side, positions: Tensor | None) -> Tensor:
        """Softmax of the projection and of its opposite."""
        projected = (self.query_projection if side == "query" else self.key_projection)(x)
        return torch.cat((projected.softmax(-1), (-projected).softmax(-1)), -1)


class ReBased(FeatureMap):
    """A quadratic kernel of learned, normalised vectors.

    φ(x) = the packed monomials of degree 2 of x̂ = γ∘LN(x) + β, so that κ̂ = (x̂·ŷ)² exactly, where
    LN(x) = (x − mean) / √(variance + eps) over the channels and queries and keys have a γ and β each. γ
    starts at one and β at zero.

    Args:
        head_dim: D; the map makes D(D+1)/2 features.
        eps: added to the variance inside LN, ≥ 0.
        scale: softmax scale, None: D ** -0.5; LN leaves of it only what eps sees.

    Raises:
        ValueError: a negative or non-finite ``eps``, a ``head_dim`` that makes more than 2²⁰ features.

    Paper: Aksenov et al. 2024, arXiv:2402.10644.

    Example:
        >>> import torch
        >>> phi = ReBased(3, scale=1.0, eps=0.0)
        >>> x = torch.tensor([[1.0, 2.0, 3.0]])
        >>> (phi.query(x) * phi.key(x)).sum().detach()  # ‖LN(x)‖² = 3
        tensor(9.0000)
    """

    def __init__(self, head_dim: int, *, eps: float = 1e-5, scale: float | None = None) -> None:
        super().__init__(head_dim, scale=scale)
        if not (eps >= 0 and math.isfinite(eps)):
            raise ValueError(f"eps: got {eps}; takes a finite number ≥ 0")
        self.eps = float(eps)
        check_features("head_dim", head_dim, self.num_features)
        self.query_gain = nn.Parameter(torch.ones(head_dim))
        self.query_shift = nn.Parameter(torch.zeros(head_dim))
        self.key_gain = nn.Parameter(torch.ones(head_dim))
        self.key_shift = nn.Parameter(torch.zeros(head_dim))
        self.monomials = Monomials(head_dim, 2)

    @property
    def num_features(self) -> int:
        """F = D(D+1)/2."""
        return self.head_dim * (self.head_dim + 1) // 2

    def features(self, x: Tensor, side: Side, positions: Tensor | None) -> Tensor:
        """√2 times the weighted monomials of degree 2 of the normalised vector."""
        query = side == "query"
        gain = (self.query_gain if query else self.key_gain).to(x.dtype)
        shift = (self.query_shift if query else self.key_shift).to(x.dtype)
        normal = layer_norm(x, (self.head_dim,), gain, shift, self.eps)
        return self.monomials(normal * 2**0.25, least=2)

    def extra_repr(self) -> str:
        """The base's settings and eps."""
        return f"{super().extra_repr()}, eps={self.eps:.9g}"


class HeadwiseLinear(nn.Module):
    """Wx + b with one square W for all heads or one for each; starts as the identity.

    Args:
        name: how the head count is called in errors.
        heads: None: one W ``[D,D]``; H: W ``[H,D,D]`` for x ``[...,H,D]``.
        dim: D.
        bias: learn b.
    """

    def __init__(self, name: str, heads: int | None, dim: int, *, bias: bool) -> None:
        super().__init__()
        self.name = name
        self.heads = None if heads is None else check_count(name, heads)
        lead = () if heads is None else (heads,)
        self.weight = nn.Parameter(torch.eye(dim).repeat(*lead, 1, 1))
        self.bias = nn.Parameter(torch.zeros(*lead, dim)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """``[...,H,D] -> [...,H,D]``, in x's dtype."""
        if self.heads is not None and (x.ndim < 2 or x.shape[-2] != self.heads):
            raise ValueError(f"x: got shape {tuple(x.shape)}; takes [...,H,D] with {self.name} = {self.heads}")
        weight = self.weight.to(x.dtype)
        projected = x @ weight.mT if self.heads is None else torch.einsum("...hi,hoi->...ho", x, weight)
        return projected if self.bias is None else projected + self.bias.to(x.dtype)

    def extra_repr(self) -> str:
        """How many heads have a W of their own."""
        return f"heads={self.heads}, bias={self.bias is not None}"
