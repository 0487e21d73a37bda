"""How far a map's smoother is from the exact one, measured on the rows that it is prepared on.

As `phistate.diagnostics` measures attention: the total variation between the map's weights p̂ and the exact smoother's
p says how wrong the averages are, δ = mass / exact mass − 1 how wrong the mass is. Either can be bad without the other.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from phistate.features import FeatureMap
from phistate.features.grid import Grid
from phistate.smoother.maps import MARGIN
from phistate.smoother.memory import finite, log_features, log_kernel, own_kernel, rows_at_once, within_reach

# Half of an average's weight on other rows, or half of the mass, is worth a word; with nine tenths elsewhere, an
# average has next to nothing to do with where it is asked for.
_TOLD, _REFUSED = 0.5, 0.9
_QUERIES = 128


@dataclass(frozen=True)
class Fidelity:
    """What was measured, and what is said of it."""

    phi: FeatureMap
    bandwidth: str
    total_variation: float
    """½ Σ_j |p̂_j − p_j|, mean over the rows; at most 1 for a positive map."""
    delta: float
    """|δ|, median over the rows."""

    def tell_weights(self) -> None:
        """Refuses a map whose averages are of other rows, and warns of one for which half of that holds."""
        if self.total_variation < _TOLD:
            return
        text = (
            f"bandwidth: got {self.bandwidth}; the weights of {self._map} differ from the exact smoother's by a total "
            f"variation of {self.total_variation:.3g}"
        )
        if not self.total_variation < _REFUSED:
            raise ValueError(f"{text}; takes less than {_REFUSED}, by {self._remedy}")
        warn(f"{text}; to bring it down, take {self._remedy}")

    def tell_mass(self) -> None:
        """Warns of a map whose mass is not what the exact one's is."""
        if not self.delta < _TOLD:
            warn(
                f"bandwidth: got {self.bandwidth}; the mass of {self._map} differs from the exact smoother's by "
                f"{self.delta:.3g} of it at a typical row; to bring that down, take {self._remedy}"
            )

    @property
    def _map(self) -> str:
        return f"{type(self.phi).__name__} with {self.phi.num_features} features"

    @property
    def _remedy(self) -> str:
        grid = "" if self.phi.head_dim > 3 or isinstance(self.phi, Grid) else "feature_map='grid' "
        return f"a wider bandwidth, more features, {grid}or exact=True"


def measure(phi: FeatureMap, u: Tensor, weight: Tensor, bandwidth: str) -> Fidelity:
    """The map's weights and mass against the exact ones, on one block of the rows u ``[n,d]``, evenly spaced."""
    at = _evenly(len(u), rows_at_once(phi))
    keys, log_weight = u[at], weight[at].log()
    queries = keys[_evenly(len(keys), _QUERIES)]

    log = log_kernel(queries, keys) + log_weight
    log_mass = log.logsumexp(-1)
    p = (log - log_mass.unsqueeze(-1)).exp()

    log_k, sign_k = log_features(phi, keys, "key", log_weight)
    log_q, sign_q = log_features(phi, queries, "query", log_weight.new_zeros(()))
    peak = finite(log_k.amax(0))
    log_q += peak
    top = finite(log_q.amax(-1, keepdim=True))
    q, k = (log_q - top).exp(), (log_k - peak).exp()
    if sign_q is not None and sign_k is not None:
        q, k = q * sign_q, k * sign_k
    kernel = q @ k.mT
    mass = kernel.sum(-1)

    variation = (kernel / mass.unsqueeze(-1) - p).abs().sum(-1) / 2
    variation = torch.where(mass == 0, 1.0, variation)  # nothing is averaged
    delta = (mass.sign() * (mass.abs().log() + top[:, 0] - log_mass).exp() - 1).abs()
    return Fidelity(phi, bandwidth, float(variation.mean()), float(delta.median()))


def told_rows(phi: FeatureMap, reach: tuple[Tensor, Tensor], u: Tensor) -> None:
    """Warns of rows beyond what the map was prepared for, where it does not hold their kernel."""
    low, high = reach
    lost = ((u < low) | (u > high)).any(1)
    if not isinstance(phi, Grid):  # whose kernel falls off beyond its edges, whatever the rows
        beyond = u[lost]
        own = torch.cat([own_kernel(phi, rows) for rows in beyond.split(rows_at_once(phi))])
        lost = ~((own - 1).abs() < _TOLD) | (beyond != within_reach(beyond)).any(1)
    if count := int(lost.sum()):
        name = "the grid" if isinstance(phi, Grid) else type(phi).__name__
        warn(
            f"X: {count} of {len(u)} rows lie beyond what {name} was prepared for, and their kernel is too small; "
            "prepare(X) on a sample that spans the stream"
        )


def reach_of(phi: FeatureMap, u: Tensor) -> tuple[Tensor, Tensor]:
    """The box of what a map is prepared for: a bandwidth more than the rows, or what a grid says of itself."""
    edge = MARGIN / 2
    if isinstance(phi, Grid):
        return u.new_tensor(phi.low) + edge, u.new_tensor(phi.high) - edge
    return u.amin(0) - edge, u.amax(0) + edge


def warn(message: str) -> None:
    """Warns where the smoother was called from, however deep in it the reason was found."""
    depth = 1
    while sys._getframe(depth).f_globals.get("__name__", "").startswith(__package__):
        depth += 1
    warnings.warn(message, stacklevel=depth + 1)


def _evenly(length: int, count: int) -> Tensor:
    count = min(length, count)
    return torch.arange(count) * length // count
