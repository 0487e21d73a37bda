"""How a case is measured: ours and the peer by turns in one run, their errors, and the share of the machine's limit.

A turn is one ``torch.utils.benchmark`` measurement of each, A B A B …; the ratio is taken turn by turn, so that what
slows the machine for a while slows both. Its median and quartiles are reported, with the median times.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch.utils.benchmark import Timer

from phistate.bench import memory
from phistate.bench.cases import Against, Case
from phistate.bench.limits import Limits, quartiles
from phistate.bench.peers import PEERS, ours
from phistate.bench.ready import Missing, Ready, ready
from phistate.bench.work import Inputs, Outputs, runs_on

ERROR_TOKENS = 512
"""Errors are of the first tokens: the recurrence in float64, token by token, is slow."""

_GROWTH = (1024, 4096, 16384, 65536, 262144)
_TURN = 0.01
"""Seconds one measurement of a fast call lasts at least."""
_LONG = 1.0
"""A turn of so many seconds is repeated three times only, one ten times as long not at all."""


@dataclass(frozen=True)
class Row:
    """One case beside one peer with one number of threads.

    Args:
        missing: why nothing was measured; None: it was.
        ours, peer_time: median seconds a call.
        ratio: lower quartile, median, upper quartile of ours / the peer's, turn by turn. ``growth``: the worst time
            per token over that of 1024 tokens; ``memory``: what is held over what the bar allows.
        error, peer_error: ‖x − exact‖ / ‖x‖ in the worst output, against float64, over ``error_tokens`` tokens.
        rate, needed_rate: operations a second, by the chunked algorithm's count and by the recurrence's.
        share, limit: part of the limit reached, and which limit binds.
        peak_share: part of the multiply-add peak reached.
        at_most, met: the bar on the median ratio, and whether it is met.
        share_at_least, share_met: the same on ``peak_share``.
        backend: which of ours ran.
        note: what a reader has to know beside.
    """

    case: str
    peer: str
    threads: int
    dtype: str
    missing: str | None = None
    ours: float | None = None
    peer_time: float | None = None
    turns: int = 0
    ratio: tuple[float, float, float] | None = None
    error: float | None = None
    peer_error: float | None = None
    error_tokens: int | None = None
    rate: float | None = None
    needed_rate: float | None = None
    share: float | None = None
    limit: str | None = None
    peak_share: float | None = None
    at_most: float | None = None
    met: bool | None = None
    share_at_least: float | None = None
    share_met: bool | None = None
    backend: str | None = None
    note: str = ""


def run(case: Case, threads: int, limits: Limits, *, seconds: float = 1.0) -> Iterator[Row]:
    """Measures ``case`` beside each of its peers; a row each, as it is done.

    Args:
        case: what to measure.
        threads: torch's, and each peer's.
        limits: of as many threads.
        seconds: how long a row is measured at least, once both are prepared.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        if case.measure == "time":
            yield from _timed(case, threads, limits, seconds)
        else:
            measure = _growth if case.measure == "growth" else _memory
            yield measure(case, threads, limits, seconds)
    finally:
        torch.set_num_threads(before)


def _timed(case: Case, threads: int, limits: Limits, seconds: float) -> Iterator[Row]:
    empty = _row(case, case.against[0], threads)
    if threads < case.least_threads:
        yield replace(empty, missing=f"says nothing with fewer than {case.least_threads} threads")
        return
    inputs = case.work.inputs(case.dtype)
    try:
        backend = _backend(case)
        own = ours(case, inputs, threads)
        own.run()
    except ImportError as absent:
        yield replace(empty, missing=f"phistate has no {absent.name} here")
        return
    except Exception as failure:  # a case of ours that fails must be seen, and must not cost the others their run
        yield replace(empty, missing=_failed("ours", failure))
        return
    short = replace(case, work=case.work.shorter(ERROR_TOKENS))
    short_inputs = short.work.inputs(case.dtype)
    exact = _exact(short, short_inputs)
    error = _error(ours(short, short_inputs, threads), exact)
    for against in case.against:
        row = replace(_row(case, against, threads), backend=backend, error=error, error_tokens=short.work.T)
        try:
            theirs = PEERS[against.peer](case, inputs, threads)
            peer_error = _error(PEERS[against.peer](short, short_inputs, threads), exact)
        except Missing as missing:
            yield replace(row, missing=str(missing))
            continue
        except Exception as failure:  # another library's, which may raise anything: a row, not the end of the run
            yield replace(row, missing=_failed(against.peer, failure))
            continue
        own_times, their_times = _by_turns(own, theirs, threads, seconds)
        low, middle, high = quartiles([a / b for a, b in zip(own_times, their_times, strict=True)])
        row = _with_rates(row, case, quartiles(own_times)[1], limits)
        yield replace(
            row,
            peer_time=quartiles(their_times)[1],
            turns=len(own_times),
            ratio=(low, middle, high),
            peer_error=peer_error,
            met=None if against.at_most is None else middle <= against.at_most,
            note=theirs.note,
        )


