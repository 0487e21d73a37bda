"""What the machine can do, measured at the start of a run: multiply-adds a second, and bytes copied a second.

A rate is counted as two operations a multiply-add; a copied byte counts twice, once read and once written. Both are
what the threads of the run reach together.
"""

from __future__ import annotations

import statistics
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.benchmark import Timer

from phistate.ops.backends import native

_MATMUL = 1024
"""Side of the square product of the torch estimate: large enough for its rate, done in about 10 ms."""


@dataclass
class Limits:
    """The measured limits of ``threads`` threads.

    Args:
        threads: how many run together.
        rates: operations a second by source: ``fma float32`` and ``fma bfloat16`` from registers (the native probe),
            ``matmul float32`` and ``matmul bfloat16`` by torch.
    """

    threads: int
    rates: dict[str, float]
    _copies: dict[int, float] = field(default_factory=dict)

    def peak(self, dtype: torch.dtype) -> tuple[float, str]:
        """Operations a second no kernel in ``dtype`` can be expected to pass, and which measurement says so.

        float32: the probe, or torch's matrix product where there is no native library. bfloat16 may also be computed
        in float32 or by a matrix unit, which only torch's product reaches: the best of them all.
        """
        if dtype == torch.float32:
            names = ["fma float32"] if "fma float32" in self.rates else ["matmul float32"]
        else:
            names = list(self.rates)
        best = max(names, key=lambda name: self.rates[name])
        return self.rates[best], best

    def copy(self, size: int) -> float:
        """Bytes a second, read and written, of a copy whose source and target fill ``size`` bytes together.

        Measured at the working set's own size (the next power of two, 64 KiB to 512 MiB): what stays in a cache is
        not held against the speed of main memory.
        """
        size = min(max(1 << (max(size, 1) - 1).bit_length(), 1 << 16), 1 << 29)
        if size not in self._copies:
            source = torch.zeros(size // 8)
            target = torch.zeros_like(source)
            timer = Timer(
                "target.copy_(source)", globals={"source": source, "target": target}, num_threads=self.threads
            )
            self._copies[size] = size / _best(timer)
        return self._copies[size]

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the rates, and the copies measured so far by size of the working set."""
        return {
            "threads": self.threads,
            "flops_per_second": self.rates,
            "copy_bytes_per_second": {str(size): rate for size, rate in sorted(self._copies.items())},
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Limits:
        """What :meth:`as_dict` gave; sizes of copies it does not hold are measured anew."""
        copies = {int(size): float(rate) for size, rate in data["copy_bytes_per_second"].items()}
        return cls(int(data["threads"]), dict(data["flops_per_second"]), copies)


def measure(threads: int) -> Limits:
    """The limits of ``threads`` threads of this machine, now."""
    rates = {}
    if _has_native():
        rates["fma float32"] = _together(threads, pairs=False)
        if pairs := _together(threads, pairs=True):
            rates["fma bfloat16"] = pairs
    for dtype in (torch.float32, torch.bfloat16):
        rates[f"matmul {str(dtype).removeprefix('torch.')}"] = _matmul(threads, dtype)
    limits = Limits(threads, rates)
    limits.copy(1 << 29)
    return limits


def _has_native() -> bool:
    try:
        return native.why_not() is None
    except ValueError:  # a forced instruction set the machine lacks
        return False


def _together(threads: int, *, pairs: bool) -> float:
    """The probe in every thread at once: ctypes lets go of the interpreter, and cores may share a clock or a port."""
    with ThreadPoolExecutor(threads) as pool:
        runs = [sum(pool.map(lambda _: native.peak(pairs=pairs), range(threads))) for _ in range(3)]
    return max(runs)


def _matmul(threads: int, dtype: torch.dtype) -> float:
    a, b = torch.rand(2, _MATMUL, _MATMUL).to(dtype).unbind()
    timer = Timer("torch.mm(a, b)", globals={"a": a, "b": b}, num_threads=threads)
    return 2 * _MATMUL**3 / _best(timer)


def _best(timer: Timer) -> float:
    """Seconds of the fastest run: a limit is what the machine does when nothing else runs."""
    return min(min(timer.blocked_autorange(min_run_time=0.02).times) for _ in range(5))


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile.

    >>> quartiles([1.0, 2.0, 3.0])
    (1.5, 2.0, 2.5)
    """
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high
