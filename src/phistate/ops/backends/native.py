"""The native library: found, loaded and threaded once; its C ABI as ctypes structures (csrc/phistate.h)."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable
from ctypes import POINTER, Structure, c_char_p, c_double, c_int, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

ABI = 4
"""The number csrc/phistate.h defines as PHISTATE_ABI."""

DTYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
"""Storage types the kernels read and write, by their code in ``enum phistate_dtype``."""


class View(Structure):
    """``phistate_view``: one operand ``[batch, time, head, features]``, its last dimension dense."""

    _fields_ = [
        ("data", c_void_p),
        ("batch", c_int64),
        ("time", c_int64),
        ("head", c_int64),
        ("dtype", c_int64),
    ]


def view(tensor: Tensor | None) -> View:
    """The view of a ``[B,T,H,...]`` tensor (absent: a null one). The last dimension of four must be dense."""
    if tensor is None:
        return View()
    batch, time, head, *_ = tensor.stride()
    return View(tensor.data_ptr(), batch, time, head, DTYPES[tensor.dtype])


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
    abi = library.phistate_abi() if hasattr(library, "phistate_abi") else None
    if abi != ABI:
        return f"the native library {path} is of another version: ABI {abi}, wanted {ABI}"
    for function, result, arguments in (
        ("last_error", c_char_p, ()),
        ("set_parallel_for", None, (c_void_p, c_void_p)),
        ("isa", c_char_p, ()),
        ("isas", c_char_p, (c_int64,)),
        ("force_isa", c_int, (c_char_p,)),
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


def kernel(name: str, structure: type[Structure]) -> Callable[..., None]:
    """The kernel ``phistate_<name>``, called with the fields of ``structure`` after ``bytes``."""
    symbol = getattr(library(), f"phistate_{name}")
    symbol.restype = c_int
    symbol.argtypes = (POINTER(structure),)
    size = ctypes.sizeof(structure)

    def call(*fields: object) -> None:
        if symbol(structure(size, *fields)) != 0:
            check(-1)

    return call


def packed_kernel(name: str, size: int) -> Callable[[bytes], int]:
    """The kernel ``phistate_<name>``, called with its structure of ``size`` bytes already packed; gives its status.

    ``struct.pack`` fills a structure of eighty fields several times faster than ctypes does.
    """
    symbol = library()[f"phistate_{name}"]  # not by attribute: an object of its own, with its own argument types
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


def peak(*, pairs: bool = False) -> float:
    """Operations a second one thread reaches from registers: float32, or bfloat16 pairs (0: has none)."""
    return float(library().phistate_probe_peak(int(pairs)))
