"""With stand-ins for mamba_ssm, causal_conv1d or fla, transformers' models answer as they do without any."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

ROOT = Path(__file__).parents[2]
FAMILIES = [
    "mamba",
    "falcon_mamba",
    "jamba",
    "zamba",
    "mamba2",
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "nemotron_h",
    "zamba2",
    "lfm2",
]
DELTA_RULES = ["qwen3_next", "kimi_linear", "olmo_hybrid"]


def run(module, *arguments, **environment):
    command = [sys.executable, "-m", f"tests.compat.{module}", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    found = {"plain": {}, "stand-ins": {}}
    for how, both in found.items():
        for module, families in (("run_models", FAMILIES), ("run_without_triton", DELTA_RULES)):
            file = tmp_path_factory.mktemp("answers") / "found.pt"
            done = run(module, how, file, *families)
            assert done.returncode == 0, done.stderr
            both |= torch.load(file)
    return found


@pytest.mark.parametrize("family", FAMILIES + DELTA_RULES)
def test_models_answer_the_same(answers, family):
    ours, theirs = answers["stand-ins"][family], answers["plain"][family]
    assert ours.keys() == theirs.keys()
    assert torch.equal(ours["tokens"], theirs["tokens"])
    gradients = {name: t for name, t in theirs.items() if name.startswith("gradient")}
    largest = max(t.abs().max() for t in gradients.values())
    for name, want in theirs.items():
        # A gradient that is itself a rounding error of the others cannot be held to its own size.
        size = max(want.abs().max(), 1e-2 * largest) if name in gradients else want.abs().max()
        assert (ours[name] - want).abs().max() <= 1e-4 * size, name
    assert theirs["logits"].abs().max() > 1e-3


@pytest.fixture
def remote(tmp_path):
    """A checkpoint with code of its own, in tmp_path/model."""
    directory = tmp_path / "model"
    shutil.copytree(Path(__file__).parent / "remote_model", directory, ignore=shutil.ignore_patterns("__pycache__"))
    config = {
        "model_type": "remote-mamba",
        "auto_map": {
            "AutoConfig": "configuration_remote.RemoteConfig",
            "AutoModelForCausalLM": "modeling_remote.RemoteForCausalLM",
        },
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "vocab_size": 41,
    }
    (directory / "config.json").write_text(json.dumps(config))
    write_weights(directory)
    return directory


def write_weights(directory):
    """Random weights under the names the code gives them."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    shapes = {
        "embedding.weight": (41, 32),
        "head.weight": (41, 32),
        "norms.0.weight": (32,),
        "norms.1.weight": (32,),
        "mixers.0.in_proj.weight": (128, 32),
        "mixers.0.conv1d.weight": (64, 1, 4),
        "mixers.0.conv1d.bias": (64,),
        "mixers.0.x_proj.weight": (20, 64),
        "mixers.0.dt_proj.weight": (64, 4),
        "mixers.0.dt_proj.bias": (64,),
        "mixers.0.A_log": (64, 8),
        "mixers.0.D": (64,),
        "mixers.0.out_proj.weight": (32, 64),
        "mixers.1.in_proj.weight": (148, 32),
        "mixers.1.conv1d.weight": (80, 1, 4),
        "mixers.1.conv1d.bias": (80,),
        "mixers.1.dt_bias": (4,),
        "mixers.1.A_log": (4,),
        "mixers.1.D": (4,),
        "mixers.1.norm_weight": (64,),
        "mixers.1.out_proj.weight": (32, 64),
    }
    weights = {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(weights, directory / "model.safetensors", {"format": "pt"})


def test_code_that_comes_with_a_checkpoint_runs(remote, tmp_path):
    modules = {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    without = run("run_remote", "plain", remote, **modules)
    assert "not found in your environment: causal_conv1d, mamba_ssm" in without.stderr
    done = run("run_remote", "stand-ins", remote, **modules)
    assert done.returncode == 0, done.stderr
    assert "cached = uncached" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA they may be true")
def test_what_asks_for_cuda_stays_false():
    ask = "is_mamba_ssm_available, is_mamba_2_ssm_available, is_causal_conv1d_available"
    code = f"""
import phistate.compat
phistate.compat.install("causal_conv1d", "mamba_ssm")
from transformers.utils.import_utils import {ask}
print([asked() for asked in ({ask})])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[False, False, False]", done.stderr
