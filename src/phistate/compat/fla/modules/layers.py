"""Where people import fla's modules and what stands around them from, and what stands there where fla is not."""

from __future__ import annotations

from phistate.compat.fla.modules import (
    activations,
    blocks,
    conv,
    gated_norm_layers,
    gated_norms,
    losses,
    norm_layers,
    norms,
    padding,
    rotary,
    rwkv,
)
from phistate.compat.fla.modules.token_shift import token_shift
from phistate.compat.fla.ops import gates
from phistate.compat.mamba_ssm import gated

_NORMS: dict[str, object] = {
    "GroupNorm": norm_layers.GroupNorm,
    "GroupNormLinear": norm_layers.GroupNormLinear,
    "LayerNorm": norm_layers.LayerNorm,
    "LayerNormLinear": norm_layers.LayerNormLinear,
    "RMSNorm": norm_layers.RMSNorm,
    "RMSNormLinear": norm_layers.RMSNormLinear,
}
_NORM_FUNCTIONS: dict[str, object] = {
    "group_norm": norms.group_norm,
    "group_norm_linear": norms.group_norm_linear,
    "layer_norm": norms.layer_norm,
    "layer_norm_linear": norms.layer_norm_linear,
    "rms_norm": norms.rms_norm,
    "rms_norm_linear": norms.rms_norm_linear,
}
_GATED_NORMS: dict[str, object] = {
    "FusedLayerNormGated": gated_norm_layers.FusedLayerNormGated,
    "FusedLayerNormSwishGate": gated_norm_layers.FusedLayerNormSwishGate,
    "FusedLayerNormSwishGateLinear": gated_norm_layers.FusedLayerNormGatedLinear,
    "FusedRMSNormGated": gated_norm_layers.FusedRMSNormGated,
    "FusedRMSNormSwishGate": gated_norm_layers.FusedRMSNormSwishGate,
    "FusedRMSNormSwishGateLinear": gated_norm_layers.FusedRMSNormGatedLinear,
}
_GATED_LINEARS: dict[str, object] = {
    "FusedLayerNormGatedLinear": gated_norm_layers.FusedLayerNormGatedLinear,
    "FusedRMSNormGatedLinear": gated_norm_layers.FusedRMSNormGatedLinear,
}
_GATED_FUNCTIONS: dict[str, object] = {
    "layer_norm_gated": gated_norms.layer_norm_gated,
    "layer_norm_swish_gate_linear": gated_norms.layer_norm_swish_gate_linear,
    "rms_norm_gated": gated_norms.rms_norm_gated,
    "rms_norm_swish_gate_linear": gated_norms.rms_norm_swish_gate_linear,
}
_MAMBA_FUNCTIONS: dict[str, object] = {"layernorm_fn": gated.layernorm_fn, "rmsnorm_fn": gated.rmsnorm_fn}
_L2: dict[str, object] = {"L2Norm": norm_layers.L2Norm}
_L2_FUNCTIONS: dict[str, object] = {"l2_norm": norms.l2norm, "l2norm": norms.l2norm}
_CONVOLUTION: dict[str, object] = {
    "ShortConvolution": blocks.ShortConvolution,
    "causal_conv1d": conv.causal_conv1d,
    "causal_conv1d_update": conv.causal_conv1d_update,
    "causal_conv1d_update_states": conv.causal_conv1d_update_states,
}
_LOSSES: dict[str, object] = {
    "FusedCrossEntropyLoss": blocks.FusedCrossEntropyLoss,
    "FusedKLDivLoss": blocks.FusedKLDivLoss,
    "FusedLinearCrossEntropyLoss": blocks.FusedLinearCrossEntropyLoss,
}
_OTHERS: dict[str, object] = {
    "GatedMLP": blocks.GatedMLP,
    "RotaryEmbedding": blocks.RotaryEmbedding,
    "ShortConvolution": blocks.ShortConvolution,
}

