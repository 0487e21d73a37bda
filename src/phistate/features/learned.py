"""Maps that are trained: Hedgehog."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from phistate.features.base import FeatureMap, Side, check_count


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

    Paper: Zhang et al. 2024, arXiv:2402.04347, eq. 5-6.

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
