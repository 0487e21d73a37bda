"""Backends in the order ``backend="auto"`` tries them, and the choice between them."""

from __future__ import annotations

from phistate.ops.backends.base import Backend, Call
from phistate.ops.backends.cpu import CpuBackend
from phistate.ops.backends.torch import TorchBackend

BACKENDS: tuple[Backend, ...] = (CpuBackend(), TorchBackend())


def choose(call: Call, name: str) -> Backend:
    """The backend called ``name`` or, for ``"auto"``, the first that can run ``call``.

    Raises:
        ValueError: an unknown name, or a named backend that cannot run the call, with its reasons.
    """
    if name == "auto":
        return next(backend for backend in BACKENDS if not backend.reasons_against(call))
    for backend in BACKENDS:
        if backend.name == name:
            if reasons := backend.reasons_against(call):
                raise ValueError(f"backend: got {name!r}, which cannot run this call: {'; '.join(reasons)}")
            return backend
    names = ", ".join(repr(backend.name) for backend in BACKENDS)
    raise ValueError(f"backend: got {name!r}; takes 'auto', {names}")
