"""What a smoother remembers: rows folded into the state of a linear mixer, or kept as they came."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from phistate.features import ExponentialFeatureMap, FeatureMap, TrigonometricFeatures
from phistate.features.base import Side
from phistate.ops.state import State

_EMPTY = float("-inf")
# A block's features, or its kernel with every row kept, are 16 MB of float64: few calls, and not far from a cache.
_BLOCK_ELEMENTS = 2**21
# In bandwidths. At _FAR, ‖u‖²/2 rounds by more than what tells one feature from another; _FARTHEST² is still finite.
_FAR, _FARTHEST = 1e15, 1e150


def within_reach(u: Tensor) -> Tensor:
    """Rows as a map sees them: held to where all that it computes is finite."""
    return u.clamp(-_FAR, _FAR)


def rows_at_once(phi: FeatureMap) -> int:
    """How many rows make a block of features."""
    return max(1, _BLOCK_ELEMENTS // phi.num_features)


def log_features(phi: FeatureMap, u: Tensor, side: Side, log_weight: Tensor) -> tuple[Tensor, Tensor | None]:
    """log|φ(u)| − ‖u‖²/2 + log weight ``[n,F]``, and the signs where there are any."""
    u = within_reach(u)
    rows = u.unsqueeze(-2)
    with torch.no_grad():
        if isinstance(phi, TrigonometricFeatures):
            # Their exp(‖u‖²/2) cancels, and would overflow on the way.
            waves = phi.waves(rows)[:, 0]
            return waves.abs().log_().add_(log_weight.unsqueeze(-1)), waves.sign()
        factor = (log_weight - u.square().sum(-1) / 2).unsqueeze(-1)
        if isinstance(phi, ExponentialFeatureMap):
            log = phi.log_query(rows) if side == "query" else phi.log_key(rows)
            return log[:, 0].add_(factor), None
        features = (phi.query(rows) if side == "query" else phi.key(rows))[:, 0]
    return features.abs().log_().add_(factor), features.sign()


def own_kernel(phi: FeatureMap, u: Tensor) -> Tensor:
    """κ̂(x, x) ``[n]``, where the Gaussian kernel is 1."""
    zero = u.new_zeros(())
    log, sign = log_features(phi, u, "query", zero)
    log_key, sign_key = log_features(phi, u, "key", zero)
    terms = log.add_(log_key).exp_()
    if sign is not None and sign_key is not None:
        terms *= sign * sign_key
    return terms.sum(-1)


def log_kernel(u: Tensor, rows: Tensor) -> Tensor:
    """−‖u − v‖²/2 of every row of u ``[n,d]`` and v ``[m,d]``: ``[n,m]``."""
    distance = torch.cdist(u, rows, compute_mode="donot_use_mm_for_euclid_dist").clamp_(max=_FARTHEST)
    return distance.square_().mul_(-0.5)


def finite(peak: Tensor) -> Tensor:
    """The peak to subtract: 0 where it is −inf, so that −inf minus it stays −inf."""
    return peak.masked_fill(peak == _EMPTY, 0.0)


@dataclass
class Folded:
    """Rows as sums of features: the state."""

    phi: FeatureMap
    fingerprint: str
    state: State | None = None

    @property
    def count(self) -> int:
        """How many rows were learned."""
        return 0 if self.state is None else int(self.state.tokens)

    @property
    def block(self) -> int:
        """How many rows to learn or read at a time."""
        return rows_at_once(self.phi)

    def learn(self, u: Tensor, y: Tensor, weight: Tensor) -> None:
        """Take in rows u ``[n,d]``, their targets y ``[n,outputs]`` and weights ``[n]``, all positive."""
        log, sign = log_features(self.phi, u, "key", weight.log())
        peak = self._checked(log.amax(0))
        k = log.sub_(finite(peak)).exp_()
        k = k if sign is None else k * sign
        self._add(k.mT @ y, k.sum(0), peak, len(u))

    def merge(self, other: Folded | Kept) -> None:
        """Take in what another memory of this kind, not empty, has learned."""
        assert isinstance(other, Folded)
        state = other.state
        assert state is not None
        assert state.z is not None
        assert state.log_scale is not None
        self._add(state.s[0, 0], state.z[0, 0], state.log_scale[0, 0], other.count)

    def read(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """The smoothed targets ``[n,outputs]`` and the mass ``[n]`` at rows u ``[n,d]``."""
        state = self.state
        assert state is not None
        assert state.z is not None
        assert state.log_scale is not None
        log, sign = log_features(self.phi, u, "query", u.new_zeros(()))
        log += state.log_scale[0, 0]
        peak = finite(self._checked(log.amax(-1, keepdim=True)))
        q = log.sub_(peak).exp_()
        q = q if sign is None else q * sign
        mass = q @ state.z[0, 0]
        values = torch.where(mass == 0, 0.0, (q @ state.s[0, 0]).mT / mass).mT
        return values, _times_exp(mass, peak[:, 0])

    def _checked(self, peak: Tensor) -> Tensor:
        if not (peak < float("inf")).all():
            raise ValueError(
                f"X: got rows at which {type(self.phi).__name__} is not finite; takes rows nearer the offset"
            )
        return peak

    def _add(self, s: Tensor, z: Tensor, peak: Tensor, count: int) -> None:
        """Sums relative to exp(peak) join those held, both made relative to the larger of the two."""
        state = self.state
        if state is not None:
            assert state.z is not None
            assert state.log_scale is not None
            held, new = state.log_scale[0, 0], peak
            peak = torch.maximum(held, new)
            keep, take = ((x - finite(peak)).exp() for x in (held, new))
            s = state.s[0, 0] * keep.unsqueeze(-1) + s * take.unsqueeze(-1)
            z = state.z[0, 0] * keep + z * take
            count += self.count
        self.state = State(
            s=s[None, None],
            z=z[None, None],
            log_scale=peak[None, None],
            tokens=torch.tensor([count]),
            fingerprint=self.fingerprint,
        )


@dataclass
class Kept:
    """Rows as they came: the exact smoother."""

    u: Tensor | None = None
    y: Tensor | None = None
    log_weight: Tensor | None = None

    @property
    def count(self) -> int:
        """How many rows were learned."""
        return 0 if self.u is None else len(self.u)

    @property
    def block(self) -> int:
        """How many rows to learn or read at a time."""
        return max(1, _BLOCK_ELEMENTS // max(self.count, 1))

    def learn(self, u: Tensor, y: Tensor, weight: Tensor) -> None:
        """Take in rows u ``[n,d]``, their targets y ``[n,outputs]`` and weights ``[n]``, all positive."""
        self._append(u, y, weight.log())

    def merge(self, other: Folded | Kept) -> None:
        """Take in what another memory of this kind, not empty, has learned."""
        assert isinstance(other, Kept)
        assert other.u is not None
        assert other.y is not None
        assert other.log_weight is not None
        self._append(other.u, other.y, other.log_weight)

    def read(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """The smoothed targets ``[n,outputs]`` and the mass ``[n]`` at rows u ``[n,d]``."""
        assert self.u is not None
        assert self.y is not None
        assert self.log_weight is not None
        log = log_kernel(u, self.u).add_(self.log_weight)
        peak = log.amax(-1, keepdim=True)
        kernel = log.sub_(peak).exp_()
        total = kernel.sum(-1)  # at least the 1 of the peak
        return ((kernel @ self.y).mT / total).mT, _times_exp(total, peak[:, 0])

    def _append(self, u: Tensor, y: Tensor, log_weight: Tensor) -> None:
        if self.u is None or self.y is None or self.log_weight is None:
            self.u, self.y, self.log_weight = u, y, log_weight
        else:
            self.u, self.y = torch.cat([self.u, u]), torch.cat([self.y, y])
            self.log_weight = torch.cat([self.log_weight, log_weight])


def _times_exp(mass: Tensor, log: Tensor) -> Tensor:
    """mass · exp(log), beyond float64 only where the product is."""
    half = (log / 2).exp()
    return mass * half * half
