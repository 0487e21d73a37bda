"""A package whose names phistate offers: what it holds, how an installed one is tried, what was checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from phistate.compat.report import Report
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
