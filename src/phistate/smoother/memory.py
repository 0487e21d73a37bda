"""What a smoother remembers: rows folded into the state of a linear mixer, or kept as they came."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from phistate.features import ExponentialFeatureMap, FeatureMap
from phistate.features.base import Side
from phistate.ops.state import State

_EMPTY = float("-inf")
# A block's features, or its kernel with every row kept, are 16 MB of float64: few calls, and not far from a cache.
_BLOCK_ELEMENTS = 2**21


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
        return max(1, _BLOCK_ELEMENTS // self.phi.num_features)

    def learn(self, u: Tensor, y: Tensor, weight: Tensor) -> None:
        """Take in rows u ``[n,d]``, their targets y ``[n,outputs]`` and weights ``[n]``, all positive."""
        log, sign = self._features(u, "key", weight.log())
        peak = log.amax(0)
        k = log.sub_(_finite(peak)).exp_()
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
        log, sign = self._features(u, "query", torch.zeros(()))
        log += state.log_scale[0, 0]
        peak = _finite(log.amax(-1, keepdim=True))
        q = log.sub_(peak).exp_()
        q = q if sign is None else q * sign
        mass = q @ state.z[0, 0]
        values = torch.where(mass == 0, 0.0, (q @ state.s[0, 0]).mT / mass).mT
        return values, mass * peak[:, 0].exp()

    def _features(self, u: Tensor, side: Side, log_weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """log|φ(u)| − ‖u‖²/2 + log weight ``[n,F]``, and the signs where there are any."""
        phi, rows = self.phi, u.unsqueeze(-2)
        factor = (log_weight - u.square().sum(-1) / 2).unsqueeze(-1)
        with torch.no_grad():
            if isinstance(phi, ExponentialFeatureMap):
                log = phi.log_query(rows) if side == "query" else phi.log_key(rows)
                return log[:, 0].add_(factor), None
            features = (phi.query(rows) if side == "query" else phi.key(rows))[:, 0]
        return features.abs().log_().add_(factor), features.sign()

    def _add(self, s: Tensor, z: Tensor, peak: Tensor, count: int) -> None:
        """Sums relative to exp(peak) join those held, both made relative to the larger of the two."""
        state = self.state
        if state is not None:
            assert state.z is not None
            assert state.log_scale is not None
            held, new = state.log_scale[0, 0], peak
            peak = torch.maximum(held, new)
            keep, take = ((x - _finite(peak)).exp() for x in (held, new))
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
        log = torch.cdist(u, self.u, compute_mode="donot_use_mm_for_euclid_dist").square_().mul_(-0.5)
        log += self.log_weight
        peak = _finite(log.amax(-1, keepdim=True))
        kernel = log.sub_(peak).exp_()
        total = kernel.sum(-1)
        values = torch.where(total == 0, 0.0, (kernel @ self.y).mT / total).mT
        return values, total * peak[:, 0].exp()

    def _append(self, u: Tensor, y: Tensor, log_weight: Tensor) -> None:
        if self.u is None or self.y is None or self.log_weight is None:
            self.u, self.y, self.log_weight = u, y, log_weight
        else:
            self.u, self.y = torch.cat([self.u, u]), torch.cat([self.y, y])
            self.log_weight = torch.cat([self.log_weight, log_weight])


def _finite(peak: Tensor) -> Tensor:
    """The peak to subtract: 0 where it is −inf, so that −inf minus it stays −inf."""
    return peak.masked_fill(peak == _EMPTY, 0.0)
