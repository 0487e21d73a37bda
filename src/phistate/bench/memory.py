"""What a call holds beside its inputs: the growth of the process's resident memory, measured in a process of its own.

``python -m phistate.bench.memory CASE TOKENS THREADS`` prints the bytes as JSON: the peak of the resident set during
the call (Linux keeps it; the mark is reset before) minus the resident set just before, when the inputs are written.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch

from phistate.bench.cases import CASES, Case
from phistate.bench.ready import Missing, ready

_STATUS = Path("/proc/self/status")

# What is freed goes back at once: memory kept in the heap from earlier would be used again without the set growing.
_GLIBC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}


def measure(case: Case, threads: int) -> int:
    """Bytes ``case`` holds at its peak beside its inputs, results included.

    Raises:
        Missing: the system does not tell a process's peak, or the run failed; the message says how.
    """
    command = [sys.executable, "-m", "phistate.bench.memory", case.name, str(case.work.T), str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **_GLIBC})
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise Missing(f"the measuring process failed: {lines[-1]}")
    return int(json.loads(done.stdout)["bytes"])


def results(case: Case) -> int:
    """Bytes of what the call returns: the output, and when training the gradient of every input."""
    token = case.work.shorter(1).inputs(case.dtype)
    gradients = sum(tensor.nbytes for tensor in token.values()) if case.run == "both" else 0
    return case.work.T * (case.work.ours(token)[0].nbytes + gradients)


def allowed(case: Case) -> int:
    """Bytes beside inputs and results that the bar allows: 8 MiB forward, three times q when training."""
    return 3 * case.work.T * case.work.shorter(1).inputs(case.dtype)["q"].nbytes if case.run == "both" else 8 << 20


def _grown(case: Case) -> int:
    if not _STATUS.is_file():
        raise Missing("/proc/self/status is not there: only Linux tells a process's peak")
    ready(case.work.ours, case.work.shorter(64).inputs(case.dtype), case.run).run()  # loads and warms everything
    inputs = case.work.inputs(case.dtype)
    given = torch.ones(1, case.work.T, *case.work.ours(case.work.shorter(1).inputs(case.dtype))[0].shape[2:])
    before = _reset()
    if case.run == "both":
        inputs = {name: tensor.requires_grad_() for name, tensor in inputs.items()}
        o = case.work.ours(inputs)[0]
        torch.autograd.grad(o, list(inputs.values()), given)  # o is still held, as a training step holds it
    else:
        case.work.ours(inputs)
    return _field("VmHWM") - before


def _reset() -> int:
    """Resets the peak of the resident set (proc(5), clear_refs); the resident set now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _field("VmRSS")


def _field(name: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise Missing(f"/proc/self/status has no {name}")


def _main() -> None:
    name, tokens, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    case = CASES[name]
    print(json.dumps({"bytes": _grown(replace(case, work=case.work.shorter(int(tokens))))}))


if __name__ == "__main__":
    _main()
