"""fla's functions replaced in every module that holds them, for tensors on the CPU; the rest stays fla's."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from phistate.compat.fla import generation, mamba, modules, registry
from phistate.compat.fla.ops import OPS
from phistate.compat.functions import Function, Hook, hook_of, replacement, signature_of
from phistate.compat.package import patched
from phistate.compat.patch import holders
from phistate.compat.report import Entry, Report
from phistate.compat.swap import original_of, swap


@dataclass(frozen=True)
class _Found:
    """A function of fla's where it is defined: what stood there first, and what shall."""

    what: str
    original: Any
    new: Any


def patch(report: Report, named: Collection[str] | None = None, correct: bool = True) -> dict[int, Function]:
    """Replace what is known of the installed fla; how to undo it goes to ``report``.

    Args:
        report: told what was replaced and what was left.
        named: modules whose replaced functions the report names one by one, the others being counted; None: each
            function once, where fla defines it.
        correct: also have ``generate`` hand the cache on under the name that fla's models know.

    Returns:
        By the id of a function that was replaced, what stands in its place: a layer may hold one itself.

    Raises:
        ImportError: fla cannot be imported here.
    """
    report._undo.append(patched("fla"))
    if not torch.cuda.is_available():
        for name in ("fla.utils", "fla.utils.hardware"):
            report._undo.append(swap(importlib.import_module(name), "device", "cpu"))
    found: list[_Found] = []
    dispatched: dict[int, str] = {}
    for module, name, hook in _hooks():
        function = _find(report, module, name, hook)
        if function is None:
            continue
        if named is None:
            report.replaced.append(Entry(module, name, hook.what))
        if registry.register(report, module, name, function.original, hook):
            dispatched[id(function.original)] = hook.what
        else:
            found.append(function)
    for owner, name, held in holders(dispatched):
        if named is not None and owner.__name__ in named:
            what = f"{dispatched[held]}, by fla's registry of backends"
            report.replaced.append(Entry(owner.__name__, name, what))
    _everywhere(report, found, named)
    for module, hooks in generation.CORRECTED.items() if correct else ():
        for name, hook in hooks.items():
            if _find(report, module, name, hook) is not None:
                report.corrected.append(Entry(module, name, hook.what))
    for module, names in _supplied():
        _supply(report, module, names, named)
    known = {id(held) for function in found for held in (function.original, function.new)} | dispatched.keys()
    for module in named or ():
        _tell_what_is_left(report, sys.modules[module], known)
    return {id(function.original): function.new for function in found}


def _hooks() -> Iterator[tuple[str, str, Hook]]:
    """Where a function is defined, its name there ("Class.method" for a method), and what replaces it."""
    for what, places in OPS.items():
        for module, adapters in places.items():
            for adapter in adapters:
                yield module, adapter.__name__, hook_of(adapter, what)
    for module, names in modules.MODULES.items():
        for name, adapter in names.items():
            yield module, name, hook_of(adapter, "plain PyTorch")
    for module, hooks in mamba.HOOKS.items():
        for name, hook in hooks.items():
            yield module, name, hook


def _find(report: Report, module: str, name: str, hook: Hook) -> _Found | None:
    try:
        owner: Any = importlib.import_module(module)
        *path, attribute = name.split(".")
        for part in path:
            owner = getattr(owner, part)
        present = vars(owner)[attribute]
    except (ImportError, AttributeError, KeyError):
        report.left.append(Entry(module, name, "is not in this version of fla"))
        return None
    original = original_of(present)
    signature = signature_of(original)
    if signature != hook.signature:
        report.left.append(Entry(module, name, f"takes ({signature}); phistate knows ({hook.signature})"))
        return None
    new = present if present is not original else replacement(original, hook)
    new.__module__, new.__qualname__ = module, name  # a layer that holds it is saved by this name
    if isinstance(owner, type):
        report._undo.append(swap(owner, attribute, new))
    return _Found(hook.what, original, new)


def _everywhere(report: Report, found: list[_Found], named: Collection[str] | None) -> None:
    """Put each function's replacement wherever a loaded module holds it, by itself or in a table such as ACT2FN."""
    known = {id(function.original): function for function in found}
    others = 0
    for module, name, held in list(holders(known)):
        function = known[held]
        report._undo.append(swap(module, name, function.new))
        if named is not None and module.__name__ in named:
            report.replaced.append(Entry(module.__name__, name, function.what))
        else:
            others += 1
    if named is not None and others:
        report.replaced.append(Entry("fla", "…", f"the same and other functions, held in {others} more places"))
    renewed = {}
    for module in [module for path, module in list(sys.modules.items()) if path.partition(".")[0] == "fla"]:
        for table in [value for value in vars(module).values() if type(value) is dict]:
            originals = {key: id(original_of(value)) for key, value in table.items()}
            if any(held in known for held in originals.values()):
                mine = {key: known[held].new for key, held in originals.items() if held in known}
                renewed[id(table)] = table | mine
    for module, name, held in list(holders(renewed)):
        report._undo.append(swap(module, name, renewed[held]))


def _supplied() -> Iterator[tuple[str, Mapping[str, Callable[..., Any]]]]:
    yield from mamba.ABSENT.items()
    yield from modules.ABSENT.items()


def _supply(
    report: Report, module: str, names: Mapping[str, Callable[..., Any]], named: Collection[str] | None
) -> None:
    """Fill in functions of other packages (mamba_ssm, flash_attn) which a module of fla's looked for."""
    try:
        owner = importlib.import_module(module)
    except ImportError:
        report.left.append(Entry(module, "-", "is not in this version of fla"))
        return
    for name, adapter in names.items():
        present = vars(owner).get(name)
        hook = hook_of(adapter, "phistate's own: the package it comes from is for CUDA")
        new = adapter if present is None else replacement(original_of(present), hook)
        report._undo.append(swap(owner, name, new))
        if named is None or module in named:
            report.replaced.append(Entry(module, name, hook.what))


# Layers that run, and what is known of them.
_KNOWN_FAULTS = {
    "fla.layers.mom": Entry(
        "fla.layers.mom", "MomAttention", "runs, but its answers with a cache are not those without: fla's own fault"
    ),
}
# They only say, by an error, which function took their place.
_GIVEN_UP = ("fused_chunk_gla", "fused_chunk_delta_rule")


def _tell_what_is_left(report: Report, module: ModuleType, known: Container[int]) -> None:
    """Kernels that a module of layers calls and phistate has nothing for."""
    if module.__name__ in _KNOWN_FAULTS:
        report.left.append(_KNOWN_FAULTS[module.__name__])
    if not module.__name__.startswith("fla.layers."):
        return
    for name, value in vars(module).items():
        home = str(getattr(value, "__module__", ""))
        kernel = callable(value) and home.startswith("fla.ops.") and not home.startswith("fla.ops.utils")
        if kernel and id(value) not in known and name not in _GIVEN_UP:
            report.left.append(Entry(module.__name__, name, "a kernel for GPUs that phistate has nothing for"))
