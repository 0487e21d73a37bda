"""What runs here: processor, memory, torch, the native kernels, the backends and the optional libraries."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

import phistate
from phistate.ops.backends import BACKENDS, native
from phistate.ops.backends.base import Call

OPTIONAL = {
    "transformers": "models to make faster; peers of the benchmarks",
    "accelerate": "reading gguf checkpoints",
    "gguf": "reading gguf checkpoints",
    "matplotlib": "reports",
    "onnxruntime": "peer of the benchmarks",
    "onnx": "builds onnxruntime's graphs",
    "zentorch": "peer of the benchmarks",
    "flash-linear-attention": "transformers' own fast path on CUDA",
    "mamba-ssm": "transformers' own fast path on CUDA",
    "causal-conv1d": "transformers' own fast path on CUDA",
    "kernels": "transformers' own way to kernels from the hub",
    "scikit-learn": "the estimator",
}
"""Distributions that are used where they are found, and what for."""


@dataclass(frozen=True)
class Native:
    """The native kernels: instruction sets compiled, those this machine has, the one in use; or why there are none."""

    missing: str | None
    compiled: list[str]
    available: list[str]
    in_use: str | None


@dataclass(frozen=True)
class Machine:
    """Everything ``phistate info`` tells, in plain types.

    Args:
        cores: processors this process may run on.
        memory: bytes of main memory, None where the system does not say.
        backends: by name, the reasons against running a float32 call on the CPU; empty: it runs.
        libraries: by distribution, its version; None: not installed.
    """

    phistate: str
    python: str
    system: str
    processor: str
    cores: int
    memory: int | None
    torch: str
    threads: int
    native: Native
    backends: dict[str, list[str]]
    libraries: dict[str, str | None]


def describe() -> Machine:
    """This machine and what is installed on it.

    >>> describe().backends["torch"]
    []
    """
    return Machine(
        phistate=phistate.__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        processor=processor(),
        cores=cores(),
        memory=_memory(),
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        native=_native(),
        backends={backend.name: backend.reasons_against(_small_call()) for backend in BACKENDS},
        libraries={name: version(name) for name in OPTIONAL},
    )


def version(distribution: str) -> str | None:
    """The installed version of a distribution, None when it is not installed; nothing is imported."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def cores() -> int:
    """Processors this process may run on."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def load() -> float | None:
    """How many processes wanted a processor in the last minute; None where the system does not say."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):  # Windows has none
        return None


def processor() -> str:
    """The processor's name, as the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model", "cpu model") and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf, others not these names
        return None


def _native() -> Native:
    try:
        missing = native.why_not()
    except ValueError as error:  # PHISTATE_ISA names what this machine lacks
        return Native(str(error), [], [], None)
    if missing is not None:
        return Native(missing, [], [], None)
    return Native(None, native.isas(available=False), native.isas(), native.isa())


def _small_call() -> Call:
    x = torch.zeros(1, 1, 1, 4)
    return Call(x, x, x)
