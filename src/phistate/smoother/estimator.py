"""The scikit-learn estimator."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, overload

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, MultiOutputMixin, RegressorMixin
from sklearn.exceptions import NotFittedError
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from phistate.features import FeatureMap
from phistate.features.base import check_count
from phistate.ops.state import State
from phistate.smoother.fidelity import Fidelity, measure, reach_of, told_rows
from phistate.smoother.maps import choose_map
from phistate.smoother.memory import Folded, Kept
from phistate.smoother.scaling import (
    Array,
    check_offset,
    check_standardised,
    check_weights,
    fix_bandwidth,
    fix_offset,
    standardise,
    tell,
)

if TYPE_CHECKING:
    from typing import Self

# As many rows as a float64 can count may be summed without overflow.
_LARGEST_TARGET = float(np.finfo(np.float64).max) * 2.0**-53


class KernelSmoother(MultiOutputMixin, RegressorMixin, BaseEstimator):
    """Nadaraya–Watson regression with a Gaussian kernel, in memory that does not grow with the rows.

    ŷ(x) = Σ_j w_j κ(x, x_j) y_j / Σ_j w_j κ(x, x_j),  κ(x, y) = exp(−Σ_l (x_l − y_l)²/2h_l²) ≈ φ(x)·φ(y).

    With a positive map every prediction is a weighted average of the targets seen, so it stays between the least and
    the largest of them, however far from the data. All of it is float64 and each feature is held relative to its own
    running maximum, so nothing over- or underflows.

    Offset, bandwidth and map are fixed by ``prepare``, or by the first batch that ``fit`` or ``partial_fit`` sees; from
    then on neither the order of the rows nor how they are cut into batches matters, to rounding. The Gaussian kernel
    does not change when both rows shift, so the offset costs no accuracy: it only keeps ‖u‖, and with it a random
    map's variance, small.

    A random map holds the kernel of rows within a few bandwidths of the offset, how many depends on the map, its
    features and the columns. So every map is compared with the exact smoother on the rows it is prepared on, and one
    that averages other rows is refused or told of; ``predict`` tells of a mass that is off.

    Args:
        feature_map: ``"auto"``: ``"grid"`` where a grid fits, else ``"oprf"``. ``"grid"``: the kernel's own integral on
            a grid over the data, off by 5e-9 with features to spare and 1.4% at most, for 1 to 3 columns.
            ``"favor+"``, ``"hyperbolic"``, ``"oprf"``, ``"sderf"``, ``"simplex"``: positive random features.
            ``"rff"``: random Fourier features, signed. Or a function of the number of columns that gives a
            ``FeatureMap`` with ``scale=1``.
        num_features: at most how many features the map may have; a function decides for itself.
        bandwidth: h, one number or one a column, in the columns' units; ``"scott"``: sd_l · n^(−1/(d+4)), n the sum of
            the weights (1 in place of a standard deviation of zero). A map has a least bandwidth, see below.
        offset: one number a column, or one for all; None: the weighted mean.
        exact: keep every row and use the kernel itself: the slow twin to compare with. Memory grows with the rows.
        signed: ``"allow"`` lets a map whose kernel can be negative be used; ``"refuse"``. Its predictions may lie
            anywhere, and a denominator that is exactly zero predicts zero.
        random_state: what random maps are drawn from; an integer makes two smoothers draw the same.

    Attributes:
        feature_map_: the map in use; None when exact.
        bandwidth_, offset_: ``[d]``, as fixed.
        state_: what was learned, a ``phistate.State`` with one head: S, z, the log scale and the rows seen. None when
            exact.
        total_variation_: ``½ Σ_j |p̂_j − p_j|``, the map's weights in an average against the exact smoother's, mean over
            128 of the rows prepared on, each against 2²¹ / features of them at most: their averages are off by at most
            that times the range of y. None when exact.
        delta_: ``|δ|``, the mass's relative error, median over the same rows. None when exact.
        n_features_in_: d.

    Raises:
        ValueError: arguments or data that do not fit, naming the argument, what came and what is taken. A bandwidth so
            narrow that ``total_variation_`` is 0.9 or more: a wider one, more features, the grid or ``exact`` help.

    Warns:
        UserWarning: ``total_variation_`` of 0.5 or more in ``prepare``, or in the first fit; ``delta_`` of 0.5 or more
            where a mass is asked for; rows to learn that lie beyond what the map was prepared for and that it does not
            hold.

    Papers: Nadaraya 1964, Watson 1964; positive random features, Choromanski et al. 2020, arXiv:2009.14794, and
    Likhosherstov et al. 2022, arXiv:2205.15317.

    Example:
        >>> import numpy as np
        >>> rng = np.random.default_rng(0)
        >>> X = rng.uniform(-3, 3, (2000, 1))
        >>> y = np.sin(X[:, 0]) + 0.1 * rng.standard_normal(2000)
        >>> smoother = KernelSmoother(bandwidth=0.2)
        >>> for start in range(0, 2000, 100):
        ...     smoother = smoother.partial_fit(X[start : start + 100], y[start : start + 100])
        >>> value, mass = smoother.predict([[0.5], [30.0]], return_mass=True)
        >>> bool(abs(value[0] - np.sin(0.5)) < 0.1), bool(mass[0] > 100), bool(mass[1] < 1e-30)
        (True, True, True)
    """

    feature_map_: FeatureMap | None
    bandwidth_: Array
    offset_: Array
    n_features_in_: int
    _columns: int | None
    _fidelity: Fidelity | None
    _memory: Folded | Kept
    _reach: tuple[Tensor, Tensor]

    def __init__(
        self,
        feature_map: str | Callable[[int], FeatureMap] = "auto",
        *,
        num_features: int = 2048,
        bandwidth: float | ArrayLike | Literal["scott"] = "scott",
        offset: float | ArrayLike | None = None,
        exact: bool = False,
        signed: Literal["refuse", "allow"] = "refuse",
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.feature_map = feature_map
        self.num_features = num_features
        self.bandwidth = bandwidth
        self.offset = offset
        self.exact = exact
        self.signed = signed
        self.random_state = random_state

    def prepare(self, X: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Fix offset, bandwidth and map on a sample, and learn nothing yet.

        Copies of a prepared smoother (``copy.deepcopy``) can learn apart, on other machines too, and be merged.

        Args:
            X: ``[n,d]``.
            sample_weight: ``[n]``, ≥ 0, not all zero; None: ones.
        """
        data: Array = validate_data(self, X, dtype=np.float64, reset=True)
        weight = check_weights(sample_weight, len(data))
        self._prepare(data[weight > 0], weight[weight > 0])
        return self

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Forget everything, prepare on these rows and learn them.

        Args:
            X: ``[n,d]``.
            y: ``[n]`` or ``[n,outputs]``.
            sample_weight: ``[n]``, ≥ 0, not all zero; None: ones. A weight counts as that many rows.
        """
        return self._learn(X, y, sample_weight, reset=True)

    def partial_fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Learn more rows; the first call prepares on them.

        Args:
            X: ``[n,d]``.
            y: ``[n]`` or ``[n,outputs]``.
            sample_weight: ``[n]``, ≥ 0; None: ones. A weight counts as that many rows.
        """
        return self._learn(X, y, sample_weight, reset="offset_" not in vars(self))

    @overload
    def predict(self, X: ArrayLike, return_mass: Literal[False] = ...) -> Array: ...

    @overload
    def predict(self, X: ArrayLike, return_mass: Literal[True]) -> tuple[Array, Array]: ...

    def predict(self, X: ArrayLike, return_mass: bool = False) -> Array | tuple[Array, Array]:
        """The smoothed targets, and how much data they stand on.

        Args:
            X: ``[n,d]``.
            return_mass: give Σ_j w_j κ(x, x_j) too, the denominator: how many rows (by weight) were seen near x, a
                row at x itself counting 1; inf where that is beyond float64. Divided by Σ_j w_j and ∏_l h_l√(2π), it is
                the kernel density estimate.

        Returns:
            ``[n]`` or ``[n,outputs]``, as y was; with ``return_mass`` the mass ``[n]`` too.
        """
        check_is_fitted(self)
        data: Array = validate_data(self, X, dtype=np.float64, reset=False)
        u = standardise(data, self.offset_, self.bandwidth_)
        if return_mass and self._fidelity is not None:
            self._fidelity.tell_mass()
        parts = [self._memory.read(rows) for rows in u.split(self._memory.block)]
        values = torch.cat([value for value, _ in parts]).numpy()
        values = values if self._columns is not None else values[:, 0]
        return (values, torch.cat([mass for _, mass in parts]).numpy()) if return_mass else values

    def merge(self, other: KernelSmoother) -> Self:
        """Take over what another smoother has learned, as if its rows had been learned here; returns this one.

        Both must have the same offset, bandwidth and map: be copies of one prepared smoother.

        Raises:
            TypeError: ``other`` is no KernelSmoother.
            ValueError: another offset, bandwidth, map or number of outputs.
            NotFittedError: either has not been prepared.
        """
        if not isinstance(other, KernelSmoother):
            raise TypeError(f"other: got {type(other).__name__}; takes a KernelSmoother")
        for smoother in (self, other):
            if "offset_" not in vars(smoother):
                raise NotFittedError("other: got a merge before prepare, fit or partial_fit of both")
        if self._fingerprint != other._fingerprint:
            raise ValueError(
                "other: got another offset, bandwidth or feature map; takes copies of one prepared smoother"
            )
        if other._memory.count:
            if not self._memory.count:
                self._columns = other._columns
            elif self._columns != other._columns:
                raise ValueError(f"other: got outputs {_shape(other._columns)}; takes {_shape(self._columns)}")
            self._memory.merge(other._memory)
        return self

    @property
    def total_variation_(self) -> float | None:
        """How far the map's weights were from the exact smoother's when it was prepared; None when exact."""
        return None if self._fidelity is None else self._fidelity.total_variation

    @property
    def delta_(self) -> float | None:
        """How far the map's mass was from the exact smoother's when it was prepared; None when exact."""
        return None if self._fidelity is None else self._fidelity.delta

    @property
    def state_(self) -> State | None:
        """What was learned; None when exact, or before the first row."""
        return self._memory.state if isinstance(self._memory, Folded) else None

    def __sklearn_is_fitted__(self) -> bool:
        return "offset_" in vars(self) and self._memory.count > 0

    def _learn(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None, *, reset: bool) -> Self:
        data, target = validate_data(self, X, y, dtype=np.float64, multi_output=True, y_numeric=True, reset=reset)
        weight = check_weights(sample_weight, len(data))
        used = weight > 0  # a row of no weight is no row, and has no logarithm of its weight
        data, target, weight = data[used], target[used], weight[used]
        largest = np.abs(target).max(initial=0.0)
        if largest > _LARGEST_TARGET:
            raise ValueError(
                f"y: got {largest:.3g}; takes at most {_LARGEST_TARGET:.3g}, for sums to be within float64"
            )
        if reset:
            self._prepare(data, weight)
        if not len(data):
            return self
        columns = None if target.ndim == 1 else target.shape[1]
        if self._memory.count and columns != self._columns:
            raise ValueError(f"y: got outputs {_shape(columns)}; takes {_shape(self._columns)}, as before")
        u = standardise(data, self.offset_, self.bandwidth_)
        check_standardised(u, self._told)
        if self.feature_map_ is not None:
            told_rows(self.feature_map_, self._reach, u)
        self._columns = columns
        outputs = torch.from_numpy(np.array(target, dtype=np.float64).reshape(len(u), columns or 1))
        weights = torch.from_numpy(weight)
        for rows in zip(*(x.split(self._memory.block) for x in (u, outputs, weights)), strict=True):
            self._memory.learn(*rows)
        return self

    def _prepare(self, data: Array, weight: Array) -> None:
        # Forgotten first: a refusal must not leave half of what was and half of what is.
        if "offset_" in vars(self):
            del self.offset_
        if not len(data):
            raise ValueError("sample_weight: got zeros only; takes at least one positive weight to prepare on")
        if self.signed not in ("refuse", "allow"):
            raise ValueError(f"signed: got {self.signed!r}; takes 'refuse' or 'allow'")
        check_count("num_features", self.num_features)
        offset = fix_offset(self.offset, data, weight)
        self.bandwidth_ = fix_bandwidth(self.bandwidth, data, weight)
        self._told = tell(self.bandwidth, self.bandwidth_)
        u = standardise(data, offset, self.bandwidth_)
        check_standardised(u, self._told)
        if self.offset is not None:
            check_offset(data, offset, self.bandwidth_)
        digest = hashlib.sha256(offset.tobytes() + self.bandwidth_.tobytes())
        if self.exact:
            self.feature_map_, self._fidelity = None, None
            self._memory = Kept()
            digest.update(b"exact")
        else:
            phi = self._choose_map(u, torch.from_numpy(weight))
            self.feature_map_, self._reach = phi, reach_of(phi, u)
            digest.update(phi.fingerprint.encode())
            self._memory = Folded(phi, digest.hexdigest()[:16])
        self._fingerprint = digest.hexdigest()[:16]
        self._columns = None
        self.offset_ = offset

    def _choose_map(self, u: Tensor, weight: Tensor) -> FeatureMap:
        phi = choose_map(
            self.feature_map,
            u,
            weight,
            num_features=self.num_features,
            random_state=self.random_state,
            bandwidth=self._told,
        )
        if not phi.positive and self.signed == "refuse":
            raise ValueError(
                f"feature_map: got {type(phi).__name__}, whose kernel can be negative; takes a positive map, or "
                "signed='allow'"
            )
        self._fidelity = measure(phi, u, weight, self._told)
        self._fidelity.tell_weights()
        return phi


def _shape(columns: int | None) -> str:
    return "[n]" if columns is None else f"[n,{columns}]"
