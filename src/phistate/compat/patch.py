"""An installed package whose functions cannot take CPU tensors: these go to phistate, all others where they went."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Container, Iterator
from types import FunctionType, ModuleType
from typing import Any

from phistate.compat.functions import Function, hook_of, replacement, signature_of
from phistate.compat.package import Package
from phistate.compat.report import Entry, Report, summary
from phistate.compat.swap import original_of, swap


def patch(report: Report, package: Package) -> None:
    """Replace each function of ``package``'s table in every module that holds it; the report says which, and undoes."""
    known: dict[int, tuple[Function, str]] = {}
    for path, names in package.table.items():
        functions = {name: new for name, new in names.items() if isinstance(new, FunctionType)}
        if not functions:
            continue
        try:
            module = importlib.import_module(path)
        except Exception as error:  # whatever a package does when it is imported
            report.left.append(Entry(path, "-", f"cannot be imported: {type(error).__name__}: {error}"))
            continue
        for name, adapter in functions.items():
            present: Any = getattr(module, name, None)
            original: Any = original_of(present)
            if id(original) in known:
                continue
            why = _against(original, adapter)
            if why is not None:
                report.left.append(Entry(path, name, why))
                continue
            hook = hook_of(adapter, summary(adapter))
            new = replacement(original, hook) if present is original else present
            known[id(original)] = (new, hook.what)
    for module, name, held in list(holders(known)):
        new, what = known[held]
        report._undo.append(swap(module, name, new))
        report.replaced.append(Entry(module.__name__, name, what))


def holders(known: Container[int]) -> Iterator[tuple[ModuleType, str, int]]:
    """Where a loaded module holds one of the objects whose ids are ``known``: the module, the name and the id.

    From-imports are found, and so is what an earlier report put in an object's place.
    """
    for module in dict.fromkeys(sys.modules.values()):  # one may stand there under several names
        if isinstance(module, ModuleType) and module.__name__.partition(".")[0] != "phistate":
            for name, value in list(vars(module).items()):
                # Only of a function: others may do anything when they are asked for an attribute.
                held = id(original_of(value) if type(value) is FunctionType else value)
                if held in known:
                    yield module, name, held


def _against(original: Any, new: Function) -> str | None:
    """Why ``new`` cannot stand in for what was found; None: it can."""
    if original is None:
        return "is not in the installed version"
    if not callable(original):
        return f"is no function but {type(original).__name__}"
    found, known = signature_of(original), signature_of(new)
    return None if found == known else f"takes ({found}); phistate knows ({known})"
