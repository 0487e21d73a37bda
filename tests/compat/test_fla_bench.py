"""phistate bench model with fla's own models: that everything is run and said."""

from __future__ import annotations

import json

import pytest

from phistate.bench.families import Size
from phistate.bench.fla import measure
from phistate.bench.fla_families import fla_model

pytestmark = [
    pytest.mark.usefixtures("fla"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

TINY = Size(layers=2, width=32, head=16, state=8, vocab=64)


@pytest.mark.parametrize("name", ["fla.gla", "fla.mamba2"])
def test_measure(name):
    told = []
    result = measure(name, TINY, length=20, rounds=1, progress=told.append)
    assert 0 < result.ops < result.direct
    assert result.overhead == result.prefill / result.direct
    assert result.share == result.ops / result.prefill
    assert result.backward_ratio == result.backward / result.forward
    assert told == ["making the model", "warming up", "round 1"]
    with pytest.raises(ValueError, match=r"name: got 'fla.gpt'; takes fla.comba"):
        fla_model("fla.gpt")


def test_command(tmp_path, capsys, monkeypatch):
    from phistate.cli.main import main

    small = "--layers 2 --width 32 --head 16 --vocab 64 --length 20 --rounds 1 --threads 1"
    monkeypatch.setattr(
        "sys.argv", ["phistate", "bench", "model", "fla.kda", *small.split(), "--json", f"{tmp_path}/out"]
    )
    with pytest.raises(SystemExit) as done:
        main()
    assert not done.value.code
    assert "its operators, called directly" in capsys.readouterr().out
    assert json.loads((tmp_path / "out").read_text())["share"] > 0
