"""flash-linear-attention's own models by name, of any size, with random weights: what the bench and the tests run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from phistate.bench.families import Config, Size


def _common(size: Size) -> dict[str, Any]:
    return {
        "hidden_size": size.width,
        "num_hidden_layers": size.layers,
        "vocab_size": size.vocab,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _heads(name: str, **more: Any) -> Callable[[Size], Config]:
    """A model whose heads are counted: as many of ``size.head`` as fill the width."""

    def make(size: Size) -> Config:
        return name, _common(size) | {"num_heads": size.width // size.head} | more

    return make


def _sized(name: str, **more: Any) -> Callable[[Size], Config]:
    """A model whose heads are counted and sized."""

    def make(size: Size) -> Config:
        return name, _common(size) | {"num_heads": size.width // size.head, "head_dim": size.head} | more

    return make


def _hybrid(make: Callable[[Size], Config]) -> Callable[[Size], Config]:
    """The same with softmax attention in its last layer."""

    def hybrid(size: Size) -> Config:
        name, fields = make(size)
        heads = size.width // size.head
        attention = {"layers": [size.layers - 1], "num_heads": heads, "num_kv_heads": max(1, heads // 2)}
        return name, fields | {"attn": attention | {"window_size": None}}

    return hybrid


def _mamba(size: Size) -> Config:
    return "MambaConfig", _common(size) | {"state_size": min(size.state, 16)}


def _mamba2(size: Size) -> Config:
    return "Mamba2Config", _common(size) | {"state_size": size.state, "head_dim": min(size.head, 64)}


def _samba(size: Size) -> Config:
    heads = size.width // size.head
    attention = {"layers": list(range(1, size.layers, 2)), "num_heads": heads, "num_kv_heads": heads}
    attention |= {"qkv_bias": False, "window_size": 2048, "rope_theta": 10000.0}
    return "SambaConfig", _common(size) | {"state_size": min(size.state, 16), "attn": attention}


def _expanded(name: str) -> Callable[[Size], Config]:
    """A model whose keys are ``size.head`` times as many as its heads."""

    def make(size: Size) -> Config:
        return name, _common(size) | {"expand_ratio": size.head}

    return make


def _rwkv7(size: Size) -> Config:
    return "RWKV7Config", _common(size) | {"head_dim": size.head}


_GLA, _GATED_DELTA = _heads("GLAConfig"), _sized("GatedDeltaNetConfig", expand_v=2)

FLA_FAMILIES: dict[str, Callable[[Size], Config]] = {
    "fla.linear_attn": _heads("LinearAttentionConfig"),
    "fla.retnet": _heads("RetNetConfig"),
    "fla.gla": _GLA,
    "fla.gla_hybrid": _hybrid(_GLA),
    "fla.hgrn": lambda size: ("HGRNConfig", _common(size)),
    "fla.hgrn2": _expanded("HGRN2Config"),
    "fla.gsa": _heads("GSAConfig", num_slots=16),
    "fla.lightnet": _expanded("LightNetConfig"),
    "fla.delta_net": _heads("DeltaNetConfig"),
    "fla.gated_deltanet": _GATED_DELTA,
    "fla.gated_deltanet_hybrid": _hybrid(_GATED_DELTA),
    "fla.gated_deltaproduct": _sized("GatedDeltaProductConfig", num_householder=2, use_forget_gate=True),
    "fla.kda": _sized("KDAConfig"),
    "fla.comba": _sized("CombaConfig"),
    "fla.mamba": _mamba,
    "fla.mamba2": _mamba2,
    "fla.samba": _samba,
    "fla.rwkv6": _heads("RWKV6Config"),
    "fla.rwkv7": _rwkv7,
    "fla.transformer": _heads("TransformerConfig"),
}


def fla_model(name: str, size: Size | None = None, seed: int = 0, **changes: Any) -> Any:
    """A causal language model of one of fla's families, in float32 on the CPU, in eval mode, with random weights.

    Those with softmax layers look for flash-attn as they are made, and are made while fla's names are installed.

    Raises:
        ValueError: an unknown family.
        ImportError: fla cannot be imported here.
    """
    if name not in FLA_FAMILIES:
        raise ValueError(f"name: got {name!r}; takes {', '.join(sorted(FLA_FAMILIES))}")
    import torch
    from fla import models
    from transformers import AutoModelForCausalLM

    from phistate.compat import install

    config, fields = FLA_FAMILIES[name](Size() if size is None else size)
    looks_for_flash_attention = config == "TransformerConfig" or "attn" in fields
    with install("fla") if looks_for_flash_attention else nullcontext(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(getattr(models, config)(**fields | changes), dtype=torch.float32)
    return model.eval()