STAND_INS: dict[str, dict[str, object]] = {
    "fla.layers.utils": {
        "get_unpad_data": padding.get_unpad_data,
        "index_first_axis": padding.index_first_axis,
        "index_put_first_axis": padding.index_put_first_axis,
        "pad_input": padding.pad_input,
        "unpad_input": padding.unpad_input,
    },
    "fla.modules": {**_NORMS, **_GATED_NORMS, **_L2, **_LOSSES, **_OTHERS},
    "fla.modules.activations": {
        "ACT2FN": activations.ACT2FN,
        "elu_p1": activations.elu_p1,
        "fast_gelu_impl": activations.fast_gelu,
        "logsigmoid": activations.logsigmoid,
        "powglu": activations.powglu,
        "powglu_linear": activations.powglu_linear,
        "sigmoid": activations.sigmoid,
        "sigmoidglu": activations.sigmoidglu,
        "sigmoidglu_linear": activations.sigmoidglu_linear,
        "sqrelu": activations.sqrelu,
        "swiglu": activations.swiglu,
        "swiglu_linear": activations.swiglu_linear,
        "swish": activations.swish,
    },
    "fla.modules.causal_conv1d": _CONVOLUTION,
    "fla.modules.convolution": _CONVOLUTION,
    "fla.modules.fused_cross_entropy": {
        "FusedCrossEntropyLoss": blocks.FusedCrossEntropyLoss,
        "cross_entropy_loss": losses.cross_entropy_loss,
    },
    "fla.modules.fused_kl_div": {
        "FusedKLDivLoss": blocks.FusedKLDivLoss,
        "fused_kl_div_loss": losses.fused_kl_div_loss,
    },
    "fla.modules.fused_linear_cross_entropy": {
        "FusedLinearCrossEntropyLoss": blocks.FusedLinearCrossEntropyLoss,
        "fused_linear_cross_entropy_loss": losses.fused_linear_cross_entropy_loss,
    },
    "fla.modules.fused_norm_gate": {**_GATED_NORMS, **_GATED_LINEARS, **_GATED_FUNCTIONS},
    "fla.modules.l2norm": {**_L2, **_L2_FUNCTIONS},
    "fla.modules.layernorm": {**_NORMS, **_NORM_FUNCTIONS},
    "fla.modules.layernorm_gated": _MAMBA_FUNCTIONS,
    "fla.modules.mlp": {"GatedMLP": blocks.GatedMLP},
    "fla.modules.norm": {**_NORMS, **_GATED_NORMS, **_GATED_LINEARS, **_L2},
    "fla.modules.norm.fused_norm_gate": {**_GATED_NORMS, **_GATED_LINEARS, **_GATED_FUNCTIONS},
    "fla.modules.norm.l2norm": {**_L2, **_L2_FUNCTIONS},
    "fla.modules.norm.layernorm": {**_NORMS, **_NORM_FUNCTIONS},
    "fla.modules.norm.layernorm_gated": _MAMBA_FUNCTIONS,
    "fla.modules.rotary": {
        "RotaryEmbedding": blocks.RotaryEmbedding,
        "rotary_embedding": rotary.rotary_embedding,
    },
    "fla.modules.token_shift": {"token_shift": token_shift},
    "fla.ops.common.gate": {"fused_beta_sigmoid": gates.fused_beta_sigmoid},
    "fla.ops.gated_delta_rule.gate": {"fused_gdn_gate": gates.fused_gdn_gate},
    "fla.ops.kda.gate": {"fused_kda_gate": gates.fused_kda_gate},
    "fla.ops.rwkv7.channel_mixing": {"channel_mixing_rwkv7": rwkv.channel_mixing_rwkv7},
    "fla.ops.rwkv7.fused_addcmul": {"fused_addcmul_rwkv7": rwkv.fused_addcmul_rwkv7},
    "fla.ops.rwkv7.fused_k_update": {"fused_k_rwkv7": rwkv.fused_k_rwkv7},
    "fla.ops.rwkv7.gate_output_correction": {"gate_output_correction": rwkv.gate_output_correction},
    "fla.ops.utils.index": {
        "prepare_cu_seqlens_from_lens": padding.prepare_cu_seqlens_from_lens,
        "prepare_cu_seqlens_from_mask": padding.prepare_cu_seqlens_from_mask,
        "prepare_lens": padding.prepare_lens,
        "prepare_lens_from_mask": padding.prepare_lens_from_mask,
    },
    "fla.utils": {"tensor_cache": padding.tensor_cache},
}
"""By the path it is imported from, a name of fla's and what we offer for it."""
