"""Nothing is timed for its speed here: the registry means what it says, peers compute it too, the commands run."""

import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from phistate.bench import memory, runner
from phistate.bench.cases import CASES, Against, Case, select
from phistate.bench.limits import Limits
from phistate.bench.peers import PEERS, ours
from phistate.bench.ready import Missing, ready
from phistate.bench.work import Linear
from phistate.cli.main import main

TIMED = [case for case in CASES.values() if case.measure == "time"]
LIMITS = Limits(1, {"fma float32": 1e11}, dict.fromkeys((1 << n for n in range(16, 30)), 1e10))
TINY = Linear(8, 2, 2, 4, 4)


def command(monkeypatch, *arguments):
    """The command in this process, which has torch already; its exit code."""
    monkeypatch.setattr(sys, "argv", ["phistate", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    return stopped.value.code or 0


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_case_is_whole(case):
    assert case.against
    assert all(against.at_most is None or against.at_most > 0 for against in case.against)
    if case.measure == "time":
        assert all(against.peer in PEERS for against in case.against)
    cost = case.work.cost()
    assert 0 < cost.needed <= cost.performed
    assert cost.bytes(torch.bfloat16) < cost.bytes(torch.float32)


def test_costs_are_linear_in_tokens_and_follow_the_formula():
    additive, delta = Linear(1024, 8, 8, 64, 64), Linear(1024, 8, 8, 64, 64, write="delta")
    assert additive.cost().needed == 1024 * 8 * 4 * 64**2
    assert additive.cost().performed == 1024 * 8 * (4 * 64**2 + 3 * 32 * 64)
    assert delta.cost().needed == 1024 * 8 * 6 * 64**2
    assert additive.shorter(512).cost().performed * 2 == additive.cost().performed
    assert additive.cost().bytes(torch.float32) == 1024 * 8 * 64 * 4 * 4


def test_the_rows_of_the_tables_are_there():
    bars = {(case.name, against.peer): against.at_most for case in CASES.values() for against in case.against}
    assert bars["additive-no-decay-f32", "onnxruntime"] == 0.60
    assert CASES["additive-no-decay-f32"].share == 0.70
    assert bars["additive-linear-16384", "sdpa"] == 1 / 60
    assert bars["delta-kda-f32", "transformers"] == 1 / 80
    assert bars["delta-gated-bf16", "zentorch"] == 1 / 5
    assert bars["scan-mamba1", "transformers"] == 1 / 40
    assert bars["conv-channels-first", "F.conv1d"] == 1 / 2


@pytest.mark.parametrize("case", TIMED, ids=lambda case: case.name)
def test_the_exact_twin_agrees_with_our_call(case):
    work = case.work.shorter(5)
    inputs = {name: tensor.double() for name, tensor in work.inputs(torch.float32).items()}
    exact = work.exact(inputs)  # before ours, which may overwrite the state
    for got, wanted in zip(work.ours(inputs), exact, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", TIMED, ids=lambda case: case.name)
def test_our_call_errs_as_its_type_does(case):
    short = replace(case, work=case.work.shorter(40))
    inputs = short.work.inputs(case.dtype)
    exact = ready(short.work.exact, {name: x.double() for name, x in inputs.items()}, case.run).read()
    for got, wanted in zip(ours(short, inputs, 1).read(), exact, strict=True):
        bound = 1e-5 if case.dtype == torch.float32 else 2e-2
        assert float((got.double() - wanted).norm() / wanted.norm()) < bound


@pytest.mark.parametrize(
    ("case", "peer"),
    [
        pytest.param(case, against.peer, id=f"{case.name}-{against.peer}")
        for case in TIMED
        if case.dtype == torch.float32
        for against in case.against
        if not against.peer.startswith("our ") and against.peer != "sdpa"
    ],
)
def test_a_peer_computes_the_same(case, peer):
    short = replace(case, work=case.work.shorter(70))
    inputs = short.work.inputs(torch.float32)
    try:
        theirs = PEERS[peer](short, inputs, 1)
    except Missing as missing:
        pytest.skip(str(missing))
    exact = ready(short.work.exact, {name: x.double() for name, x in inputs.items()}, short.run).read()
    for got, wanted in zip(theirs.read(), exact, strict=True):
        assert float((got.double() - wanted).norm() / wanted.norm()) < 1e-5


def test_a_row_is_measured_in_full():
    case = Case("tiny", TINY, (Against("torch", 1e9),), share=1e-9)
    (row,) = runner.run(case, 1, LIMITS, seconds=0.0)
    assert row.missing is None
    assert row.ours > 0
    assert row.peer_time > 0
    low, middle, high = row.ratio
    assert 0 < low <= middle <= high
    assert row.met
    assert row.share_met
    assert row.error < 1e-6
    assert row.peer_error < 1e-6
    assert row.rate == pytest.approx(TINY.cost().performed / row.ours)


def test_forward_and_backward_are_one_measurement():
    case = Case("tiny", replace(TINY, decay="scalar"), (Against("torch"), Against("our forward", 1e-9)), run="both")
    first, second = runner.run(case, 1, LIMITS, seconds=0.0)
    assert first.peer_error < 1e-5
    assert second.peer_error is None
    assert second.met is False


def test_a_missing_peer_is_a_row_that_says_why(monkeypatch):
    for module in ("onnxruntime", "zentorch", "transformers.models.qwen3_5.modeling_qwen3_5"):
        monkeypatch.setitem(sys.modules, module, None)
    work = replace(TINY, decay="scalar", write="delta")
    peers = ("onnxruntime", "zentorch", "transformers")
    rows = list(runner.run(Case("tiny", work, tuple(map(Against, peers))), 1, LIMITS, seconds=0.0))
    for peer, row in zip(peers, rows, strict=True):
        assert peer.removesuffix("runtime") in row.missing  # onnx is looked for before onnxruntime
        assert row.ratio is None


def test_a_peer_that_fails_is_a_row(monkeypatch):
    def broken(case, inputs, threads):
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(PEERS, "torch", broken)
    (row,) = runner.run(Case("tiny", TINY, (Against("torch"),)), 1, LIMITS, seconds=0.0)
    assert row.missing == "torch failed: RuntimeError: no such kernel"


def test_too_few_threads_are_said_so():
    (row,) = runner.run(CASES["additive-one-head-65537"], 1, LIMITS)
    assert "2 threads" in row.missing


def test_growth_takes_every_length():
    case = replace(CASES["additive-growth"], work=Linear(4096, 1, 1, 4, 4))
    (row,) = runner.run(case, 1, LIMITS)
    assert row.ratio[1] >= 1.0
    assert "1024: " in row.note
    assert "4096: " in row.note


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells a process's peak memory")
def test_memory_counts_what_is_held():
    case = CASES["additive-memory-forward"]
    case = replace(case, work=case.work.shorter(8192))
    (row,) = runner.run(case, 1, LIMITS)
    q = 8192 * 8 * 64 * 4
    assert memory.results(case) == q
    assert memory.measure(case, 1) > 0.9 * q
    assert row.ratio[1] >= 0
    assert "MiB held at the peak" in row.note
    training = replace(case, run="both")
    assert memory.results(training) == 4 * q
    assert memory.allowed(training) == 3 * q


def test_select_takes_parts_of_names_and_globs():
    assert [case.name for case in select(["delta-step-*"])] == [
        *("delta-step-gated", "delta-step-gated-in-place", "delta-step-kda", "delta-step-kda-in-place")
    ]
    assert len(select([])) == len(CASES)
    with pytest.raises(ValueError, match=r"^case: got 'nothing', which no case matches; takes "):
        select(["nothing"])


def test_the_peak_of_half_precision_is_the_fastest_unit():
    limits = Limits(1, {"fma float32": 2.0, "fma bfloat16": 1.0, "matmul float32": 3.0, "matmul bfloat16": 9.0})
    assert limits.peak(torch.float32) == (2.0, "fma float32")
    assert limits.peak(torch.bfloat16) == (9.0, "matmul bfloat16")


def test_bench_ops_end_to_end(tmp_path, monkeypatch):
    first, page = tmp_path / "run.json", tmp_path / "run.md"
    options = ("--case", "linear-256", "--threads", "1", "--seconds", "0", "--json", str(first))
    done = subprocess.run(
        [sys.executable, "-m", "phistate.cli", "bench", "ops", *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "sdpa" in done.stdout
    assert "bars met" in done.stdout
    found = json.loads(first.read_text())
    assert found["machine"]["backends"]["torch"] == []
    assert found["limits"][0]["threads"] == 1
    assert {(row["case"], row["peer"]) for row in found["rows"]} == {
        ("additive-linear-256", "sdpa"),
        ("additive-linear-256", "torch"),
    }
    assert all(row["missing"] is None and math.isfinite(row["ratio"][1]) for row in found["rows"])

    assert command(monkeypatch, "bench", "ops", "--from", str(first), "--markdown", str(page)) == 0
    text = page.read_text()
    assert "| `additive-linear-256` | sdpa |" in text
    assert found["machine"]["processor"] in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--case", "nothing"), "--case: got 'nothing'"),
        (("--threads", "0"), "--threads: got '0'"),
        (("--threads", "two"), "--threads: got 'two'"),
        (("--seconds", "-1"), "--seconds: got -1.0"),
        (("--json", "/nowhere/run.json"), "--json: got '/nowhere/run.json'"),
        (("--from", "/nowhere/run.json"), "--from: got '/nowhere/run.json'"),
        (("--speed",), "No such option"),
    ],
)
def test_bad_input_is_one_line(arguments, words, monkeypatch, capsys):
    assert command(monkeypatch, "bench", "ops", *arguments) == 2
    shown = capsys.readouterr()
    assert words in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_listing_measures_nothing(monkeypatch, capsys):
    assert command(monkeypatch, "bench", "ops", "--list", "--case", "delta-kda") == 0
    assert "delta-kda-bf16" in capsys.readouterr().out


def test_info_runs(monkeypatch, capsys):
    assert command(monkeypatch, "info") == 0
    assert "backend torch" in capsys.readouterr().out
    assert command(monkeypatch, "info", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["torch"] == torch.__version__
    assert found["native"]["missing"] or found["native"]["in_use"] in found["native"]["available"]
    assert found["libraries"]["transformers"] is None or found["libraries"]["transformers"][0].isdigit()


def test_ours_takes_the_same_inputs_as_the_peers():
    case = Case("tiny", TINY, (Against("torch"),))
    inputs = TINY.inputs(torch.float32)
    (mine,) = ours(case, inputs, 1).read()
    (theirs,) = PEERS["torch"](case, inputs, 1).read()
    torch.testing.assert_close(mine, theirs)
