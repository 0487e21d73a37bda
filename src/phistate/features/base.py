"""What a feature map is: two sides, φ_q and φ_k, whose dot product is the kernel κ̂(q, k) = φ_q(q)·φ_k(k)."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn


class FeatureMap(nn.Module, ABC):
    """A map φ whose dot products are a kernel: κ̂(q, k) = φ_q(q)·φ_k(k).

    Every map is applied to x = q·√scale and y = k·√scale, so that an exponential map approximates
    exp(scale · q·k).

    Args:
        head_dim: D, the size of one head's query and key.
        scale: softmax scale the map stands for, split evenly between q and k; None: D ** -0.5.

    Raises:
        ValueError: ``head_dim`` below 1, or a ``scale`` that is not positive and finite.
    """

    positive: bool = True
    """φ_q(q)·φ_k(k) ≥ 0 for every pair, so that a normalised read is an average."""
    positional: bool = False
    """``query`` and ``key`` need ``positions``."""

    def __init__(self, head_dim: int, *, scale: float | None = None) -> None:
        super().__init__()
        if head_dim < 1:
            raise ValueError(f"head_dim: got {head_dim}; takes an integer ≥ 1")
        self.head_dim = head_dim
        self.scale = head_dim**-0.5 if scale is None else float(scale)
        if not (self.scale > 0 and math.isfinite(self.scale)):
            raise ValueError(f"scale: got {scale}; takes a positive finite number or None")

    @property
    @abstractmethod
    def num_features(self) -> int:
        """F, how many features one query or key becomes."""

    @abstractmethod
    def query(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """φ_q: ``[B,T,H,D] -> [B,T,H,F]``; ``positions`` ``[B,T]`` (or ``[T]``) for positional maps."""

    @abstractmethod
    def key(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """φ_k: ``[B,T,H,D] -> [B,T,H,F]``; ``positions`` ``[B,T]`` (or ``[T]``) for positional maps."""

    @property
    def fingerprint(self) -> str:
        """A short print of the map's class, settings and tensors; a state remembers the map it was made with."""
        digest = hashlib.sha256(f"{type(self).__qualname__}({self.extra_repr()})".encode())
        for name, tensor in sorted(self.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]

    def extra_repr(self) -> str:
        """The settings that, with the tensors, make this map what it is; enters the fingerprint."""
        return f"head_dim={self.head_dim}, scale={self.scale:.6g}"

    def scaled(self, x: Tensor) -> Tensor:
        """x·√scale, after checking that the last dimension is D."""
        if x.shape[-1] != self.head_dim:
            raise ValueError(f"x: got last dimension {x.shape[-1]}; takes head_dim = {self.head_dim}")
        return x * math.sqrt(self.scale)


class ExponentialFeatureMap(FeatureMap):
    """A map given by its logarithm, φ = exp(log φ), which can therefore be streamed without overflow or epsilon."""

    @abstractmethod
    def log_query(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Log φ_q: ``[B,T,H,D] -> [B,T,H,F]``."""

    @abstractmethod
    def log_key(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Log φ_k: ``[B,T,H,D] -> [B,T,H,F]``."""

    def query(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """φ_q = exp(log φ_q)."""
        return self.log_query(x, positions).exp()

    def key(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """φ_k = exp(log φ_k)."""
        return self.log_key(x, positions).exp()
