"""Where transformers drops an argument on the way, a layer's forward hands it over to the functions it calls."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from phistate.compat.packing import packing
from phistate.compat.report import Entry
from phistate.compat.swap import swap
from phistate.hf.handover import Call, during

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
# Set on a layer whose answers are to be corrected: its class's forward serves layers that are not, too.
_CORRECT = "_phistate_correct"

_Undo = Callable[[], None]
_Known = Callable[[Any, Tensor, tuple[Any, ...], dict[str, Any]], Call]


def hand_over(model: nn.Module, correct: bool) -> Iterator[tuple[Entry | None, _Undo]]:
    """Let layers hand over what their functions are not told; what each corrects by it, if anything, and its undo."""
    for layer in model.modules():
        names = {cls.__name__: cls for cls in type(layer).__mro__}
        if correct and "MiniMaxLightningAttention" in names:
            yield from _reorder(names["MiniMaxLightningAttention"])
        owner = _owner(layer)
        if owner is None:
            continue
        where = type(layer).__name__
        if not names.keys().isdisjoint(_SELECTIVE):
            known: _Known = _known_to_selective
            entry = Entry(where, "recurrent state", "several tokens after a cache go on from its state")
        elif not names.keys().isdisjoint(_SSD) and (limit := _limit(layer)) != _NO_LIMIT:
            known = _known_to_ssd
            entry = Entry(where, "time_step_limit", f"{limit} holds in the decode step too")
        else:
            continue
        yield None, swap(owner, "forward", _handing_over(vars(owner)["forward"], known))
        if "forward" in vars(layer):
            # Someone put it there, perhaps around what stood in the class before us.
            yield None, swap(layer, "forward", functools.partial(_hand_over, known, layer, vars(layer)["forward"]))
        if correct:
            yield entry, swap(layer, _CORRECT, True)


def _owner(layer: nn.Module) -> type | None:
    """The class whose forward runs for ``layer``, if its signature is the one known here."""
    if list(inspect.signature(type(layer).forward).parameters)[:4] != _FORWARD:
        return None
    return next(cls for cls in type(layer).__mro__ if "forward" in vars(cls))


def _handing_over(forward: Callable[..., Any], known: _Known) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        call = known(self, hidden_states, args, kwargs)
        return during(call, forward, self, hidden_states, *args, **kwargs)

    return run


def _hand_over(
    known: _Known, layer: Any, forward: Callable[..., Any], hidden_states: Tensor, *args: Any, **kwargs: Any
) -> Any:
    return during(known(layer, hidden_states, args, kwargs), forward, hidden_states, *args, **kwargs)


def _is_corrected(layer: Any) -> bool:
    # TorchDynamo notices a change of what getattr gives, and none of what vars holds.
    return getattr(layer, _CORRECT, False)


def _known_to_selective(layer: Any, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    if hidden.shape[1] == 1:
        return Call()
    # The layer gives the convolution its packed sequences, and the scan after it nothing.
    call = Call(pack=packing(hidden, None, kwargs.get("cu_seq_lens_q"), kwargs.get("seq_idx")))
    # "cache_params" is what callers before transformers 5.40 may still say.
    cache = args[0] if args else kwargs.get("cache", kwargs.get("cache_params"))
    if cache is not None and _is_corrected(layer):
        state = cache.get_recurrent_state(layer.layer_idx)
        if state is not None:
            call.states = list(state.unbind(1)) if state.ndim == 4 else [state]
    return call


def _known_to_ssd(layer: Any, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    return Call(limits=_limit(layer) if _is_corrected(layer) else None)


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
