"""Whole models, with and without accelerate(): prefill and decode rates, peak memory, our ops' share of the time."""

from __future__ import annotations

import inspect
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from phistate.bench.families import FAMILIES, Size, family_config, random_model
from phistate.compat.swap import swap, swapped
from phistate.hf import accelerate
from phistate.hf.hooks import HOOKS


@dataclass(frozen=True)
class Side:
    """One model run one way; medians over the rounds.

    Args:
        prefill: seconds for all tokens of the prompt.
        decode: seconds for one generated token.
        peak: bytes by which a prefill raises the process's memory at its highest, measured in a process of its own;
            None where the system does not tell.
    """

    prefill: float
    decode: float
    peak: int | None


@dataclass(frozen=True)
class Comparison:
    """A model with and without accelerate(), run in turns in one process.

    Args:
        model: name of the family, or of the checkpoint whose config was used.
        parameters: how many.
        length: tokens of the prompt, batch 1.
        new_tokens: tokens generated after it.
        threads: torch's.
        rounds: how often each side was run.
        share: part of the accelerated prefill that is spent in the replaced functions; None where a forward
            was replaced.
        difference: largest difference of the two sides' last logits, over the largest logit.
        replaced: what accelerate() replaced.
    """

    model: str
    parameters: int
    length: int
    new_tokens: int
    threads: int
    rounds: int
    plain: Side
    fast: Side
    share: float | None
    difference: float
    replaced: list[str]

    @property
    def prefill_ratio(self) -> float:
        """How many times faster the prefill is."""
        return self.plain.prefill / self.fast.prefill

    @property
    def decode_ratio(self) -> float:
        """How many times faster a generated token is."""
        return self.plain.decode / self.fast.decode


def load_config(name: str, size: Size) -> Any:
    """The config of a family at ``size``, or the one in a directory or JSON file, which has a size of its own.

    Raises:
        ValueError: neither a family nor a config that can be read.
    """
    from transformers import AutoConfig

    if name in FAMILIES or not Path(name).exists():
        return family_config(name, size)
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"name: got {name!r}, which holds no config that transformers reads ({error})") from None


@torch.no_grad()
def compare(
    name: str,
    size: Size | None = None,
    *,
    length: int = 2048,
    new_tokens: int = 32,
    rounds: int = 3,
    memory: bool = True,
    progress: Callable[[str], None] = lambda what: None,
) -> Comparison:
    """Run a random model of a family both ways, in turns, and take medians.

    Args:
        name: of a family, or a path to a config.
        size: of a family's model; None: the usual one, about 100 M parameters.
        length: tokens of the prompt.
        new_tokens: how many to generate after it.
        rounds: how often each side runs; the first of its runs warms up and does not count.
        memory: also measure the peak, each side in a process of its own.
        progress: told what is being done.
    """
    config = load_config(name, Size() if size is None else size)
    progress("making the model")
    model = random_model(config)
    vocab = config.get_text_config().vocab_size
    ids = torch.randint(3, vocab, (1, length), generator=torch.Generator().manual_seed(0))
    times: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    last: dict[bool, torch.Tensor] = {}
    for turn in range(rounds + 1):
        for fast in (False, True):
            progress(f"{'with' if fast else 'without'} accelerate, {f'round {turn}' if turn else 'warming up'}")
            with _accelerated(model, fast):
                prefill, decode, last[fast] = _run(model, ids, new_tokens)
            if turn:
                times[fast].append((prefill, decode))
    progress("our ops' share")
    with accelerate(model) as report:
        replaced = [entry.name for entry in report.replaced]
        share = _share(model, ids)
    sides = {}
    for fast in (False, True):
        progress(f"peak memory {'with' if fast else 'without'}")
        peak = _peak(name, size, length, fast) if memory else None
        prefills, decodes = zip(*times[fast], strict=True)
        sides[fast] = Side(statistics.median(prefills), statistics.median(decodes), peak)
    return Comparison(
        model=name,
        parameters=sum(p.numel() for p in model.parameters()),
        length=length,
        new_tokens=new_tokens,
        threads=torch.get_num_threads(),
        rounds=rounds,
        plain=sides[False],
        fast=sides[True],
        share=share,
        difference=float((last[True] - last[False]).abs().max() / last[False].abs().max()),
        replaced=replaced,
    )


