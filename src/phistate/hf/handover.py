"""What a layer knows and transformers does not pass on to the function: a hook sets it, the function reads it."""

from __future__ import annotations

import threading

from torch import Tensor

from phistate.hf.packing import Packing


class _Handover(threading.local):
    """One layer's call at a time, per thread."""

    states: list[Tensor] = []  # noqa: RUF012 - replaced, never changed in place
    limits: tuple[float, float] | None = None
    pack: Packing | None = None


HANDOVER = _Handover()


def take_state() -> Tensor | None:
    """The recurrent state the next scan goes on from; a layer that scans head by head has left one for each."""
    states = HANDOVER.states
    if not states:
        return None
    HANDOVER.states = states[1:]
    return states[0]
