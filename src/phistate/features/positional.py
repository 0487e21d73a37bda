"""Maps that depend on where a token stands: cosFormer."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from phistate.features.base import FeatureMap, Side, check_count
from phistate.values import values


class CosFormer(FeatureMap):
    """relu features turned by the token's position, so that near tokens weigh more.

    φ(x, i) = [relu(x)·cos(πi/2M), relu(x)·sin(πi/2M)], so that
    φ(q, i)·φ(k, j) = relu(x)·relu(y)·cos(π(i−j)/2M), nonnegative because |i−j| < M.
    M is fixed at construction: were it the length of the sequence at hand, a stream and a batch would
    disagree.

    Args:
        head_dim: D; the map makes 2D features.
        max_length: M; positions run from 0 to M−1.
        scale: softmax scale, None: D ** -0.5 (the map is homogeneous, so a normalised read does not depend on
            it).

    Raises:
        ValueError: ``max_length`` below 1; when called, ``positions`` missing, negative or ≥ M.

    Paper: Qin et al. 2022, arXiv:2202.08791.

    Example:
        >>> import torch
        >>> phi = CosFormer(4, max_length=16, scale=1.0)
        >>> phi.query(torch.ones(1, 3, 1, 4), positions=torch.arange(3)).shape
        torch.Size([1, 3, 1, 8])
        >>> phi.query(torch.ones(1, 1, 1, 4), positions=torch.tensor([16]))
        Traceback (most recent call last):
        ValueError: positions: got 16 to 16; takes 0 to 15 (max_length = 16)
    """

    positional = True

    def __init__(self, head_dim: int, *, max_length: int = 8192, scale: float | None = None) -> None:
        super().__init__(head_dim, scale=scale)
        self.max_length = check_count("max_length", max_length)

    @property
    def num_features(self) -> int:
        """F = 2D."""
        return 2 * self.head_dim

    def features(self, x: Tensor, side: Side, positions: Tensor | None) -> Tensor:
        """relu(x) times the cosine and the sine of the token's angle."""
        assert positions is not None  # the base has refused a call without
        self._check_range(positions)
        angle = positions.to(x.dtype)[..., None, None] * (math.pi / (2 * self.max_length))
        x = x.relu()
        return torch.cat((x * angle.cos(), x * angle.sin()), -1)

    def _check_range(self, positions: Tensor) -> None:
        if torch.compiler.is_compiling():
            inside = ((positions >= 0) & (positions < self.max_length)).all()
            torch._assert_async(inside, f"positions: out of range; takes 0 to {self.max_length - 1}")
        elif positions.numel() and (read := values(positions)) is not None:
            first, last = (int(bound) for bound in read.aminmax())
            if first < 0 or last >= self.max_length:
                raise ValueError(
                    f"positions: got {first} to {last}; takes 0 to {self.max_length - 1} "
                    f"(max_length = {self.max_length})"
                )

    def extra_repr(self) -> str:
        """The base's settings and M."""
        return f"{super().extra_repr()}, max_length={self.max_length}"
