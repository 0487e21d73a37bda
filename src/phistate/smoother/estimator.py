"""The scikit-learn estimator."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, MultiOutputMixin, RegressorMixin
from sklearn.exceptions import NotFittedError
from sklearn.utils import check_array, check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from phistate.features import FeatureMap, feature_map
from phistate.features.base import check_count
from phistate.features.fitted import FittedFeatureMap
from phistate.features.grid import Grid
from phistate.ops.state import State
from phistate.smoother.memory import Folded, Kept

if TYPE_CHECKING:
    from typing import Self

Array = NDArray[np.float64]

_RANDOM = ("favor+", "hyperbolic", "oprf", "rff", "sderf", "simplex")
# The grid's cells in bandwidths: finer than half, the kernel's error (5e-9) no longer shows; at one, it is 1.4%.
_FINEST, _WIDEST = 0.5, 1.0
# How far the grid reaches beyond the data, in bandwidths: four standard deviations of what it integrates. A row less
# than half of that from the edge loses 2% of its kernel and more.
_MARGIN = 2.0


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

    Args:
        feature_map: ``"auto"``: ``"grid"`` where a grid fits, else ``"oprf"``. ``"grid"``: the kernel's own integral on
            a grid over the data, off by 5e-9 with features to spare and 1.4% at most, for 1 to 3 columns.
            ``"favor+"``, ``"hyperbolic"``, ``"oprf"``, ``"sderf"``, ``"simplex"``: positive random features.
            ``"rff"``: random Fourier features, signed. Or a function of the number of columns that gives a
            ``FeatureMap`` with ``scale=1``.
        num_features: at most how many features the map may have; a function decides for itself.
        bandwidth: h, one number or one a column, in the columns' units; ``"scott"``: sd_l · n^(−1/(d+4)), n the sum of
            the weights (1 in place of a standard deviation of zero).
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
        n_features_in_: d.

    Raises:
        ValueError: arguments or data that do not fit, naming the argument, what came and what is taken.

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
        self._prepare(data, _weights(sample_weight, len(data)))
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
                row at x itself counting 1. Divided by Σ_j w_j and ∏_l h_l√(2π), it is the kernel density estimate.

        Returns:
            ``[n]`` or ``[n,outputs]``, as y was; with ``return_mass`` the mass ``[n]`` too.
        """
        check_is_fitted(self)
        data: Array = validate_data(self, X, dtype=np.float64, reset=False)
        u = self._standardised(data)
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
    def state_(self) -> State | None:
        """What was learned; None when exact, or before the first row."""
        return self._memory.state if isinstance(self._memory, Folded) else None

    def __sklearn_is_fitted__(self) -> bool:
        return "offset_" in vars(self) and self._memory.count > 0

    def _learn(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None, *, reset: bool) -> Self:
        data, target = validate_data(self, X, y, dtype=np.float64, multi_output=True, y_numeric=True, reset=reset)
        weight = _weights(sample_weight, len(data))
        if reset:
            self._prepare(data, weight)
        columns = None if target.ndim == 1 else target.shape[1]
        if self._memory.count and columns != self._columns:
            raise ValueError(f"y: got outputs {_shape(columns)}; takes {_shape(self._columns)}, as before")
        self._columns = columns
        kept = weight > 0  # a row of no weight is no row, and has no logarithm of its weight
        u = self._standardised(data[kept])
        self._check_reach(u)
        outputs = torch.from_numpy(np.array(target[kept], dtype=np.float64).reshape(len(u), columns or 1))
        weights = torch.from_numpy(weight[kept])
        for rows in zip(*(x.split(self._memory.block) for x in (u, outputs, weights)), strict=True):
            self._memory.learn(*rows)
        return self

    def _prepare(self, data: Array, weight: Array) -> None:
        total = weight.sum()
        if total == 0:
            raise ValueError("sample_weight: got zeros only; takes at least one positive weight to prepare on")
        if self.signed not in ("refuse", "allow"):
            raise ValueError(f"signed: got {self.signed!r}; takes 'refuse' or 'allow'")
        check_count("num_features", self.num_features)
        mean = weight @ data / total
        self.offset_ = mean if self.offset is None else _per_column("offset", self.offset, mean.shape)
        self.bandwidth_ = self._choose_bandwidth(data - mean, weight, data)
        used = weight > 0
        u = self._standardised(data[used])
        self.feature_map_ = None if self.exact else self._choose_map(u, torch.from_numpy(weight[used]))
        digest = hashlib.sha256(self.offset_.tobytes() + self.bandwidth_.tobytes())
        digest.update(b"exact" if self.feature_map_ is None else self.feature_map_.fingerprint.encode())
        self._fingerprint = digest.hexdigest()[:16]
        self._memory: Folded | Kept = (
            Kept() if self.feature_map_ is None else Folded(self.feature_map_, self._fingerprint)
        )
        self._columns = None

    def _choose_bandwidth(self, centred: Array, weight: Array, data: Array) -> Array:
        if isinstance(self.bandwidth, str):
            if self.bandwidth != "scott":
                raise ValueError(f"bandwidth: got {self.bandwidth!r}; takes 'scott' or positive numbers")
            total = weight.sum()
            spread = np.sqrt(weight @ np.square(centred) / total)
            # A constant column's deviation is rounding, and must not become a bandwidth.
            rounding = 10 * np.finfo(np.float64).eps * np.abs(data).max(0)
            spread = np.where(spread > rounding, spread, 1.0)
            return np.asarray(spread * max(total, 1.0) ** (-1 / (data.shape[1] + 4)))
        bandwidth = _per_column("bandwidth", self.bandwidth, centred.shape[1:])
        if not (bandwidth > 0).all():
            raise ValueError(f"bandwidth: got {self.bandwidth!r}; takes 'scott' or positive numbers")
        return bandwidth

    def _choose_map(self, u: Tensor, weight: Tensor) -> FeatureMap:
        d = u.shape[1]
        if callable(self.feature_map):
            phi = self.feature_map(d)
            if not isinstance(phi, FeatureMap):
                raise TypeError(f"feature_map: got a function that gives {type(phi).__name__}; takes a FeatureMap")
            if phi.head_dim != d or phi.scale != 1 or phi.positional:
                raise ValueError(
                    f"feature_map: got {phi!r}; takes head_dim = {d}, scale = 1 and no positions, for X has {d} columns"
                )
        elif self.feature_map in ("auto", "grid"):
            grid = _grid(u, self.num_features)
            if isinstance(grid, Grid):
                phi = grid
            elif self.feature_map == "grid":
                raise ValueError(
                    f"num_features: got {self.num_features}; feature_map='grid' takes at least {grid} for {d} columns "
                    "of this range, or a wider bandwidth"
                )
            else:
                phi = self._random_map("oprf", u, weight)
        elif self.feature_map in _RANDOM:
            phi = self._random_map(self.feature_map, u, weight)
        else:
            names = ", ".join(("auto", "grid", *_RANDOM))
            raise ValueError(f"feature_map: got {self.feature_map!r}; takes a function or one of {names}")
        if not phi.positive and self.signed == "refuse":
            raise ValueError(
                f"feature_map: got {type(phi).__name__}, whose kernel can be negative; takes a positive map, or "
                "signed='allow'"
            )
        if isinstance(phi, FittedFeatureMap) and not phi.is_fitted:
            phi.fit(u[:, None], u[:, None])
        return phi.double()

    def _random_map(self, name: str, u: Tensor, weight: Tensor) -> FeatureMap:
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        options: dict[str, Any] = {"generator": torch.Generator().manual_seed(seed)}
        if name == "oprf":
            # Its fit takes rows without weights; E‖u_x + u_y‖² over independent rows is all that it uses.
            share = weight / weight.sum()
            r = float(2 * (share @ u.square()).sum() + 2 * (share @ u).square().sum())
            d = u.shape[1]
            options["a"] = (1 - ((d + 2 * r) + math.sqrt((d + 2 * r) ** 2 + 8 * d * r)) / (2 * d)) / 8
        return feature_map(name, head_dim=u.shape[1], num_features=self.num_features, scale=1.0, **options)

    def _standardised(self, data: Array) -> Tensor:
        return torch.from_numpy((data - self.offset_) / self.bandwidth_)

    def _check_reach(self, u: Tensor) -> None:
        if isinstance(self.feature_map_, Grid) and len(u):
            low, high = (u.new_tensor(edge) for edge in (self.feature_map_.low, self.feature_map_.high))
            beyond = ((u < low + _MARGIN / 2) | (u > high - _MARGIN / 2)).any(1).sum().item()
            if beyond:
                warnings.warn(
                    f"X: {beyond} of {len(u)} rows lie beyond what the grid was prepared for, and their kernel is too "
                    "small; prepare(X) on a sample that spans the stream",
                    stacklevel=4,
                )