@contextmanager
def _accelerated(model: Any, fast: bool) -> Iterator[None]:
    if fast:
        with accelerate(model):
            yield
        return
    undo = _own_functions(model) if any(find_spec(name) for name in ("fla", "mamba_ssm")) else []
    try:
        yield
    finally:
        for back in undo:
            back()


def _own_functions(model: Any) -> list[Callable[[], None]]:
    """Give transformers its own functions where it took those of a package for CUDA; what gives them back."""
    homes = {sys.modules[cls.__module__] for layer in model.modules() for cls in type(layer).__mro__}
    found = [(home, name, vars(home)[name]) for home in homes for name in HOOKS if name in vars(home)]
    return [swap(home, name, inspect.unwrap(held)) for home, name, held in found if inspect.unwrap(held) is not held]


def _run(model: Any, ids: torch.Tensor, new_tokens: int) -> tuple[float, float, torch.Tensor]:
    """Seconds of the prefill and of one generated token, and the last logits of the prefill."""
    length = ids.shape[1]
    begin = time.perf_counter()
    out = model(ids, use_cache=True, logits_to_keep=1) if _keeps_logits(model) else model(ids, use_cache=True)
    prefill = time.perf_counter() - begin
    logits = first = out.logits[:, -1]
    begin = time.perf_counter()
    # RecurrentGemma keeps its state in the layers and gives no cache.
    cache = out.get("cache")
    for step in range(new_tokens):
        token = logits.argmax(-1, keepdim=True)
        positions = torch.full((1, 1), length + step)
        given = {} if cache is None else {"cache": cache}
        logits = model(token, use_cache=True, position_ids=positions, **given).logits[:, -1]
    return prefill, (time.perf_counter() - begin) / max(new_tokens, 1), first


def _keeps_logits(model: Any) -> bool:
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def _share(model: Any, ids: torch.Tensor) -> float | None:
    """Part of a prefill's time in which a replaced function runs; None where a forward was replaced (MiniMax)."""
    places = swapped()
    if any(name == "forward" for _, name, _ in places):
        return None
    spent = 0.0

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal spent
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent += time.perf_counter() - begin

        return run

    for owner, name, function in places:
        setattr(owner, name, timed(function))
    try:
        shares = []
        for _ in range(3):
            spent = 0.0
            prefill, _, _ = _run(model, ids, 0)
            shares.append(spent / prefill)
    finally:
        for owner, name, function in places:
            setattr(owner, name, function)
    return statistics.median(shares)


def _peak(name: str, size: Size | None, length: int, fast: bool) -> int | None:
    """Bytes of memory a prefill needs at its highest, in a fresh process, over what the model itself takes."""
    code = (
        "from phistate.bench.model import peak_here; from phistate.bench.families import Size; "
        f"print(peak_here({name!r}, {size!r}, {length}, {fast}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    lines = done.stdout.split()
    return int(lines[-1]) if done.returncode == 0 and lines and lines[-1].isdigit() else None


@torch.no_grad()
def peak_here(name: str, size: Size | None, length: int, fast: bool) -> int | None:
    """What :func:`compare` runs in a process of its own; None where the system does not tell a high-water mark."""
    model = random_model(load_config(name, Size() if size is None else size))
    with _accelerated(model, fast):
        _run(model, torch.full((1, 16), 3), 1)
        before = _status("VmRSS")
        _reset_high_water()
        _run(model, torch.full((1, length), 3), 0)
        after = _status("VmHWM")
    return None if before is None or after is None else max(0, after - before)


def _status(field: str) -> int | None:
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    for line in status.read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return None


def _reset_high_water() -> None:
    # Linux: 5 sets the high-water mark back to the present size.
    mark = Path("/proc/self/clear_refs")
    if mark.exists():
        mark.write_text("5")
