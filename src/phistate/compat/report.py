"""What was done to a model or a package: each function replaced or left, and why; and the way back."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

LOCK = threading.RLock()
"""Held while a report is made or undone: what is replaced is one for all threads."""


@dataclass(frozen=True)
class Entry:
    """One thing that was replaced, corrected or left.

    Args:
        where: the module, class or layer that holds it.
        name: its name there.
        what: what stands there now, or why nothing does.
    """

    where: str
    name: str
    what: str


def summary(thing: object) -> str:
    """The first line of what ``thing`` says of itself, for an entry, without markup.

    >>> summary(summary)
    'The first line of what thing says of itself, for an entry, without markup'
    """
    line = (thing.__doc__ or "").strip().partition("\n")[0]
    return re.sub(r":\w+:|`", "", line).rstrip(".")


@dataclass
class Report:
    """What :func:`phistate.hf.accelerate` or :func:`phistate.compat.install` did, and how to take it back.

    Also a context manager that takes it back.

    Args:
        model: class of the model, or the packages.
        kernels: what runs: ``"native"``, or why plain PyTorch stands in.
        replaced: functions, and names of stand-ins, that now run phistate's kernels.
        corrected: classes of layers whose answers are now right where transformers' own are not.
        left: what was found and not touched, with the reason.
    """

    model: str
    kernels: str
    replaced: list[Entry] = field(default_factory=list)
    corrected: list[Entry] = field(default_factory=list)
    left: list[Entry] = field(default_factory=list)
    _undo: list[Callable[[], None]] = field(default_factory=list, repr=False)

    @property
    def active(self) -> bool:
        """Whether there is something :meth:`undo` would take back."""
        return bool(self._undo)

    def undo(self) -> None:
        """Put back what was there before. A second call does nothing.

        What is shared with another report stays replaced until that one is undone too.
        """
        with LOCK:
            while self._undo:
                self._undo.pop()()

    def __enter__(self) -> Report:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def __str__(self) -> str:
        lines = [f"{self.model}: {len(self.replaced)} replaced, {len(self.left)} left"]
        if self.kernels != "native":
            lines.append(f"  not as fast as it could be: {self.kernels}")
        for title, entries in (("replaced", self.replaced), ("corrected", self.corrected), ("left", self.left)):
            width = max((len(entry.name) for entry in entries), default=0)
            before = None
            for entry in entries:
                if entry.where != before:
                    lines.append(f"  {title} in {entry.where}")
                    before = entry.where
                lines.append(f"    {entry.name:{width}}  {entry.what}")
        return "\n".join(lines)