def _grid(u: Tensor, most: int) -> Grid | int:
    """The finest useful grid over the rows with at most ``most`` centres; else how many the coarsest one takes."""
    low, high = (u.amin(0) - _MARGIN).tolist(), (u.amax(0) + _MARGIN).tolist()

    def counts(width: float) -> list[int]:
        return [math.ceil((top - bottom) / width) for bottom, top in zip(low, high, strict=True)]

    for width in np.linspace(_FINEST, _WIDEST, 51):
        if math.prod(counts(float(width))) <= most:
            return Grid(u.shape[1], low=low, high=high, counts=counts(float(width)), scale=1.0)
    return math.prod(counts(_WIDEST))


def _weights(sample_weight: ArrayLike | None, count: int) -> Array:
    if sample_weight is None:
        return np.ones(count)
    weight: Array = check_array(sample_weight, dtype=np.float64, ensure_2d=False, input_name="sample_weight")
    if weight.ndim == 0:
        weight = np.full(count, float(weight))
    if weight.shape != (count,):
        raise ValueError(f"sample_weight: got shape {weight.shape}; takes ({count},), a weight a row")
    if (weight < 0).any():
        raise ValueError(f"sample_weight: got {weight.min()}; takes weights ≥ 0")
    return weight


def _per_column(name: str, given: float | ArrayLike, shape: Sequence[int]) -> Array:
    values = np.asarray(given, dtype=np.float64)
    if values.shape not in ((), tuple(shape)) or not np.isfinite(values).all():
        raise ValueError(f"{name}: got {given!r}; takes a finite number or {shape[0]}, one a column")
    return np.array(np.broadcast_to(values, tuple(shape)))


def _shape(columns: int | None) -> str:
    return "[n]" if columns is None else f"[n,{columns}]"
