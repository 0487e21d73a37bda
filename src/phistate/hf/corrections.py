"""Where transformers drops an argument on the way, a hook on the layer hands it over."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from phistate.hf.handover import HANDOVER
from phistate.hf.packing import packing
from phistate.hf.report import Entry
from phistate.hf.swap import swap

_SELECTIVE = ("MambaMixer", "FalconMambaMixer", "JambaMambaMixer", "ZambaMambaMixer")
_SSD = (
    "Mamba2Mixer",
    "BambaMixer",
    "FalconH1Mixer",
    "GraniteMoeHybridMambaLayer",
    "NemotronHMamba2Mixer",
    "Zamba2MambaMixer",
)
_FORWARD = ["self", "hidden_states", "cache", "attention_mask"]


def hook_layers(model: nn.Module, correct: bool) -> Iterator[tuple[Entry | None, Callable[[], None]]]:
    """Hook every layer that needs it; for each what was corrected, if anything, and what undoes it."""
    for layer in model.modules():
        names = {cls.__name__: cls for cls in type(layer).__mro__}
        if correct and "MiniMaxLightningAttention" in names:
            yield from _reorder(names["MiniMaxLightningAttention"])
        if names.keys().isdisjoint((*_SELECTIVE, *_SSD)) or _parameters(layer)[:4] != _FORWARD:
            continue
        where, entry = type(layer).__name__, None
        before: Callable[..., None] = _hand_over_packing
        if not names.keys().isdisjoint(_SELECTIVE):
            if correct:
                before = _hand_over_state
                entry = Entry(where, "recurrent state", "several tokens after a cache go on from its state")
        elif correct and (limit := _limit(layer)) != _NO_LIMIT:
            before = _hand_over_limits
            entry = Entry(where, "time_step_limit", f"{limit} holds in the decode step too")
        else:
            continue
        # A layer that is accelerated twice is hooked twice, which does no harm.
        handles = (
            layer.register_forward_pre_hook(before, with_kwargs=True),
            layer.register_forward_hook(_forget, always_call=True),
        )
        yield entry, lambda handles=handles: [handle.remove() for handle in handles]  # type: ignore[misc]


def _reorder(layer: type) -> Iterator[tuple[Entry, Callable[[], None]]]:
    """MiniMax's cache leaves its linear states where they were when beams change places."""
    cache = getattr(sys.modules[layer.__module__], "MiniMaxCache", None)
    if cache is None or vars(cache).get("reorder_cache", _reorder_linear) is not _reorder_linear:
        return
    entry = Entry("MiniMaxCache", "reorder_cache", "linear states follow their beams")
    yield entry, swap(cache, "reorder_cache", _reorder_linear)


def _reorder_linear(self: Any, beam_idx: Tensor) -> None:
    for layer in self.layers:
        layer.reorder_cache(beam_idx)
    for index, state in enumerate(self.linear_cache):
        # A layer without a linear state has an empty list there.
        if isinstance(state, Tensor):
            self.linear_cache[index] = state.index_select(0, beam_idx)


_NO_LIMIT = (0.0, float("inf"))


def _limit(layer: Any) -> tuple[float, float]:
    return tuple(layer.time_step_limit or _NO_LIMIT)


def _parameters(layer: nn.Module) -> list[str]:
    return list(inspect.signature(type(layer).forward).parameters)


def _hand_over_packing(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The layer gives the convolution its packed sequences, and the scan after it nothing."""
    hidden = args[0] if args else kwargs["hidden_states"]
    if hidden.shape[1] > 1 and ("seq_idx" in kwargs or "cu_seq_lens_q" in kwargs):
        offsets, numbers = kwargs.get("cu_seq_lens_q"), kwargs.get("seq_idx")
        HANDOVER.pack = packing(hidden, None, offsets, numbers)


def _hand_over_state(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    hidden = args[0] if args else kwargs["hidden_states"]
    if hidden.shape[1] == 1:
        return
    _hand_over_packing(layer, args, kwargs)
    # "cache_params" is what callers before transformers 5.40 may still say.
    cache = args[1] if len(args) > 1 else kwargs.get("cache", kwargs.get("cache_params"))
    if cache is None:
        return
    state = cache.get_recurrent_state(layer.layer_idx)
    if state is not None:
        HANDOVER.states = list(state.unbind(1)) if state.ndim == 4 else [state]


def _hand_over_limits(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    HANDOVER.limits = _limit(layer)


def _forget(layer: Any, args: tuple[Any, ...], output: Any) -> None:
    HANDOVER.states, HANDOVER.limits, HANDOVER.pack = [], None, None
