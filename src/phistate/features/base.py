"""What a feature map is: two sides, φ_q and φ_k, whose dot product is the kernel κ̂(q, k) = φ_q(q)·φ_k(k)."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import chain
from typing import Literal

import torch
from torch import Tensor, nn

from phistate.values import content, has_numbers

Side = Literal["query", "key"]
"""Which of the two sides a map is asked for."""

MAX_FEATURES = 2**20
"""The most a map may make: one key then takes 4 MiB in float32, and a head's state as much for each channel of v."""


class FeatureMap(nn.Module, ABC):
    """A map φ whose dot products are a kernel: κ̂(q, k) = φ_q(q)·φ_k(k).

    Every map is applied to x = q·√scale and y = k·√scale, so that an exponential map approximates
    exp(scale · q·k). Features are computed in at least float32 (float64 for float64 inputs, and under
    autocast all the same) and returned in the input's dtype. A new map defines ``num_features`` and
    ``features``; the rest is final.

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

    pointwise: str | None = None
    """The map's name where it acts on each channel by itself and a backend may know it, and apply it on the way."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "features" in vars(cls) and "pointwise" not in vars(cls):
            cls.pointwise = None  # other features than the base's have not its name

    def __init__(self, head_dim: int, *, scale: float | None = None) -> None:
        super().__init__()
        self.head_dim = check_count("head_dim", head_dim)
        self.scale = head_dim**-0.5 if scale is None else float(scale)
        if not (self.scale > 0 and math.isfinite(self.scale)):
            raise ValueError(f"scale: got {scale}; takes a positive finite number or None")
        self._printed: tuple[object, str] | None = None

    @property
    @abstractmethod
    def num_features(self) -> int:
        """F, how many features one query or key becomes."""

    @abstractmethod
    def features(self, x: Tensor, side: Side, positions: Tensor | None) -> Tensor:
        """φ of x, already checked, scaled and in the computing dtype; ``[...,H,D] -> [...,H,F]``."""

    def query(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """φ_q: ``[B,T,H,D] -> [B,T,H,F]``; ``positions`` ``[B,T]`` (or ``[T]``) for positional maps."""
        return self._evaluate(self.features, x, "query", positions).to(x.dtype)

    def key(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """φ_k: ``[B,T,H,D] -> [B,T,H,F]``; ``positions`` ``[B,T]`` (or ``[T]``) for positional maps."""
        return self._evaluate(self.features, x, "key", positions).to(x.dtype)

    @property
    def fingerprint(self) -> str:
        """A short print of the map's class, settings and tensors, by which a state knows its map."""
        tensors = list(chain(self.parameters(), self.buffers()))
        # Hashing costs more than a decode step should pay, so it is done once per version of the tensors.
        tracked = all(has_numbers(tensor) and not tensor.is_inference() for tensor in tensors)
        versions = (self.extra_repr(), *((t.data_ptr(), t._version) for t in tensors)) if tracked else None
        if self._printed is not None and versions is not None and self._printed[0] == versions:
            return self._printed[1]
        digest = hashlib.sha256(repr(self).encode())
        for name, tensor in sorted(self.state_dict().items()):
            digest.update(name.encode())
            if has_numbers(tensor):
                # As float64, which holds every narrower value exactly: a map moved to float64 is the same map.
                wide = tensor.detach().to("cpu", torch.float64).contiguous()
                digest.update(content(wide))
        result = digest.hexdigest()[:16]
        self._printed = (versions, result)
        return result

    def extra_repr(self) -> str:
        """The settings that, with the tensors, make this map what it is; enters the fingerprint."""
        return f"head_dim={self.head_dim}, scale={self.scale:.9g}"

    def scaled(self, x: Tensor) -> Tensor:
        """x·√scale in the computing dtype."""
        return x.to(torch.promote_types(x.dtype, torch.float32)) * math.sqrt(self.scale)

    def _evaluate(
        self,
        function: Callable[[Tensor, Side, Tensor | None], Tensor],
        x: Tensor,
        side: Side,
        positions: Tensor | None,
    ) -> Tensor:
        if not x.is_floating_point():
            raise TypeError(f"x: got dtype {x.dtype}; takes a floating one")
        if x.shape[-1] != self.head_dim:
            raise ValueError(f"x: got last dimension {x.shape[-1]}; takes head_dim = {self.head_dim}")
        if self.positional:
            _check_positions(x, positions)
        device = x.device.type
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            # Autocast would round the logarithm of a feature to bfloat16 just before it is exponentiated.
            with torch.autocast(device, enabled=False):
                return function(self.scaled(x), side, positions)
        return function(self.scaled(x), side, positions)


class ExponentialFeatureMap(FeatureMap):
    """A map given by its logarithm, φ = exp(log φ), so that it streams without overflow or epsilon.

    Logarithms stay in the computing dtype (at least float32): rounded to bfloat16, log φ = −30 would be off
    by up to 0.06, and φ by 6%.
    """

    @abstractmethod
    def log_features(self, x: Tensor, side: Side, positions: Tensor | None) -> Tensor:
        """Log φ of x, already checked, scaled and in the computing dtype; ``[...,H,D] -> [...,H,F]``, a new tensor."""

    def features(self, x: Tensor, side: Side, positions: Tensor | None) -> Tensor:
        """φ = exp(log φ)."""
        log = self.log_features(x, side, positions)
        # Without a gradient to keep it for, the logarithm's memory serves: a second tensor costs as much as the exp.
        return log.exp() if log.requires_grad else log.exp_()

    def log_query(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Log φ_q: ``[B,T,H,D] -> [B,T,H,F]``, in float32 (float64 for float64 inputs)."""
        return self._evaluate(self.log_features, x, "query", positions)

    def log_key(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Log φ_k: ``[B,T,H,D] -> [B,T,H,F]``, in float32 (float64 for float64 inputs)."""
        return self._evaluate(self.log_features, x, "key", positions)


def check_count(name: str, value: int, *, least: int = 1, most: int | None = None) -> int:
    """``value``, an integer from ``least`` to ``most``; else an error that names the argument."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: got {value!r}; takes an integer ≥ {least}")
    if value < least:
        raise ValueError(f"{name}: got {value}; takes an integer ≥ {least}")
    if most is not None and value > most:
        raise ValueError(f"{name}: got {value}; takes at most {most}")
    return value


def check_features(name: str, value: object, count: int) -> None:
    """Refuses argument ``name`` where the ``count`` features it makes are more than `MAX_FEATURES`."""
    if count > MAX_FEATURES:
        raise ValueError(f"{name}: got {value}, which makes more features than {MAX_FEATURES}; takes less")


def _check_positions(x: Tensor, positions: Tensor | None) -> None:
    """``positions`` are integers ``[B,T]`` or ``[T]`` for x ``[B,T,H,D]``."""
    if positions is None:
        raise ValueError("positions: got None; this map takes the tokens' positions, [B,T] or [T]")
    if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
        raise TypeError(f"positions: got dtype {positions.dtype}; takes integers")
    if x.ndim < 3 or positions.shape not in (x.shape[:-2], x.shape[-3:-2]):
        raise ValueError(
            f"positions: got shape {tuple(positions.shape)} for x of shape {tuple(x.shape)}; "
            "takes [B,T] or [T] for x [B,T,H,D]"
        )
