"""Beside whom a case is measured; each is imported when it is used, and says why where it cannot be."""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from phistate.bench import onnx_peer
from phistate.bench.cases import Case
from phistate.bench.ready import Missing, Ready, ready
from phistate.bench.work import Conv, Inputs, Linear, Mamba2, Outputs, Scan

Prepare = Callable[[Case, Inputs, int], Ready]
"""Makes a peer ready for a case's inputs and a number of threads; raises :class:`Missing`."""


def ours(case: Case, inputs: Inputs, threads: int) -> Ready:
    """Our own call, with a state of its own where the call overwrites it."""
    if "state" in inputs:
        inputs = {**inputs, "state": inputs["state"].clone()}
    return ready(case.work.ours, inputs, case.run)


def _torch(case: Case, inputs: Inputs, threads: int) -> Ready:
    """The chunked reference in plain PyTorch; in bfloat16 under autocast, as a user of plain PyTorch would run it."""
    work = _linear(case)
    form = "chunked" if work.causal and work.T > 1 else "recurrent" if work.causal else "auto"
    if case.dtype == torch.float32:
        return ready(lambda x: work.call(x, backend="torch", form=form), inputs, case.run)

    def call(x: Inputs) -> Outputs:
        with torch.autocast("cpu", case.dtype):
            return work.call(x, backend="torch", form=form)

    wide = {name: tensor.float() for name, tensor in inputs.items()}
    return ready(call, wide, case.run, note=f"under {str(case.dtype).removeprefix('torch.')} autocast")


def _sdpa(case: Case, inputs: Inputs, threads: int) -> Ready:
    """torch's exact softmax attention, its inputs already ``[B,H,T,D]``."""
    _linear(case)
    q, k, v = (inputs[name].transpose(1, 2).contiguous() for name in "qkv")
    return Ready(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), None, note="softmax, not this sum")


def _two_matmuls(case: Case, inputs: Inputs, threads: int) -> Ready:
    """Q (Kᵀ V), its inputs already ``[B,H,T,D]`` and scaled."""
    work = _linear(case)
    q, k, v = (inputs[name].transpose(1, 2).contiguous() for name in "qkv")
    q = q * work.K**-0.5
    return Ready(lambda: q @ (k.mT @ v), lambda: ((q @ (k.mT @ v)).transpose(1, 2),))


def _onnxruntime(case: Case, inputs: Inputs, threads: int) -> Ready:
    if case.run != "forward":
        raise Missing("onnxruntime has no backward pass")
    return onnx_peer.prepare(case.work, inputs, threads)


def _conv1d(case: Case, inputs: Inputs, threads: int) -> Ready:
    """torch's grouped convolution and SiLU, as transformers' fallback does it; ``[B,C,T]`` in either memory layout."""
    work = case.work
    if not isinstance(work, Conv):
        raise Missing("no convolution")

    def call(x: Inputs) -> Outputs:
        T = x["x"].shape[1]
        out = F.conv1d(x["x"].mT, x["weight"].unsqueeze(1), x["bias"], padding=work.W - 1, groups=work.C)
        return (F.silu(out[..., :T]).mT,)

    return ready(call, inputs, case.run)


def _transformers(case: Case, inputs: Inputs, threads: int) -> Ready:
    """The function a model falls back to without its CUDA package."""
    work, run = case.work, case.run
    if isinstance(work, Linear) and work.write == "delta" and work.decay != "none":
        kda = work.decay == "vector"
        module = "kimi_linear" if kda else "qwen3_5"
        if work.state:
            step = _fallback(module, "recurrent_kimi_delta_attention" if kda else "torch_recurrent_gated_delta_rule")

            def stepped(x: Inputs) -> Outputs:
                return step(x["q"], x["k"], x["v"], x["decay"], x["beta"], x["state"], True)

            return ready(stepped, inputs, run)
        chunk = _fallback(module, "chunk_kimi_delta_attention" if kda else "torch_chunk_gated_delta_rule")
        return ready(lambda x: chunk(x["q"], x["k"], x["v"], x["decay"], x["beta"])[:1], inputs, run)
    if isinstance(work, Mamba2):
        chunked = _fallback("mamba2", "mamba2_chunk_scan")

        def mamba2(x: Inputs) -> Outputs:
            o = chunked(x["x"], x["dt"], x["A"], x["B"], x["C"], 256, D=x["D"], dt_bias=x["dt_bias"], dt_softplus=True)
            return (o,)

        return ready(mamba2, inputs, run, note="chunk 256")
    if isinstance(work, Scan):
        scan = _fallback("mamba", "mamba_selective_scan")

        def mamba(x: Inputs) -> Outputs:
            o = scan(x["x"], x["delta"], x["A"], x["B"], x["C"], x["D"], x["z"], x["delta_bias"], delta_softplus=True)
            return (o,)

        return ready(mamba, inputs, run, swapped=("x", "delta", "B", "C", "z", "o"))
    raise Missing("transformers has no such function")


def _fallback(module: str, function: str) -> Any:
    """transformers' own PyTorch function, from under the wrapper that looks for a faster one."""
    try:
        models = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
        return inspect.unwrap(getattr(models, function))
    except ImportError as error:
        raise Missing(f"transformers is not installed, or lacks {module} ({error.name})") from None
    except AttributeError:
        raise Missing(f"this version of transformers has no {function}") from None


def _zentorch(case: Case, inputs: Inputs, threads: int) -> Ready:
    """zentorch's chunked gated delta rule: one packed sequence, chunks of 64."""
    work = case.work
    gated = isinstance(work, Linear) and work.write == "delta" and work.decay == "scalar"
    if not gated or case.run != "forward" or (isinstance(work, Linear) and work.state):
        raise Missing("zentorch has the chunked gated delta rule only, forward")
    try:
        with warnings.catch_warnings(action="ignore"):  # its own affairs
            importlib.import_module("zentorch")
        operator = torch.ops.zentorch.gdn_chunk_gated_delta_rule_fwd
    except (ImportError, OSError, AttributeError) as error:
        raise Missing(f"zentorch does not import: {' '.join(str(error).split())}") from None
    assert isinstance(work, Linear)
    chunks = -(-work.T // 64)
    bounds = torch.tensor([0, work.T], dtype=torch.int32)
    index = torch.stack([torch.zeros(chunks, dtype=torch.int32), torch.arange(chunks, dtype=torch.int32)], 1)
    offsets = torch.tensor([0, chunks], dtype=torch.int32)

    def call(x: Inputs) -> Outputs:
        o, _ = operator(
            x["q"],
            x["k"],
            x["v"],
            x["decay"],
            x["beta"],
            work.K**-0.5,
            None,
            False,
            64,
            bounds,
            index.contiguous(),
            offsets,
        )
        return (o,)

    return ready(call, inputs, case.run)


def _our_forward(case: Case, inputs: Inputs, threads: int) -> Ready:
    return Ready(lambda: case.work.ours(inputs), None)


def _our_one_thread(case: Case, inputs: Inputs, threads: int) -> Ready:
    return Ready(lambda: case.work.ours(inputs), None, threads=1)


def _linear(case: Case) -> Linear:
    if not isinstance(case.work, Linear):
        raise Missing("no linear attention")
    return case.work


PEERS: dict[str, Prepare] = {
    "torch": _torch,
    "sdpa": _sdpa,
    "two matmuls": _two_matmuls,
    "onnxruntime": _onnxruntime,
    "transformers": _transformers,
    "zentorch": _zentorch,
    "F.conv1d": _conv1d,
    "our forward": _our_forward,
    "our one thread": _our_one_thread,
}
"""Every peer by the name the registry gives it."""
