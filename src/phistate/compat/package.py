"""A package whose names phistate offers: what it holds, how an installed one is tried, what was checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from phistate.compat.report import LOCK, Report
from phistate.compat.stand_in import Table


@dataclass(frozen=True)
class Package:
    """What :func:`phistate.compat.install` knows of one package.

    Args:
        name: the name it is imported by.
        versions: of it, whose signatures and semantics were checked, oldest first; stand-ins carry the last.
        table: the names people import from it, by module, and what phistate offers for each.
        file: the source the table stands in.
        probe: one tiny call of an installed package with CPU tensors, which raises where it cannot serve them.
        patch: replaces functions of an installed package that cannot; None: every function of the table where it is
            held, by name and signature.
    """

    name: str
    versions: tuple[str, ...]
    table: Table
    file: str
    probe: Callable[[], None]
    patch: Callable[[Report], None] | None = None


# How many reports want the functions that are replaced in an installed package, which passes its probe meanwhile.
_PATCHED: Counter[str] = Counter()


def is_patched(name: str) -> bool:
    """Whether functions of the package are replaced now."""
    return _PATCHED[name] > 0


def patched(name: str) -> Callable[[], None]:
    """Count a report that replaces functions of the package; what counts it out again."""
    _PATCHED[name] += 1

    def undo() -> None:
        with LOCK:
            _PATCHED[name] -= 1

    return undo
