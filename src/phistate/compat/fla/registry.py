"""fla's own registry of backends: for the operations it takes whole, phistate is one more, for tensors on the CPU."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

from phistate.compat.functions import Hook
from phistate.compat.report import Report

# Module and function, and what fla dispatches it by: the function itself (None), or the name of a family of them.
_OPERATIONS: dict[tuple[str, str], str | None] = {
    ("fla.ops.simple_gla", "fused_chunk_simple_gla"): None,
    ("fla.ops.simple_gla", "fused_recurrent_simple_gla"): None,
    ("fla.ops.simple_gla", "parallel_simple_gla"): None,
    ("fla.ops.gsa.gate", "fused_additive_gate"): None,
    ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"): "gated_delta_rule",
    ("fla.ops.kda", "chunk_kda"): None,
    ("fla.ops.generalized_delta_rule", "chunk_dplr_delta_rule"): "generalized_delta_rule.dplr",
}


class _Asked:
    """How many reports want the registered functions now: the registry forgets nothing, so its verifier asks."""

    count = 0
    lock = threading.Lock()


def register(report: Report, module: str, name: str, original: Callable[..., Any], hook: Hook) -> bool:
    """Whether fla now dispatches this function to ``hook``'s by itself; False: it has to be replaced."""
    if (module, name) not in _OPERATIONS or os.environ.get("FLA_DISABLE_BACKEND_DISPATCH") == "1":
        return False
    backends = importlib.import_module("fla.backends")
    operation = _OPERATIONS[module, name]
    function = hook.native(original)
    base = type("PhistateBackend", (backends.BaseBackend,), {"backend_type": "phistate", "priority": 0})
    try:
        if operation is None:
            backends.register(original, backend=base, verifier=_on_the_cpu)(function)
        else:
            backend = type("PhistateBackend", (base,), {name: staticmethod(function)})
            backends.register(operation, verifier=_on_the_cpu)(backend)
    except (KeyError, TypeError, AttributeError):  # this version dispatches it otherwise, or not at all
        return False
    with _Asked.lock:
        _Asked.count += 1
    report._undo.append(_leave)
    return True


def _leave() -> None:
    with _Asked.lock:
        _Asked.count -= 1


def _on_the_cpu(*args: Any, **kwargs: Any) -> tuple[bool, str | None]:
    if not _Asked.count:
        return False, "phistate was undone"
    first = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
    if first is None or first.device.type != "cpu":
        return False, "phistate's kernels are for the CPU"
    return True, None
