"""fla's models on a CPU beside the very operators they run, called directly: nothing else runs them here."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from phistate.bench.families import Size
from phistate.bench.fla_families import fla_model
from phistate.hf import accelerate


@dataclass(frozen=True)
class Own:
    """An fla model, accelerated, in seconds; medians over rounds in which everything takes its turn.

    Args:
        model: name of the family.
        parameters: how many.
        length: tokens of the prompt, batch 1.
        threads: torch's.
        rounds: how often everything was run.
        prefill: a forward of the prompt that keeps a cache.
        direct: the operators of that forward, called one after the other with the tensors they had.
        ops: of these, phistate's own.
        forward: a forward with a loss, in training mode, without a graph.
        backward: the same with a graph, and the backward.
    """

    model: str
    parameters: int
    length: int
    threads: int
    rounds: int
    prefill: float
    direct: float
    ops: float
    forward: float
    backward: float

    @property
    def overhead(self) -> float:
        """Time of the prefill over that of its operators called directly."""
        return self.prefill / self.direct

    @property
    def share(self) -> float:
        """Part of the prefill that phistate's operators take."""
        return self.ops / self.prefill

    @property
    def backward_ratio(self) -> float:
        """Time of forward and backward over that of a forward."""
        return self.backward / self.forward


class _Recorder(TorchDispatchMode):
    """Every operator that runs, with its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def measure(
    name: str,
    size: Size | None = None,
    *,
    length: int = 2048,
    rounds: int = 3,
    progress: Callable[[str], None] = lambda what: None,
) -> Own:
    """Run a random model of one of fla's families and its operators by themselves, in turns, and take medians.

    Args:
        name: of a family.
        size: of its model; None: 8 layers of width 768.
        length: tokens of the prompt.
        rounds: how often each part runs; a first time warms up and does not count.
        progress: told what is being done.

    Raises:
        ValueError: an unknown family.
        ImportError: fla cannot be imported here.
    """
    progress("making the model")
    model = fla_model(name, size)
    ids = torch.randint(3, model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    times: dict[str, list[float]] = {}
    with accelerate(model):
        with torch.no_grad(), _Recorder() as recorder:
            _prefill(model, ids)
        for turn in range(rounds + 1):
            progress(f"round {turn}" if turn else "warming up")
            taken = {"prefill": _timed(_prefill, model, ids)}
            taken["direct"], taken["ops"] = _replay(recorder.calls)
            model.train()
            with torch.no_grad():
                taken["forward"] = _timed(_loss, model, ids)
            taken["backward"] = _timed(lambda: _loss(model, ids).backward())
            model.eval()
            model.zero_grad()
            if turn:
                for part, seconds in taken.items():
                    times.setdefault(part, []).append(seconds)
    return Own(
        model=name,
        parameters=sum(p.numel() for p in model.parameters()),
        length=length,
        threads=torch.get_num_threads(),
        rounds=rounds,
        **{part: statistics.median(seconds) for part, seconds in times.items()},
    )


@torch.no_grad()
def _prefill(model: Any, ids: torch.Tensor) -> None:
    model(ids, use_cache=True, logits_to_keep=1)


def _loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(ids, labels=ids, use_cache=False).loss
    return loss


def _timed(function: Callable[..., Any], *args: Any) -> float:
    begin = time.perf_counter()
    function(*args)
    return time.perf_counter() - begin


@torch.no_grad()
def _replay(calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]]) -> tuple[float, float]:
    """Seconds of all recorded operators, and of phistate's among them."""
    begin, own = time.perf_counter(), 0.0
    for func, args, kwargs in calls:
        if func.namespace == "phistate":
            own += _timed(lambda func=func, args=args, kwargs=kwargs: func(*args, **kwargs))
        else:
            func(*args, **kwargs)
    return time.perf_counter() - begin, own
