"""``phistate info``: what runs here, and why not what does not."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from phistate.bench.machine import Machine


def info(as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False) -> None:
    """Show the machine, the kernels' instruction sets, the backends and the optional libraries."""
    from phistate.bench.machine import describe

    machine = describe()
    if as_json:
        typer.echo(json.dumps(asdict(machine), indent=1, ensure_ascii=False))
    else:
        lines = _lines(machine)
        width = max(len(name) for name, _ in lines) + 2
        for name, value in lines:
            typer.echo(f"{name:<{width}}{value}")


def _lines(machine: Machine) -> list[tuple[str, str]]:
    from phistate.bench.machine import OPTIONAL

    native = machine.native
    memory = "" if machine.memory is None else f", {machine.memory / 2**30:.0f} GiB"
    lines = [
        ("phistate", f"{machine.phistate}, Python {machine.python}"),
        ("machine", f"{machine.processor}, {machine.cores} cores{memory}, {machine.system}"),
        ("torch", f"{machine.torch}, {machine.threads} threads"),
    ]
    if native.missing is None:
        sets = (f"{name}{'' if name in native.available else ' (not on this machine)'}" for name in native.compiled)
        lines += [("kernels", f"{native.in_use} in use"), ("  compiled for", ", ".join(sets))]
    else:
        lines.append(("kernels", f"none: {native.missing}"))
    for name, reasons in machine.backends.items():
        lines.append((f"backend {name}", "; ".join(reasons) or "runs"))
    for name, found in machine.libraries.items():
        lines.append((name, found or f"not installed ({OPTIONAL[name]})"))
    return lines
