"""flash-linear-attention on a CPU: its own functions where it is installed, stand-ins for them where it is not.

fla needs a Triton that imports, which there is for Linux alone; elsewhere the names are phistate's altogether.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from phistate.compat.fla.modules.layers import STAND_INS
from phistate.compat.fla.ops import OPS, delta
from phistate.compat.package import Package
from phistate.compat.report import Report


def _table() -> dict[str, dict[str, object]]:
    """Every op where people import it from, and the layers that stand around one."""
    table: dict[str, dict[str, object]] = {"fla.ops": {}}
    adapters = [(module, adapter) for places in OPS.values() for module, held in places.items() for adapter in held]
    aliases: list[tuple[str, str, Callable[..., Any]]] = [
        ("fla.ops.gated_delta_rule", "chunk_gdn", delta.chunk_gated_delta_rule),
        ("fla.ops.gated_delta_rule", "fused_recurrent_gdn", delta.fused_recurrent_gated_delta_rule),
    ]
    for module, name, adapter in [*((module, held.__name__, held) for module, held in adapters), *aliases]:
        table.setdefault(module, {})[name] = adapter
        table["fla.ops"][name] = adapter
    return table | {path: dict(names) for path, names in STAND_INS.items()}


def _probe() -> None:
    import torch
    from fla.ops.gla import chunk_gla

    x = torch.zeros(1, 1, 1, 16)
    chunk_gla(x, x, x, x)


def _patch(report: Report) -> None:
    from phistate.compat.fla.patch import patch

    patch(report)


PACKAGE = Package("fla", ("0.6.0",), _table(), __file__, _probe, _patch)
