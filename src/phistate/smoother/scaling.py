"""What makes u = (x − offset)/h of a row: its weight, the offset and the bandwidth h."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

Array = NDArray[np.float64]


def check_weights(sample_weight: ArrayLike | None, count: int) -> Array:
    """The rows' weights ``[count]``, ones for None; else an error that names ``sample_weight``."""
    if sample_weight is None:
        return np.ones(count)
    try:
        given = np.asarray(sample_weight)
        if given.dtype.kind not in "biufO":
            raise TypeError(f"no real numbers: {given.dtype}")
        weight = given.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"sample_weight: got {type(sample_weight).__name__}; takes ({count},) real numbers") from error
    if weight.shape != (count,):
        raise ValueError(f"sample_weight: got shape {weight.shape}; takes ({count},), a weight a row")
    if not (np.isfinite(weight) & (weight >= 0)).all():
        raise ValueError(f"sample_weight: got {weight.min()} to {weight.max()}; takes finite weights ≥ 0")
    return weight


def shares(weight: Array) -> Array:
    """Weights divided by their sum, which itself may be beyond float64."""
    relative = weight / weight.max()
    return relative / relative.sum()


def fix_offset(offset: float | ArrayLike | None, data: Array, weight: Array) -> Array:
    """The offset ``[d]``: as given, or the weighted mean."""
    return shares(weight) @ data if offset is None else _per_column("offset", offset, data.shape[1:])


def fix_bandwidth(bandwidth: float | ArrayLike, data: Array, weight: Array) -> Array:
    """The bandwidth ``[d]``: as given, or by Scott's rule."""
    if not isinstance(bandwidth, str):
        fixed = _per_column("bandwidth", bandwidth, data.shape[1:])
    elif bandwidth == "scott":
        fixed = _scott(data, weight)
    else:
        raise ValueError(f"bandwidth: got {bandwidth!r}; takes 'scott' or positive numbers")
    if not (fixed > 0).all():
        raise ValueError(f"bandwidth: got {tell(bandwidth, fixed)}; takes 'scott' or positive numbers")
    return fixed


def tell(bandwidth: float | ArrayLike, fixed: Array) -> str:
    """A bandwidth as an error says it: as given, and what it came to where that was not said."""
    if not isinstance(bandwidth, str):
        return repr(bandwidth)
    return f"{bandwidth!r}, here {np.array2string(fixed, precision=3, threshold=4, edgeitems=1)}"


def standardise(data: Array, offset: Array, bandwidth: Array) -> Tensor:
    """u = (x − offset)/h; what is beyond float64 is its largest number, farther than any row that is learned."""
    with np.errstate(over="ignore"):
        return torch.from_numpy(np.nan_to_num((data - offset) / bandwidth))


def check_standardised(u: Tensor, told: str) -> None:
    """Refuses rows to learn that the offset and the bandwidth put beyond float64, which has no telling them apart."""
    if (u.abs() == np.finfo(np.float64).max).any():
        raise ValueError(f"bandwidth: got {told}; takes one at which (X − offset) / bandwidth is within float64")


def check_offset(data: Array, offset: Array, bandwidth: Array) -> None:
    """Refuses an offset so far from the rows that X − offset rounds away what tells them apart."""
    with np.errstate(over="ignore"):
        rounding = np.spacing(np.abs(data - offset).max(0))
    if ((rounding > 0.1 * bandwidth) & (rounding > np.spacing(np.abs(data).max(0)))).any():
        raise ValueError(
            f"offset: got {offset.tolist()}; takes one nearer the rows, X − offset rounds them by a bandwidth"
        )


def _scott(data: Array, weight: Array) -> Array:
    """sd_l · n^(−1/(d+4)), n the sum of the weights."""
    share = shares(weight)
    # Relative to a column's largest value no square over- or underflows.
    largest = np.abs(data).max(0)
    largest = np.where(largest > 0, largest, 1.0)
    relative = data / largest
    spread = np.sqrt(share @ np.square(relative - share @ relative))
    # A constant column's deviation is rounding, and must not become a bandwidth.
    spread = np.where(spread > 10 * np.finfo(np.float64).eps, spread * largest, 1.0)
    power = -1 / (data.shape[1] + 4)
    top = weight.max()
    return np.asarray(spread * min(1.0, top**power * (weight / top).sum() ** power))


def _per_column(name: str, given: float | ArrayLike, shape: Sequence[int]) -> Array:
    message = f"{name}: got {given!r}; takes a finite number or {shape[0]}, one a column"
    try:
        values = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(message) from error
    if values.shape not in ((), tuple(shape)) or not np.isfinite(values).all():
        raise ValueError(message)
    return np.array(np.broadcast_to(values, tuple(shape)))
