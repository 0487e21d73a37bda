"""What a layer knows and transformers does not pass on to the functions it calls: held for one call of the layer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from phistate.compat.packing import Packing


@dataclass
class Call:
    """What the functions find while one call of a layer runs.

    Args:
        states: the recurrent states its scans go on from, in turn: one, or one for each head that scans by itself.
        limits: of Mamba-2's time step.
        pack: how its tokens are packed.
    """

    states: list[Tensor] = field(default_factory=list)
    limits: tuple[float, float] | None = None
    pack: Packing | None = None

    def take_state(self) -> Tensor | None:
        """The state the next scan goes on from."""
        return self.states.pop(0) if self.states else None


class _Innermost:
    """A thread's innermost call that runs now; outside of any, one that knows nothing."""

    def __init__(self) -> None:
        self.call = Call()


class _Thread(threading.local):
    # TorchDynamo writes to a threading.local where no thread looks (torch 2.13: object_setattr_ignore_descriptor), so
    # this one is only read, and what changes is an attribute of an ordinary object.
    def __init__(self) -> None:
        self.innermost = _Innermost()


_THREAD = _Thread()


def current() -> Call:
    """The call that the running function belongs to."""
    return _THREAD.innermost.call


def during(call: Call, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``forward``'s answer; what it runs finds ``call``, and nothing finds it afterwards, however ``forward`` ends.

    >>> during(Call(limits=(0.0, 1.0)), lambda: current().limits), current().limits
    ((0.0, 1.0), None)
    """
    innermost = _THREAD.innermost
    before = innermost.call
    # Set inside the block: an interrupt may come between any two statements.
    try:
        innermost.call = call
        return forward(*args, **kwargs)
    finally:
        innermost.call = before