def _backend(case: Case) -> str:
    few = case.work.shorter(64)
    return runs_on(few, few.inputs(case.dtype))


def _failed(who: str, failure: Exception) -> str:
    return f"{who} failed: {type(failure).__name__}: {' '.join(str(failure).split())[:200]}"


def _row(case: Case, against: Against, threads: int) -> Row:
    name = str(case.dtype).removeprefix("torch.")
    return Row(case.name, against.peer, threads, name, at_most=against.at_most)


def _by_turns(a: Ready, b: Ready, threads: int, seconds: float) -> tuple[list[float], list[float]]:
    times: tuple[list[float], list[float]] = ([], [])
    start = time.perf_counter()
    least = 5
    while len(times[0]) < least or (time.perf_counter() - start < seconds and len(times[0]) < 100):
        for call, found in zip((a, b), times, strict=True):
            found.append(_seconds(call, threads))
        turn = times[0][0] + times[1][0]
        if turn > _LONG:  # the spread of a few has to do
            least = 1 if turn > 10 * _LONG else 3
    return times


def _seconds(call: Ready, threads: int) -> float:
    """Seconds a call: of one where it lasts, of as many as fill a turn where it is short."""
    torch.set_num_threads(call.threads or threads)
    start = time.perf_counter()
    call.run()
    single = time.perf_counter() - start
    if single < _LONG / 10:
        timer = Timer("call()", globals={"call": call.run}, num_threads=call.threads or threads)
        single = timer.blocked_autorange(min_run_time=_TURN).median
    torch.set_num_threads(threads)
    return single


def _with_rates(row: Row, case: Case, seconds: float, limits: Limits) -> Row:
    cost = case.work.cost()
    passes = 1.0 + (case.work.backward if case.run == "both" else 0.0)
    # Training reads the inputs twice and the output's gradient, and writes the inputs' gradients.
    moved = cost.bytes(case.dtype) * (3 if case.run == "both" else 1)
    peak, source = limits.peak(case.dtype)
    computing, moving = passes * cost.performed / peak, moved / limits.copy(int(moved))
    binding = max(computing, moving)
    peak_share = computing / seconds
    return replace(
        row,
        ours=seconds,
        rate=passes * cost.performed / seconds,
        needed_rate=passes * cost.needed / seconds,
        share=binding / seconds,
        limit=source if computing >= moving else "copy",
        peak_share=peak_share,
        share_at_least=case.share,
        share_met=None if case.share is None else peak_share >= case.share,
    )


def _exact(case: Case, inputs: Inputs) -> Outputs:
    wide = {name: tensor.double() for name, tensor in inputs.items()}
    call = ready(case.work.exact, wide, case.run)
    assert call.read is not None
    return call.read()


def _error(call: Ready, exact: Outputs) -> float | None:
    if call.read is None:
        return None
    pairs = zip(call.read(), exact, strict=True)
    return max(float((x.double() - y).norm() / y.norm()) for x, y in pairs)


def _growth(case: Case, threads: int, limits: Limits, seconds: float) -> Row:
    """Time per token by length, the lengths by turns; the worst of them over that of the shortest."""
    against = case.against[0]
    lengths = [T for T in _GROWTH if T <= case.work.T]
    calls = []
    for T in lengths:
        work = replace(case, work=case.work.shorter(T))
        calls.append(ours(work, work.work.inputs(case.dtype), threads))
    times: list[list[float]] = [[] for _ in lengths]
    for _ in range(5):
        for T, call, found in zip(lengths, calls, times, strict=True):
            found.append(_seconds(call, threads) / T)
    ratios = [quartiles([a / b for a, b in zip(found, times[0], strict=True)]) for found in times]
    worst = max(ratios, key=lambda ratio: ratio[1])
    each = ", ".join(f"{T}: {1e9 * quartiles(found)[1]:.0f}" for T, found in zip(lengths, times, strict=True))
    row = _with_rates(_row(case, against, threads), case, quartiles(times[-1])[1] * lengths[-1], limits)
    return replace(
        row,
        peer_time=quartiles(times[0])[1] * lengths[-1],
        turns=len(times[0]),
        ratio=worst,
        met=None if against.at_most is None else worst[1] <= against.at_most,
        backend=_backend(case),
        note=f"ns a token at {each}",
    )


def _memory(case: Case, threads: int, limits: Limits, seconds: float) -> Row:
    against = case.against[0]
    row = _row(case, against, threads)
    try:
        held = memory.measure(case, threads)
    except Missing as missing:
        return replace(row, missing=str(missing))
    beside = held - memory.results(case)
    part = max(beside, 0) / memory.allowed(case)
    return replace(
        row,
        ratio=(part, part, part),
        met=None if against.at_most is None else part <= against.at_most,
        backend=_backend(case),
        note=f"{held / 2**20:.0f} MiB held at the peak, {beside / 2**20:.1f} beside the results",
    )
