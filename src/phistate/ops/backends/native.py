"""The native library: found, loaded and threaded once. What its structures look like is ``abi.py``'s."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable
from ctypes import c_char_p, c_double, c_int, c_int64, c_void_p
from pathlib import Path

import torch

from phistate.ops.backends import abi

_NAMES = {"darwin": "libphistate.dylib", "win32": "phistate.dll"}


@functools.cache
def _load() -> ctypes.CDLL | str:
    """The library, or why there is none."""
    name = _NAMES.get(sys.platform, "libphistate.so")
    # PHISTATE_LIBRARY names a library built by hand, with cmake or a sanitizer.
    path = Path(os.environ.get("PHISTATE_LIBRARY") or Path(__file__).parents[2] / "_native" / name)
    if not path.is_file():
        return f"the native library is not there ({path}): phistate was installed without a C++ compiler"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return f"the native library does not load: {error}"
    library.phistate_abi.restype = c_int64
    version = library.phistate_abi() if hasattr(library, "phistate_abi") else None
    if version != abi.VERSION:
        return f"the native library {path} is of another version: ABI {version}, wanted {abi.VERSION}"
    for function, result, arguments in (
        ("last_error", c_char_p, ()),
        ("set_parallel_for", None, (c_void_p, c_void_p)),
        ("isa", c_char_p, ()),
        ("isas", c_char_p, (c_int64,)),
        ("force_isa", c_int, (c_char_p,)),
        ("poison_scratch", None, (c_int64,)),
        ("probe_scratch", None, (c_int64, c_void_p)),
        ("probe_exp", c_int, (c_int64, c_void_p, c_void_p)),
        ("probe_product", c_int, (c_int64, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_int64)),
        ("probe_peak", c_double, (c_int64,)),
    ):
        symbol = getattr(library, f"phistate_{function}")
        symbol.restype = result
        symbol.argtypes = arguments
    _thread(library)
    return library


def _thread(library: ctypes.CDLL) -> None:
    """Hands over torch's own thread pool, so that torch.set_num_threads holds and no second one exists."""
    directory = Path(torch.__file__).parent / "lib"
    pattern = {"darwin": "libtorch_cpu.dylib", "win32": "torch_cpu.dll"}.get(sys.platform, "libtorch_cpu.so")
    torch_library = ctypes.CDLL(str(directory / pattern))
    try:
        symbols = (torch_library.torch_parallel_for, torch_library.torch_get_num_threads)
    except AttributeError:  # torch < 2.10 exports neither: the kernels run in the calling thread
        return
    library.phistate_set_parallel_for(*(ctypes.cast(symbol, c_void_p) for symbol in symbols))


def why_not() -> str | None:
    """Why the native library cannot be used; None when it can.

    Raises:
        ValueError: ``PHISTATE_ISA`` names a set that does not exist or that this machine lacks.
    """
    library = _load()
    if isinstance(library, str):
        return library
    if library.phistate_isa() is None:
        raise ValueError(library.phistate_last_error().decode())
    return None


def library() -> ctypes.CDLL:
    """The loaded library.

    Raises:
        RuntimeError: there is none; the message says why.
        ValueError: ``PHISTATE_ISA`` names a set that does not exist or that this machine lacks.
    """
    reason = why_not()
    if reason is not None:
        raise RuntimeError(reason)
    loaded = _load()
    assert not isinstance(loaded, str)
    return loaded


def check(status: int) -> None:
    """Raises what a kernel that returned ``status`` left in ``phistate_last_error``."""
    if status != 0:
        raise RuntimeError(library().phistate_last_error().decode())


@functools.cache
def kernel(name: str) -> Callable[[bytes], int]:
    """The kernel ``phistate_<name>``, called with its structure packed (:func:`phistate.ops.backends.abi.form`).

    Gives its status; :func:`check` raises what a status other than 0 means.
    """
    symbol = library()[f"phistate_{name}"]
    symbol.restype = c_int
    symbol.argtypes = (c_char_p,)
    return symbol


def isa() -> str:
    """The instruction set the kernels run with."""
    return str(library().phistate_isa().decode())


def isas(*, available: bool = True) -> list[str]:
    """Instruction sets, best first: those this machine has, or all that were compiled."""
    return str(library().phistate_isas(int(available)).decode()).split()


def force_isa(name: str | None) -> None:
    """Makes the kernels run with one instruction set; None: the best the machine has.

    Raises:
        ValueError: no such set, or the machine lacks it.
    """
    native = library()
    if native.phistate_force_isa(None if name is None else name.encode()) != 0:
        raise ValueError(native.phistate_last_error().decode())


def poison_scratch(on: bool) -> None:
    """Whether scratch memory is NaN whenever a kernel gets it: what reads more than was written then shows."""
    library().phistate_poison_scratch(int(on))


def peak(*, pairs: bool = False) -> float:
    """Operations a second one thread reaches from registers: float32, or bfloat16 pairs (0: has none)."""
    return float(library().phistate_probe_peak(int(pairs)))
