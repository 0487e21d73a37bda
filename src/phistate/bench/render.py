"""A run of the benchmarks as JSON, as a table in a terminal, and as a page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from phistate.bench.limits import Limits
from phistate.bench.machine import Machine, Native
from phistate.bench.runner import Row

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = ("peer", "ours, ms", "peer, ms", "ours / peer", "bar", "met", "error", "peer's", "GFLOP/s", "share of limit")


@dataclass(frozen=True)
class Results:
    """What a run found: the machine, its limits by number of threads, and the rows.

    ``load``: how many other processes wanted a processor in the minute before; None where the system does not say.
    """

    machine: Machine
    limits: Sequence[Limits]
    rows: Sequence[Row]
    load: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain types only."""
        return {
            "machine": asdict(self.machine),
            "load": self.load,
            "limits": [limits.as_dict() for limits in self.limits],
            "rows": [asdict(row) for row in self.rows],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Results:
        """What :meth:`to_json` gave."""
        machine = {**data["machine"], "native": Native(**data["machine"]["native"])}
        rows = [{**row, "ratio": row["ratio"] and tuple(row["ratio"])} for row in data["rows"]]
        limits = [Limits.from_dict(one) for one in data["limits"]]
        return cls(Machine(**machine), limits, [Row(**row) for row in rows], data["load"])


def table(threads: int, rows: Iterable[Row]) -> Table:
    """The rows of one number of threads, for a terminal."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    title = f"{threads} thread{'s' if threads > 1 else ''}"
    shown = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    shown.add_column("case", overflow="fold")
    for name in COLUMNS:
        shown.add_column(name, justify="left" if name == "peer" else "right")
    last = ""
    for row in rows:
        cells = _cells(row)
        style = {"yes": "green", "no": "red"}.get(cells[COLUMNS.index("met")], "")
        texts = [Text(cell, style=style if name == "met" else "") for name, cell in zip(COLUMNS, cells, strict=True)]
        shown.add_row(row.case if row.case != last else "", *texts)
        last = row.case
    return shown


def remarks(rows: Iterable[Row]) -> list[str]:
    """What a reader has to know beside the table, each said once, with the rows it holds for.

    >>> remarks([Row("a", "sdpa", 1, "float32", note="another function"), Row("b", "torch", 1, "float32")])
    ['another function: a (sdpa)']
    """
    found: dict[str, list[str]] = {}
    for row in rows:
        for remark in (row.missing, row.note):
            if remark:
                found.setdefault(remark, []).append(f"{row.case} ({row.peer})")
        if row.backend is not None and row.backend != "cpu":
            names = found.setdefault(f"ours ran on {row.backend}", [])
            if row.case not in names:
                names.append(row.case)
    return [f"{remark}: {', '.join(names)}" for remark, names in found.items()]


def markdown(results: Results) -> str:
    """The page: how it was measured, the machine, its limits, the rows."""
    machine = results.machine
    kernels = machine.native.in_use or f"none: {machine.native.missing}"
    libraries = ", ".join(f"{name} {found}" for name, found in machine.libraries.items() if found)
    memory = "" if machine.memory is None else f", {machine.memory / 2**30:.0f} GiB"
    lines = [
        _HOW,
        "## Machine",
        "",
        f"- {machine.processor}, {machine.cores} cores{memory}, {machine.system}",
        f"- phistate {machine.phistate} (kernels: {kernels}), torch {machine.torch}, Python {machine.python}",
        f"- {libraries or 'no optional library'}",
        *([] if results.load is None else [f"- load in the minute before the run: {results.load:.1f}"]),
        "",
        "| threads | " + " | ".join(results.limits[0].rates if results.limits else ()) + " | copy, main memory |",
        "|" + "---:|" * (2 + len(results.limits[0].rates if results.limits else ())),
        *(_limits_line(limits) for limits in results.limits),
        "",
        "GFLOP/s, a multiply-add counted as two; copies in GB/s, a byte counted when read and when written.",
        "",
        "## Results",
    ]
    for limits in results.limits:
        rows = [row for row in results.rows if row.threads == limits.threads]
        lines += ["", f"### {limits.threads} thread{'s' if limits.threads > 1 else ''}", ""]
        lines += ["| case | " + " | ".join(COLUMNS) + " |", "|---|---|" + "---:|" * (len(COLUMNS) - 1)]
        lines += ["| " + " | ".join((f"`{row.case}`", *_cells(row))) + " |" for row in rows]
        if told := remarks(rows):
            lines += ["", *(f"- {remark}" for remark in told)]
    return "\n".join(lines) + "\n"


def summary(rows: Iterable[Row]) -> str:
    """How many bars there are, how many are met, how many could not be measured.

    >>> summary([Row("a", "torch", 1, "float32", at_most=1.0, met=True)])
    '1 of 1 bars met'
    """
    rows = list(rows)
    verdicts = [met for row in rows for met in (row.met, row.share_met) if met is not None]
    unknown = sum(row.missing is not None and row.at_most is not None for row in rows)
    tail = f", {unknown} not measured" if unknown else ""
    return f"{sum(verdicts)} of {len(verdicts)} bars met{tail}"


def _cells(row: Row) -> tuple[str, ...]:
    if row.missing is not None:
        return (row.peer, "–", "–", "–", _bar(row), "–", "–", "–", "–", "–")
    share = "–" if row.share is None else f"{100 * row.share:.0f} % {row.limit}"
    return (
        row.peer,
        _milliseconds(row.ours),
        _milliseconds(row.peer_time),
        _ratio(row),
        _bar(row),
        _met(row),
        _error(row.error),
        _error(row.peer_error),
        "–" if row.rate is None else f"{row.rate / 1e9:.3g}",
        share,
    )


def _bar(row: Row) -> str:
    bars = []
    if row.at_most is not None:
        # A bar given as "n times faster" reads better as that.
        bars.append(f"≤ {row.at_most:.2f}" if row.at_most > 0.3 else f"≥ {1 / row.at_most:.3g}×")
    if row.share_at_least is not None:
        bars.append(f"≥ {100 * row.share_at_least:.0f} % of peak")
    return ", ".join(bars)


def _met(row: Row) -> str:
    verdicts = [met for met in (row.met, row.share_met) if met is not None]
    parts = ["yes" if met else "no" for met in verdicts]
    if row.share_met is not None and row.peak_share is not None:
        parts[-1] += f" ({100 * row.peak_share:.0f} %)"
    return ", ".join(parts)


def _milliseconds(seconds: float | None) -> str:
    """Three digits.

    >>> _milliseconds(0.0123456), _milliseconds(2.34567), _milliseconds(None)
    ('12.3', '2346', '–')
    """
    if seconds is None:
        return "–"
    return _digits(1e3 * seconds)


def _ratio(row: Row) -> str:
    """The median and its quartiles, if there was more than one turn; as a speed-up where ours is five times faster.

    >>> _ratio(Row("a", "torch", 1, "float32", ours=1.0, ratio=(0.5, 0.6, 0.7)))
    '0.60 (0.50–0.70)'
    >>> _ratio(Row("a", "torch", 1, "float32", ours=1.0, ratio=(0.01, 0.0125, 0.02)))
    '80× faster (50–100)'
    >>> _ratio(Row("a", "torch", 1, "float32", ours=1.0, ratio=(0.0005, 0.0005, 0.0005)))
    '2000× faster'
    """
    if row.ratio is None:
        return "–"
    low, middle, high = row.ratio
    faster = row.ours is not None and 0 < high < 0.2
    shown = [
        _digits(1 / x) if faster else f"{x:.2f}" for x in (middle, high if faster else low, low if faster else high)
    ]
    text = f"{shown[0]}× faster" if faster else shown[0]
    return text if low == middle == high else f"{text} ({shown[1]}–{shown[2]})"


def _digits(x: float) -> str:
    """Three digits, more where the number has them before the point."""
    return f"{x:.3g}" if x < 1000 else f"{x:.0f}"


def _error(error: float | None) -> str:
    return "–" if error is None else f"{error:.1e}"


def _limits_line(limits: Limits) -> str:
    rates = " | ".join(f"{rate / 1e9:.0f}" for rate in limits.rates.values())
    return f"| {limits.threads} | {rates} | {limits.copy(1 << 29) / 1e9:.1f} |"


_HOW = """# Benchmarks

This page is written by `phistate bench ops --markdown docs/benchmarks.md`; nothing in it is edited by hand.

## How it is measured

Every case of the registry (`phistate bench ops --list`) is run beside each of its peers in one process: a turn is one
`torch.utils.benchmark` measurement of ours and one of the peer's, and the turns alternate. **Ours / peer** is the
median of the turns' ratios with its quartiles in brackets, so that what slows the machine slows both; times are
medians. A turn of more than ten seconds is not repeated. Inputs are the same for both, each in the memory layout it
likes best; rearranging them is not timed. torch's threads and onnxruntime's are set to the same number; onnxruntime's
workers may spin while it runs but stop at the end of each run (`session.force_spinning_stop`), so neither pool takes
the other's cores, and its inputs and outputs are bound to torch's memory, so it pays for no copy. zentorch shares
torch's OpenMP runtime.

**Peers.** `torch`: the chunked reference in plain PyTorch, in bfloat16 under autocast. `sdpa`: torch's exact softmax
attention, another function at the same shapes. `onnxruntime`: its `com.microsoft` kernels, float32 always, also beside
our bfloat16; it has no backward pass. `transformers`: the PyTorch functions that models fall back to without their CUDA
packages. `two matmuls`: Q (KᵀV). `our forward`, `our one thread`: ourselves.

**Errors** are ‖x − exact‖ / ‖exact‖ of the worst output (when training: the worst gradient) over the first 512 tokens,
against the recurrence as written, token by token, in float64 on the same rounded inputs.

**Growth** is the worst time per token over that at 1024 tokens. **Memory** is measured in a process of its own as the
growth of its peak resident set during one call, minus what the call returns, over what the bar allows.

## What the limits are

Operations are counted by formula (`src/phistate/bench/work.py`). A token and head of the additive family costs 4KV, of
the delta family 6KV; chunks of C tokens add C(2K + V), under delta C(2K + 2V), which the rate and the share include.
Bytes are inputs and outputs, each once. The limit of a case is the larger of its operations over the peak and its bytes
over the copy rate measured at the size of its own working set; the last column names which binds. `fma` is measured
from registers in our own instruction set, `matmul` by torch, which may use a matrix unit (AMX) that no vector
instruction reaches; for bfloat16 the limit is the fastest of them.

## Where the rest goes

Sampled on an Intel Xeon with AVX-512 and 2 MiB of L2, one thread, float32, 1024 tokens of heads of 128:

- *Additive, no decay.* The tile products take 80 % of the kernel's time; alone, on panels in cache, they reach 85 % of
  the peak where a state is read and 77 % where it is updated (32 multiply-adds for each element loaded and stored).
  Half of a chunk's scores lie above its diagonal and are computed, not counted. The other 20 % is packing: heads lie
  far apart in memory, so rows are copied to panels once, and wait for memory there although they were prefetched.
- *Gated delta.* 82 % products, 18 % packing, norms, decays and the triangular solve.
- *KDA.* 57 % products; the rest is one decay for each feature: exponentials, and scores by sub-blocks of the chunk
  whose decays are all at most one, where a scalar decay is applied to finished scores.
- *bfloat16.* Operands are widened and multiplied in float32: VDPBF16PS runs at half the rate of a float32 multiply-add
  per instruction here, so it gains nothing. The matrix unit, by which torch's product is several times as fast (the
  table below), is not used yet; the last column counts it.
- *Long inputs.* Time per token rises where inputs no longer fit a cache and outputs are memory that the system clears
  first. `THP_MEM_ALLOC_ENABLE=1`, a switch of torch's own for huge pages, takes 7 % off 16384 tokens.
"""
