"""The study of feature maps, through its functions and through its command."""

import json
import math
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import phistate
from phistate.cli import main as cli
from phistate.features import feature_map_names
from phistate.study import BASELINES, contender_names, gaussian, report, study
from phistate.study.contenders import FAMILIES, SINKS, make
from phistate.study.run import SOFTMAX

SMALL = ["--length", "48", "--head-dim", "4", "--budget", "16", "--draws", "1"]


@pytest.fixture(scope="module")
def found():
    inputs = gaussian(length=96, head_dim=4, logit_std=1.0)
    return study(inputs, budget=32, budgets=[4, 32, 64], logit_stds=(0.1, 2.0), draws=2)


def run(*arguments: object) -> tuple[int, str, str]:
    """The command as a shell runs it: exit code, stdout, stderr."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "phistate.cli", "features", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return done.returncode, done.stdout, done.stderr


def called(monkeypatch, capsys, *arguments: object) -> tuple[int, str, str]:
    """The entry point in this process, which pays for imports once: exit code, stdout, stderr."""
    monkeypatch.setattr(sys, "argv", ["phistate", "features", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    code = stopped.value.code or 0
    assert isinstance(code, int)
    return code, *capsys.readouterr()


def test_every_map_takes_part_in_one_family():
    members = [name for family in FAMILIES for name in family.members]
    assert sorted(members) == sorted(contender_names())
    assert set(contender_names()) == {*BASELINES, *feature_map_names()}


@pytest.mark.parametrize("name", contender_names())
@pytest.mark.parametrize("budget", [1, 5, 16, 60])
def test_nobody_exceeds_the_budget_nor_could_use_more_of_it(name, budget):
    q, k = torch.randn(2, 1, 60, 1, 4).unbind()
    shape = {"head_dim": 4, "value_dim": 4, "kv_heads": 1, "scale": 0.5, "length": 60, "fit": (q, k)}
    made = make(name, budget, **shape)
    if made is None:
        larger = next(n for n in range(budget + 1, 400) if make(name, n, **shape) is not None)
        assert make(name, larger, **shape).features > budget
        return
    assert 1 <= made.features <= budget
    assert made.attend(q, k, k).shape == k.shape
    if name not in ("window", "nystrom"):
        _, state = phistate.linear_attention(
            q, k, k, feature_map=made.kernel, normalize=True, signed="allow", return_state=True
        )
        assert state.nbytes == made.state_bytes


def test_the_window_takes_no_more_bytes_than_a_state():
    shape = {"head_dim": 16, "value_dim": 16, "kv_heads": 2, "scale": 0.25, "length": 4096}
    window, state = make("window", 256, **shape), make("polysketch", 256, **shape)
    assert window.state_bytes <= 256 * 17 * 2 * 4
    assert window.state_bytes > 0.9 * state.state_bytes
    assert f"+ {SINKS}" in window.label


def test_gaussian_inputs_are_what_they_say():
    for wanted in (0.5, 4.0):
        inputs = gaussian(length=2000, head_dim=8, logit_std=wanted, heads=3)
        logits = torch.einsum("bthd,bshd->bhts", inputs.q, inputs.k) * inputs.scale
        assert inputs.logit_std == pytest.approx(wanted, rel=0.05)
        assert inputs.logit_std == pytest.approx(logits.double().std().item(), rel=1e-5)
        assert inputs.q.square().sum(-1).mean().item() == pytest.approx(8 * wanted, rel=0.05)
    with pytest.raises(ValueError, match="logit_std: got 0"):
        gaussian(length=8, head_dim=8, logit_std=0.0)
    with pytest.raises(ValueError, match="heads: got 0"):
        gaussian(length=8, head_dim=8, logit_std=1.0, heads=0)


def test_what_theory_says_of_the_maps(found):
    at = {p.name: p.figures for p in found.table}
    # The Taylor polynomial loses 1 − (1 + τ²/2) exp(−τ²/2) of the denominator (τ = 1, more keys than here).
    assert at["taylor"].delta == pytest.approx(1 - 1.5 * math.exp(-0.5), abs=0.08)
    assert at["taylor"].top1 == 1  # the polynomial is monotone where it is not small
    assert at["uniform"].top1 < 0.2
    assert at["window"].spread > 0
    flat = {p.name: p.figures for p in found.over_logits if p.logit_std == 0.1}
    sharp = {p.name: p.figures for p in found.over_logits if p.logit_std == 2.0}
    for name in ("uniform", "taylor", "favor+"):
        assert flat[name].relative_spread < sharp[name].relative_spread
    # ε is the series' remainder, x³/6: its spread at τ = 0.1 is about 0.1³·√15/6.
    assert flat["taylor"].relative_spread < 1e-3
    assert flat["taylor"].error < 0.1 * flat["uniform"].error
    few, many = (
        next(p.figures.relative_spread for p in found.over_features if p.name == "oprf" and p.budget == budget)
        for budget in (4, 64)
    )
    assert many < few


def test_the_study_is_whole(found):
    assert found.costs[0].name == SOFTMAX
    assert {p.name for p in found.table} | set(found.too_small) == set(contender_names())
    assert {p.length for p in found.over_length} == {64, 96}
    assert {p.budget for p in found.over_features} == {4, 32, 64}
    elu = [p for p in found.over_features if p.name == "elu"]
    assert len(elu) == 1, "a map of a fixed size is one point"
    assert all(cost.seconds > 0 and cost.state_bytes > 0 for cost in found.costs)
    again = study(gaussian(length=96, head_dim=4, logit_std=1.0), names=["favor+"], budget=32, budgets=[32], draws=2)
    assert again.table[0] == next(p for p in found.table if p.name == "favor+"), "a seed is a study"


def test_grouped_heads_are_each_read_with_their_own_keys():
    inputs = gaussian(length=40, head_dim=4, logit_std=1.0, heads=2)
    q = torch.cat([inputs.q, inputs.q], 2)[:, :, [0, 2, 1, 3]]
    twice = type(inputs)(**{**vars(inputs), "q": q})
    one = study(inputs, names=["taylor"], budget=15, budgets=[15])
    two = study(twice, names=["taylor"], budget=15, budgets=[15])
    assert two.table[0].figures.error == pytest.approx(one.table[0].figures.error)
    assert two.heads == 4


def test_the_report_stands_alone(found):
    page = report.html(found)
    assert page.count("<svg") == 4
    assert "http" not in page.replace("http://www.w3.org", "").replace("https://matplotlib.org", "").replace(
        "http://purl.org", ""
    ).replace("http://creativecommons.org", "")
    assert (
        page.index("The denominator first") < page.index("Error against features") < page.index("Error against length")
    )
    for point in found.table:
        assert point.label in page
    assert report.png(found).startswith(b"\x89PNG")
    assert "best baseline" in report.headline(found)


def test_the_headline_says_when_every_map_loses(found):
    losing = replace(found, table=[p for p in found.table if p.name in (*BASELINES, "favor+", "rff")])
    best = min(losing.table, key=lambda p: p.figures.error)
    assert best.name in BASELINES
    assert report.headline(losing).startswith(f"No map does better than the best baseline ({best.label}: output error ")


def test_the_plots_leave_out_what_has_no_place_on_them(found):
    wild = replace(found.table[0], figures=replace(found.table[0].figures, error=0.0, delta=math.inf))
    hopeless = replace(wild, figures=replace(wild.figures, error=1e6, relative_spread=math.inf))
    odd = replace(found, table=[wild], over_features=[wild, hopeless], over_length=[wild], over_logits=[])
    assert report.html(odd).count("<svg") == 3
    assert report.png(odd).startswith(b"\x89PNG")


def test_the_command_end_to_end(tmp_path):
    json_file, page = tmp_path / "f.json", tmp_path / "f.html"
    code, out, err = run(
        *SMALL, "--maps", "uniform,window,elu,favor+,nystrom,taylor", "--json", json_file, "--report", page
    )
    assert (code, err) == (0, "")
    assert "favor+" in out
    assert "best baseline" in out
    found = json.loads(json_file.read_text())
    assert found["budget"] == 16
    assert found["length"] == 48
    assert {p["name"] for p in found["table"]} == {"uniform", "window", "elu", "favor+", "nystrom", "taylor"}
    assert all(math.isfinite(p["figures"]["error"]) for p in found["over_features"])
    assert {p["logit_std"] for p in found["over_logits"]} >= {0.25, 3.0}
    assert page.read_text().startswith("<!doctype html>")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["f.html", "f.json"]
    assert stat.S_IMODE(page.stat().st_mode) & 0o400


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--budget", "0"], "--budget: got 0; takes an integer ≥ 1"),
        (["--length", "1"], "--length: got 1; takes an integer ≥ 2"),
        (["--draws", "0"], "--draws: got 0"),
        (["--head-dim", "0"], "--head-dim: got 0"),
        (["--logit-std", "-1"], "--logit-std: got -1.0; takes a positive number"),
        (["--norm", "nan"], "--norm: got nan"),
        (["--norm", "2", "--logit-std", "1"], "--norm: got one with --logit-std"),
        (["--layer", "1", "--norm", "2"], "--norm: got 2.0 with --layer"),
        (["--model", "x"], "--model: got 'x' without --layer"),
        (["--text", "x"], "--text: got 'x' without --layer"),
        (["--maps", "elu,spline"], "--maps: got 'spline'; takes uniform, window, elu"),
        (["--json", "no/such/f.json"], "--json: got 'no/such/f.json'; takes a file in a folder that exists"),
        (["--report", "f.pdf"], "--report: got 'f.pdf'; takes a name that ends in .html or .png"),
        (["--report", "."], "--report: got '.'"),
        (["--layer", "0", "--model", "./nowhere"], "MODEL: got './nowhere', which does not exist"),
    ],
)
def test_what_the_command_refuses(monkeypatch, capsys, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, _, err = called(monkeypatch, capsys, *arguments)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_layer_of_a_model(monkeypatch, capsys, tmp_path: Path):
    pytest.importorskip("transformers", reason="transformers is not installed (extra 'models')")
    from tests.audit.conftest import save_tokenizer, tiny_llama

    folder = tmp_path / "model"
    tiny_llama().save_pretrained(folder)
    save_tokenizer(folder)
    text = tmp_path / "text"
    text.write_text(" ".join(f"w{n % 62}" for n in range(400)))
    capsys.readouterr()
    small = ["--length", 24, "--budget", 16, "--draws", 1, "--maps", "uniform,sderf"]
    options = ["--model", folder, "--text", text, *small]
    code, out, _ = called(monkeypatch, capsys, *options, "--layer", 1, "--json", tmp_path / "f.json")
    assert code == 0
    assert "layer 1 of" in json.loads((tmp_path / "f.json").read_text())["source"]
    assert "4 heads on 2" in out
    code, _, err = called(monkeypatch, capsys, *options, "--layer", 7)
    assert code == 2
    assert "phistate: --layer: got 7;" in err
    assert err.rstrip().endswith("has 0 to 2")
