"""phistate bench model: that it runs both sides and says what it measured."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from phistate.bench.families import FAMILIES, Size, family_config
from phistate.bench.fla_families import FLA_FAMILIES
from phistate.bench.model import compare, load_config

TINY = Size(layers=3, width=32, head=16, state=8, vocab=64)


@pytest.mark.parametrize("name", ["qwen3_5", "mamba", "recurrent_gemma", "minimax"])
def test_compare(name):
    told = []
    result = compare(name, TINY, length=20, new_tokens=2, rounds=1, memory=False, progress=told.append)
    assert result.difference < 1e-4
    assert result.replaced
    assert result.share is None if name in ("minimax", "recurrent_gemma") else 0 < result.share < 1
    assert result.prefill_ratio == result.plain.prefill / result.fast.prefill
    assert result.plain.peak is None
    assert told[0] == "making the model"


def test_peak_is_measured_in_a_process_of_its_own():
    result = compare("lfm2", TINY, length=20, new_tokens=1, rounds=1)
    assert result.plain.peak is None or result.plain.peak >= 0


def test_a_config_of_ones_own(tmp_path):
    family_config("mamba", TINY).save_pretrained(tmp_path)
    assert load_config(str(tmp_path), Size()).hidden_size == 32
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds no config that transformers reads"):
        load_config(str(tmp_path), Size())
    with pytest.raises(ValueError, match="width: got 32; takes a multiple of 64 for xlstm"):
        load_config("xlstm", TINY)
    with pytest.raises(ValueError, match="name: got 'gpt9'; takes bailing_hybrid, bamba"):
        load_config("gpt9", Size())


def test_command(tmp_path, capsys, monkeypatch):
    from phistate.cli.main import main

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["phistate", "bench", "model", *arguments])
        with pytest.raises(SystemExit) as done:
            main()
        return done.value.code or 0

    assert run("--list") == 0
    assert capsys.readouterr().out.split() == [*FAMILIES, *FLA_FAMILIES]
    small = "--layers 2 --width 32 --head 16 --vocab 64 --length 20 --new-tokens 1 --rounds 1 --threads 1 --no-memory"
    assert run("kimi-linear", *small.split(), "--json", str(tmp_path / "out.json")) == 0
    assert "kimi_linear" in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text())["prefill_ratio"] > 0
    assert run("gpt9", *small.split()) == 2
    assert "name: got 'gpt9'" in capsys.readouterr().err
    assert run("--width", "100") == 2
    assert "takes a multiple of --head" in capsys.readouterr().err
