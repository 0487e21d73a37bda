"""An installed package whose functions cannot take CPU tensors: these go to phistate, all others where they went."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

from phistate.compat.functions import Function, Hook, replacement, signature_of
from phistate.compat.package import Package
from phistate.compat.report import Entry, Report, summary
from phistate.compat.swap import original_of, swap


def patch(report: Report, package: Package) -> None:
    """Replace each function of ``package``'s table in every module that holds it; the report says which, and undoes."""
    done: dict[int, Function] = {}
    for path, names in package.table.items():
        functions = {name: new for name, new in names.items() if isinstance(new, FunctionType)}
        if not functions:
            continue
        try:
            module = importlib.import_module(path)
        except Exception as error:  # whatever a package does when it is imported
            report.left.append(Entry(path, "-", f"cannot be imported: {type(error).__name__}: {error}"))
            continue
        for name, new in functions.items():
            original = original_of(getattr(module, name, None))
            if id(original) not in done:
                why = _against(original, new)
                if why is not None:
                    report.left.append(Entry(path, name, why))
                    continue
                hook = Hook(signature_of(new), summary(new), _always(new))
                done[id(original)] = replace(report, original, hook)


def replace(report: Report, original: Function, hook: Hook) -> Function:
    """Put ``hook``'s function in the place of ``original`` in every loaded module that holds it."""
    new: Function | None = None
    holders = list(_holders(original))
    for _, _, found in holders:
        if found is not original:
            new = found  # an earlier install put it there
    new = replacement(original, hook) if new is None else new
    for module, name, _ in holders:
        report._undo.append(swap(module, name, new))
        report.replaced.append(Entry(module.__name__, name, hook.what))
    return new


def _against(original: Any, new: Function) -> str | None:
    """Why ``new`` cannot stand in for what was found; None: it can."""
    if original is None:
        return "is not in the installed version"
    if not callable(original):
        return f"is no function but {type(original).__name__}"
    found, known = signature_of(original), signature_of(new)
    return None if found == known else f"takes ({found}); phistate knows ({known})"


def _holders(original: Function) -> Iterator[tuple[ModuleType, str, Any]]:
    """Where a function is bound, from-imports included: the module, the name and what stands there."""
    for path, module in list(sys.modules.items()):
        # By type(), since isinstance asks what it is given, and modules hold objects that warn or load when asked.
        if not issubclass(type(module), ModuleType) or path.partition(".")[0] == "phistate":
            continue
        for name, value in list(vars(module).items()):
            if value is original or (type(value) is FunctionType and original_of(value) is original):
                yield module, name, value


def _always(function: Function) -> Callable[[Function], Function]:
    return lambda original: function
