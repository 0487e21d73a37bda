"""Hybrid transformers models by name, of any size, with random weights: what ``bench model`` and the tests run.

Each family keeps its own proportions (Qwen3.5: three linear layers to one of attention, values as wide as twice the
model; Mamba: an expansion of two); what varies is how deep, how wide, and how large a head and a state are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Size:
    """How large a model of a family is.

    Args:
        layers: how many layers.
        width: the model's hidden size; a multiple of ``head``.
        head: dimension of one head, of attention and of a recurrent state's rows.
        state: columns of a Mamba state, N.
        vocab: size of the vocabulary.
    """

    layers: int = 8
    width: int = 768
    head: int = 128
    state: int = 128
    vocab: int = 32768


Config = tuple[str, dict[str, Any]]

LINEAR, FULL = "linear_attention", "full_attention"


def _layers(size: Size, attention_every: int = 4, linear: str = LINEAR, full: str = FULL) -> list[str]:
    """Attention in every fourth layer, as most hybrids have it, and in the last of a shallow model."""
    every = min(attention_every, size.layers)
    return [full if (i + 1) % every == 0 else linear for i in range(size.layers)]


def _common(size: Size) -> dict[str, Any]:
    heads = size.width // size.head
    return {
        "vocab_size": size.vocab,
        "hidden_size": size.width,
        "intermediate_size": 3 * size.width,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 2) if heads % 2 == 0 else heads,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _gated_delta(size: Size, key_heads: int | None = None) -> dict[str, Any]:
    value_heads = 2 * size.width // size.head
    return {
        "linear_num_key_heads": key_heads or value_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": size.head,
        "linear_value_head_dim": size.head,
    }


def _experts(size: Size) -> dict[str, Any]:
    return {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": size.width,
        "shared_expert_intermediate_size": size.width,
    }


def _qwen(name: str, experts: bool) -> Callable[[Size], Config]:
    def make(size: Size) -> Config:
        fields = {**_common(size), **_gated_delta(size, size.width // size.head), "head_dim": size.head}
        fields |= {"num_hidden_layers": size.layers, "layer_types": _layers(size)}
        return name, fields | (_experts(size) if experts else {})

    return make


def _olmo_hybrid(size: Size) -> Config:
    fields = {**_common(size), **_gated_delta(size)}
    return "OlmoHybridConfig", fields | {"num_hidden_layers": size.layers, "layer_types": _layers(size)}


def _lara_mini(size: Size) -> Config:
    name, fields = _qwen("LaraMiniConfig", True)(size)
    return name, fields | {"layer_types": _layers(size, full="sliding_attention"), "sliding_window": 64}


def _qwen4_exp(size: Size) -> Config:
    name, fields = _qwen("Qwen4ExpTextConfig", True)(size)
    fields |= {"layer_types": _layers(size, full="indexed_attention"), "hc_lowrank": size.head}
    fields |= {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": size.head}
    return name, fields | {"indexer_budget": 2048, "indexer_compress_ratio": 4}


def _mla(size: Size) -> dict[str, Any]:
    """Latent attention beside KDA, as Kimi-Linear has it."""
    return {
        "num_key_value_heads": size.width // size.head,
        "kv_lora_rank": 2 * size.head,
        "qk_rope_head_dim": size.head // 2,
        "qk_nope_head_dim": size.head,
        "v_head_dim": size.head,
        "moe_intermediate_size": size.width,
        "num_experts_per_tok": 2,
    }


def _kimi_linear(size: Size) -> Config:
    fields = {**_common(size), **_mla(size), "num_local_experts": 4, "num_hidden_layers": size.layers}
    # Kimi-Linear-48B: 32 heads of 128 over a width of 2304 in both kinds of layers, 4 widths of it active in an MLP.
    heads = max(1, round(16 * size.width / (9 * size.head)))
    fields |= {"num_attention_heads": heads, "num_key_value_heads": heads, "intermediate_size": 4 * size.width}
    fields |= {"linear_head_dim": size.head, "linear_num_heads": heads}
    # Dense but for the last layer: the size of a model says more then than which experts were hit.
    mlps = ["dense"] * (size.layers - 1) + ["sparse"]
    return "KimiLinearConfig", fields | {"layer_types": _layers(size), "mlp_layer_types": mlps}


def _glm5_next(size: Size) -> Config:
    fields = {**_common(size), **_mla(size), "n_routed_experts": 4, "num_hidden_layers": size.layers}
    fields |= {"q_lora_rank": size.head, "qk_rope_head_dim": 0, "layer_types": _layers(size, full="indexed_attention")}
    fields |= {"linear_head_dim": size.head, "linear_num_heads": size.width // size.head}
    fields |= {"index_n_heads": 2, "index_head_dim": size.head}
    fields |= {"mlp_layer_types": ["dense"] * (size.layers - 1) + ["sparse"]}
    # There is no text-only head, and a vision tower of next to nothing is not run.
    eye = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": size.width}
    eye |= {"patch_size": 4, "image_size": 16, "projection_intermediate_size": 32}
    return "Glm5NextConfig", {"text_config": fields, "vision_config": eye}


def _bailing_hybrid(size: Size) -> Config:
    fields = {**_common(size), **_mla(size), "num_local_experts": 4, "num_hidden_layers": size.layers}
    fields |= {"head_dim": size.head, "n_group": 1, "topk_group": 1, "num_mtp_layers": 0, "layer_types": _layers(size)}
    return "BailingHybridConfig", fields | {"mlp_layer_types": ["dense"] * (size.layers - 1) + ["sparse"]}


def _mamba(name: str) -> Callable[[Size], Config]:
    def make(size: Size) -> Config:
        keep = ("vocab_size", "hidden_size", "pad_token_id", "bos_token_id", "eos_token_id")
        fields = {key: value for key, value in _common(size).items() if key in keep}
        # N = 16 in every published Mamba-1.
        return name, fields | {"num_hidden_layers": size.layers, "state_size": min(size.state, 16)}

    return make


def _jamba(size: Size) -> Config:
    fields = {**_common(size), "num_hidden_layers": size.layers, "mamba_d_state": min(size.state, 16)}
    fields |= {"attn_layer_period": min(4, size.layers), "attn_layer_offset": min(4, size.layers) - 1}
    return "JambaConfig", fields | {"num_experts": 4, "expert_layer_period": 2, "expert_layer_offset": 1}


def _zamba(size: Size) -> Config:
    fields = {**_common(size), "num_hidden_layers": size.layers, "mamba_d_state": min(size.state, 16)}
    fields |= {"num_key_value_heads": fields["num_attention_heads"], "n_mamba_heads": 2}
    return "ZambaConfig", fields | {"layers_block_type": _layers(size, 2, full="hybrid")}


def _mamba2(size: Size) -> Config:
    name, fields = _mamba("Mamba2Config")(size)
    head = min(size.head, 64)
    fields |= {"state_size": size.state, "head_dim": head, "num_heads": 2 * size.width // head}
    return name, fields | {"n_groups": 1, "tie_word_embeddings": True}


def _ssd(size: Size, chunk: str = "mamba_chunk_size") -> dict[str, Any]:
    head = min(size.head, 64)
    return {
        "mamba_n_heads": 2 * size.width // head,
        "mamba_d_head": head,
        "mamba_n_groups": 2,
        "mamba_d_state": size.state,
        "num_hidden_layers": size.layers,
    }


def _bamba(size: Size) -> Config:
    attention = [i for i, kind in enumerate(_layers(size)) if kind == FULL]
    return "BambaConfig", {**_common(size), **_ssd(size), "attn_layer_indices": attention}


def _falcon_h1(size: Size) -> Config:
    return "FalconH1Config", {**_common(size), **_ssd(size), "mamba_d_ssm": 2 * size.width}


def _granite(size: Size) -> Config:
    fields = {**_common(size), **_ssd(size), "layer_types": _layers(size), "num_local_experts": 4}
    return "GraniteMoeHybridConfig", fields | {"shared_intermediate_size": size.width}


def _nemotron_h(size: Size) -> Config:
    head = min(size.head, 64)
    kinds = [LINEAR, "mlp", FULL, "mlp"]
    fields = {**_common(size), "head_dim": size.head, "ssm_state_size": size.state, "mamba_head_dim": head}
    fields |= {"mamba_num_heads": 2 * size.width // head, "n_groups": 2}
    return "NemotronHConfig", fields | {"layer_types": [kinds[i % 4] for i in range(size.layers)]}


def _zamba2(size: Size) -> Config:
    fields = {**_common(size), "num_hidden_layers": size.layers, "mamba_d_state": size.state, "mamba_ngroups": 1}
    fields |= {"n_mamba_heads": 2 * size.width // min(size.head, 64), "adapter_rank": size.head}
    fields |= {"num_key_value_heads": fields["num_attention_heads"]}
    return "Zamba2Config", fields | {"layers_block_type": _layers(size, full="hybrid")}


def _lfm2(size: Size) -> Config:
    fields = {**_common(size), "num_hidden_layers": size.layers, "block_multiple_of": size.head}
    return "Lfm2Config", fields | {"layer_types": _layers(size, linear="conv")}


def _lfm2_moe(size: Size) -> Config:
    fields = {**_common(size), "num_hidden_layers": size.layers, "moe_intermediate_size": size.width}
    fields |= {"num_experts": 4, "num_experts_per_tok": 2, "num_dense_layers": 1}
    return "Lfm2MoeConfig", fields | {"layer_types": _layers(size, linear="conv")}


def _lfm3(size: Size) -> Config:
    kinds = _layers(size, linear="conv")
    kinds[2::4] = ["sliding_attention" if kind == "conv" else kind for kind in kinds[2::4]]
    fields = {**_common(size), "num_hidden_layers": size.layers, "layer_types": kinds}
    return "Lfm3Config", fields | {"head_dim": size.head, "sliding_window": 64}


# Models that also see have no text-only head, and a tower of next to nothing is not run by text.
_EYE = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4}


def _lfm2_vl(size: Size) -> Config:
    eye = {**_EYE, "intermediate_size": 32, "num_patches": 16, "vision_use_head": False}
    fields = {"text_config": _lfm2(size)[1], "vision_config": eye, "projector_hidden_size": 32}
    return "Lfm2VlConfig", fields | {"image_token_id": size.vocab}


def _lfm3_vl(size: Size) -> Config:
    eye = {**_EYE, "intermediate_size": 32, "num_key_value_heads": 2}
    fields = {"text_config": _lfm3(size)[1], "vision_config": eye, "projector_hidden_size": 32}
    return "Lfm3VlConfig", fields | {"image_token_id": size.vocab, "video_token_id": size.vocab + 1}


def _nemotron_h_omni(size: Size) -> Config:
    eye = {**_EYE, "image_size": 16, "max_img_size": 16, "video_temporal_patch_size": 2}
    fields = {"text_config": _nemotron_h(size)[1], "vision_config": eye, "projector_hidden_size": 32}
    fields |= {"vision_hidden_size": 32, "image_token_id": size.vocab, "video_token_id": size.vocab + 1}
    return "NemotronH_Omni_Reasoning_V3_Config", fields


def _inkling(name: str) -> Callable[[Size], Config]:
    def make(size: Size) -> Config:
        common = _common(size)
        heads, keys = common["num_attention_heads"], common["num_key_value_heads"]
        fields = {**common, "num_hidden_layers": size.layers, "head_dim": size.head, "swa_head_dim": size.head}
        fields |= {"swa_num_attention_heads": heads, "swa_num_key_value_heads": keys, "sliding_window_size": 64}
        fields |= {"layer_types": _layers(size, linear="hybrid_sliding", full="hybrid")}
        fields |= {"unpadded_vocab_size": size.vocab, "moe_intermediate_size": size.width, "n_routed_experts": 4}
        return name, fields | {"num_experts_per_tok": 2}

    return make


def _inkling2_loop(size: Size) -> Config:
    name, fields = _inkling("Inkling2LoopTextConfig")(size)
    fields |= {
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": max(1, size.layers - 1),
    }
    return name, fields | {"loop_gate_rank": size.head}


def _minimax(size: Size) -> Config:
    fields = {**_common(size), "num_hidden_layers": size.layers, "head_dim": size.head, "num_local_experts": 4}
    return "MiniMaxConfig", fields | {"layer_types": _layers(size)}


def _recurrent_gemma(size: Size) -> Config:
    fields = {**_common(size), "num_hidden_layers": size.layers, "lru_width": size.width}
    return "RecurrentGemmaConfig", fields | {"attention_window_size": 2048}


def _xlstm(size: Size) -> Config:
    # transformers' cache rounds the width of keys and of values up to such a multiple, and its layers do not.
    if size.width % 64:
        raise ValueError(f"width: got {size.width}; takes a multiple of 64 for xlstm")
    fields = {**_common(size), "num_hidden_layers": size.layers, "num_heads": size.width // size.head}
    return "xLSTMConfig", fields | {"qk_dim_factor": 0.5 if size.width % 128 == 0 else 1.0}


FAMILIES: dict[str, Callable[[Size], Config]] = {
    "qwen3_5": _qwen("Qwen3_5TextConfig", False),
    "qwen3_5_moe": _qwen("Qwen3_5MoeTextConfig", True),
    "qwen3_next": _qwen("Qwen3NextConfig", True),
    "qwen4_exp": _qwen4_exp,
    "olmo_hybrid": _olmo_hybrid,
    "lara_mini": _lara_mini,
    "kimi_linear": _kimi_linear,
    "glm5_next": _glm5_next,
    "bailing_hybrid": _bailing_hybrid,
    "mamba": _mamba("MambaConfig"),
    "falcon_mamba": _mamba("FalconMambaConfig"),
    "jamba": _jamba,
    "zamba": _zamba,
    "mamba2": _mamba2,
    "bamba": _bamba,
    "falcon_h1": _falcon_h1,
    "granitemoehybrid": _granite,
    "nemotron_h": _nemotron_h,
    "nemotron_h_omni": _nemotron_h_omni,
    "zamba2": _zamba2,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2_moe,
    "lfm2_vl": _lfm2_vl,
    "lfm3": _lfm3,
    "lfm3_vl": _lfm3_vl,
    "inkling": _inkling("InklingTextConfig"),
    "inkling2": _inkling("Inkling2TextConfig"),
    "inkling2_loop": _inkling2_loop,
    "minimax": _minimax,
    "recurrent_gemma": _recurrent_gemma,
    "xlstm": _xlstm,
}


def family_config(name: str, size: Size | None = None, **changes: Any) -> Any:
    """A transformers config of the family, at the size given, with single fields changed.

    Raises:
        ValueError: an unknown family, or a width that it cannot have.
    """
    import transformers

    if name not in FAMILIES:
        raise ValueError(f"name: got {name!r}; takes {', '.join(sorted(FAMILIES))}")
    config, fields = FAMILIES[name](Size() if size is None else size)
    return getattr(transformers, config)(**fields, **changes)


def random_model(config: Any, seed: int = 0, lively: bool = False) -> Any:
    """A causal language model of ``config`` in float32 on the CPU, in eval mode, with random weights.

    Args:
        config: a transformers config.
        seed: of the weights.
        lively: redraw every matrix but those of time steps and rates with deviation 0.7/√inputs. The library's own
            initialisation is so small that a wrong layer hardly shows in the logits.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    auto = AutoModelForImageTextToText if "vision_config" in config.sub_configs else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(config, dtype=torch.float32)
        if lively:
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if parameter.ndim > 1 and "A_log" not in name and "dt_" not in name and not name.endswith(".D"):
                        parameter.normal_(std=0.7 * parameter.shape[-1] ** -0.5)
    return model.eval()
