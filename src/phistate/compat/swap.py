"""One attribute replaced by another, for as long as any report needs it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

_ABSENT = object()

WANTED: dict[int, int] = {}
"""By the number of a replacement: how many attributes it stands in, if any.

Modules and layers made meanwhile hold it too, and nobody knows of them: it looks here whether it is still wanted.
"""


@dataclass
class _Hold:
    """What an attribute was and is, and how many reports share that."""

    before: Any
    new: Any
    count: int = 0


# Weak, so that a model that is never undone is still freed.
_HELD: WeakKeyDictionary[Any, dict[str, _Hold]] = WeakKeyDictionary()
_LOCK = threading.Lock()


def original_of(function: Any) -> Any:
    """What ``function`` replaced, if an earlier accelerate() put it there; else itself."""
    return getattr(function, "_phistate_replaces", function)


def _count(function: Any, by: int) -> None:
    """One attribute more or less that a replacement stands in; anything else is not counted."""
    number = getattr(function, "_phistate_number", None)
    if number is not None:
        WANTED[number] = WANTED.get(number, 0) + by
        if not WANTED[number]:
            del WANTED[number]


def swapped() -> list[tuple[Any, str, Any]]:
    """Every function that is replaced now: its owner, its name and what stands there."""
    held = [(owner, name, hold.new) for owner, holds in _HELD.items() for name, hold in holds.items()]
    return [(owner, name, new) for owner, name, new in held if original_of(new) is not new]


def swap(owner: ModuleType | type | nn.Module, name: str, new: Any) -> Callable[[], None]:
    """Set an attribute and give back what undoes it, which waits until every report that shares it has been undone."""
    with _LOCK:
        holds = _HELD.setdefault(owner, {})
        hold = holds.setdefault(name, _Hold(vars(owner).get(name, _ABSENT), new))
        hold.count += 1
        _count(hold.new, +1)
        setattr(owner, name, hold.new)

    def undo() -> None:
        with _LOCK:
            _count(hold.new, -1)
            hold.count -= 1
            if hold.count:
                return
            del holds[name]
            # Whoever replaced it again after us keeps what they put there.
            if vars(owner).get(name) is not hold.new:
                return
            # A replacement that another report still wants was here before us; one that nobody wants goes.
            wanted = getattr(hold.before, "_phistate_number", None) in WANTED
            before = hold.before if wanted else original_of(hold.before)
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

    return undo
