"""The registry: what is measured, beside whom, and the bar it is to reach."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch

from phistate.bench.work import Conv, Linear, Mamba2, Scan, Work

Run = Literal["forward", "both"]
"""``both``: forward and backward."""

Measure = Literal["time", "growth", "memory"]
"""``growth``: time per token from 1024 tokens on, by length; ``memory``: what is held beside the inputs."""


@dataclass(frozen=True)
class Against:
    """A peer, and the bar: at most this share of its time (None: none is set)."""

    peer: str
    at_most: float | None = None


@dataclass(frozen=True)
class Case:
    """One line of the registry.

    Args:
        name: unique; its group comes first.
        work: what is computed.
        run: how much of it.
        measure: what is measured of it.
        against: peers, each with its bar. For ``growth`` and ``memory``: what the figure is compared with.
        share: at least this share of the FMA peak; None: no bar.
        least_threads: the case says nothing with fewer.
    """

    name: str
    work: Work
    against: tuple[Against, ...]
    dtype: torch.dtype = torch.float32
    run: Run = "forward"
    measure: Measure = "time"
    share: float | None = None
    least_threads: int = 1


_F32, _BF16 = torch.float32, torch.bfloat16
# Linear(T, key heads, value heads, K, V)
_LENGTHS = (256, 1024, 4096, 16384)


def _types(
    name: str, work: Work, f32: tuple[Against, ...], bf16: tuple[Against, ...], *, share: float | None = None
) -> Iterator[Case]:
    """The same work in float32 and in bfloat16; the peers that have float32 only are run in it for both."""
    yield Case(f"{name}-f32", work, f32, share=share)
    yield Case(f"{name}-bf16", work, bf16, _BF16)


def _steps(name: str, step: Linear, against: tuple[Against, ...]) -> Iterator[Case]:
    """One token by the public op, which gives a new state, and by the step that a decoding model calls."""
    yield Case(name, step, tuple(Against(a.peer) for a in against))
    yield Case(f"{name}-in-place", replace(step, in_place=True), against)


def _additive() -> Iterator[Case]:
    torch_only = Against("torch")
    yield from _types(
        "additive-no-decay",
        Linear(1024, 32, 32, 128, 128),
        (Against("onnxruntime", 0.60), torch_only),
        (Against("onnxruntime", 0.40), torch_only),
        share=0.70,
    )
    yield from _types(
        "additive-scalar-decay",
        Linear(1024, 32, 32, 128, 64, decay="scalar"),
        (Against("onnxruntime", 0.70), torch_only),
        (Against("onnxruntime", 0.50), torch_only),
    )
    yield from _types(
        "additive-vector-decay",
        Linear(1024, 32, 32, 128, 128, decay="vector"),
        (Against("onnxruntime", 0.65), torch_only),
        (Against("onnxruntime", 0.50), torch_only),
    )
    for T in _LENGTHS:
        work = Linear(T, 8, 8, 64, 64, normalize=True, phi="elu")
        longest = max(_LENGTHS) == T
        peers = (Against("sdpa", 1 / 60 if longest else 1.0), Against("torch", 1 / 5 if longest else None))
        yield Case(f"additive-linear-{T}", work, peers)
    for decay in ("none", "head", "scalar", "vector"):
        work = Linear(4096, 8, 8, 64, 64, decay=decay)
        yield Case(f"additive-train-{decay}", work, (Against("torch", 1 / 4), Against("our forward", 4.0)), run="both")
    for name, decay in (("", "none"), ("-scalar", "scalar")):
        step = Linear(1, 32, 32, 128, 128, decay=decay, state=True)
        yield from _steps(f"additive-step{name}", step, (Against("onnxruntime", 1.0), torch_only))
    yield Case(
        "additive-not-causal",
        Linear(1024, 32, 32, 128, 128, causal=False),
        (Against("two matmuls"), torch_only),
    )
    long = Linear(65536, 8, 8, 64, 64)
    yield Case("additive-memory-forward", long, (Against("results + 8 MiB", 1.0),), measure="memory")
    yield Case("additive-memory-train", long, (Against("results + 3 q", 1.0),), run="both", measure="memory")
    yield Case(
        "additive-growth", replace(long, T=262144), (Against("its time per token at 1k", 1.15),), measure="growth"
    )
    alone = Linear(65537, 1, 1, 64, 64)
    yield Case("additive-one-head-65537", alone, (Against("our one thread", 1 / 1.6),), least_threads=2)


def _delta() -> Iterator[Case]:
    yield Case(
        "delta-no-decay",
        Linear(1024, 32, 32, 128, 128, write="delta"),
        (Against("onnxruntime", 0.75), Against("torch")),
    )
    gated = Linear(1024, 16, 32, 128, 128, decay="scalar", write="delta")
    yield from _types(
        "delta-gated",
        gated,
        (Against("onnxruntime", 0.75), Against("transformers", 1 / 6), Against("zentorch"), Against("torch")),
        (Against("onnxruntime", 0.50), Against("zentorch", 1 / 5), Against("torch")),
    )
    kda = Linear(1024, 32, 32, 128, 128, decay="vector", write="delta")
    yield from _types(
        "delta-kda",
        kda,
        (Against("onnxruntime", 0.75), Against("transformers", 1 / 80), Against("torch")),
        (Against("onnxruntime", 0.55), Against("torch")),
    )
    for name, decay, peers in (
        ("no-decay", "none", (Against("torch"),)),
        ("gated", "scalar", (Against("transformers", 1 / 8), Against("torch"))),
        ("kda", "vector", (Against("torch"),)),
    ):
        work = Linear(2048, 8, 8, 128, 128, decay=decay, write="delta")
        yield Case(f"delta-train-{name}", work, (*peers, Against("our forward")), run="both")
    for name, heads, decay in (("gated", 16, "scalar"), ("kda", 32, "vector")):
        step = Linear(1, heads, 32, 128, 128, decay=decay, write="delta", state=True)
        peers = (Against("onnxruntime", 1.0), Against("transformers", 1 / 2))
        yield from _steps(f"delta-step-{name}", step, peers)


def _scans() -> Iterator[Case]:
    scan = Scan(T=1024, D=1536, N=16)
    yield Case("scan-mamba1", scan, (Against("transformers", 1 / 40),))
    yield Case("scan-mamba1-train", scan, (Against("transformers", 1 / 20), Against("our forward")), run="both")
    for layout, last in (("channels-last", True), ("channels-first", False)):
        conv = Conv(T=1024, C=4096, W=4, channels_last=last)
        yield Case(f"conv-{layout}", conv, (Against("F.conv1d", 1 / 2), Against("onnxruntime")))
    yield Case(
        "scan-mamba2", Mamba2(T=1024, H=32, P=64, N=128), (Against("transformers", 1 / 5), Against("onnxruntime"))
    )


CASES: dict[str, Case] = {case.name: case for family in (_additive, _delta, _scans) for case in family()}
"""Every case by its name."""


def select(patterns: list[str]) -> list[Case]:
    """The cases whose name holds one of ``patterns``, or matches it where it is a glob; none given: all.

    Raises:
        ValueError: a pattern that selects nothing.

    >>> [case.name for case in select(["conv"])]
    ['conv-channels-last', 'conv-channels-first']
    """
    found: dict[str, Case] = {}
    for pattern in patterns or ["*"]:
        glob = pattern if any(sign in pattern for sign in "*?[") else f"*{pattern}*"
        names = [name for name in CASES if fnmatch.fnmatchcase(name, glob)]
        if not names:
            raise ValueError(f"case: got {pattern!r}, which no case matches; takes {', '.join(CASES)}")
        found |= {name: CASES[name] for name in names}
    return [case for case in CASES.values() if case.name in found]
