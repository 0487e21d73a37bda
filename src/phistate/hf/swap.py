"""One attribute replaced by another, for as long as any accelerated model needs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import nn

_ABSENT = object()


@dataclass
class _Hold:
    """What an attribute was and is, and how many accelerated models share that."""

    owner: Any
    name: str
    original: Any
    new: Any
    count: int = 0


_HELD: dict[tuple[int, str], _Hold] = {}


def original_of(function: Any) -> Any:
    """What ``function`` replaced, if an earlier accelerate() put it there; else itself."""
    return getattr(function, "_phistate_replaces", function)


def swapped() -> list[tuple[Any, str, Any]]:
    """Every function that is replaced now: its owner, its name and what stands there."""
    return [(hold.owner, hold.name, hold.new) for hold in _HELD.values() if original_of(hold.new) is not hold.new]


def swap(owner: ModuleType | type | nn.Module, name: str, new: Any) -> Callable[[], None]:
    """Set an attribute and give back what undoes it, which waits until every model that shares it has been undone."""
    key = (id(owner), name)
    hold = _HELD.setdefault(key, _Hold(owner, name, original_of(vars(owner).get(name, _ABSENT)), new))
    hold.count += 1
    setattr(owner, name, hold.new)

    def undo() -> None:
        hold.count -= 1
        if hold.count:
            return
        del _HELD[key]
        # Whoever replaced it again after us keeps what they put there.
        if vars(owner).get(name) is hold.new:
            if hold.original is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, hold.original)

    return undo
