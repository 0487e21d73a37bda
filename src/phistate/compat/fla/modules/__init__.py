"""What stands around the recurrence in fla's models, in plain PyTorch under fla's own signatures.

:data:`MODULES` says which function of fla each adapter stands for; fla's kernels need a GPU, these do not, and
autograd differentiates them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from phistate.compat.fla.modules import (
    activations,
    attention,
    conv,
    gated_norms,
    losses,
    norms,
    rotary,
    rwkv,
    token_shift,
)
from phistate.compat.fla.ops import gates
from phistate.compat.mamba_ssm import gated

Adapter = Callable[..., Any]

MODULES: dict[str, dict[str, Adapter]] = {
    "fla.modules.activations.ops": {
        "sigmoid": activations.sigmoid,
        "elu_p1": activations.elu_p1,
        "logsigmoid": activations.logsigmoid,
        "swish": activations.swish,
        "bias_gelu_impl": activations.bias_gelu,
        "fast_gelu_impl": activations.fast_gelu,
        "sqrelu": activations.sqrelu,
        "swiglu": activations.swiglu,
        "swiglu_linear": activations.swiglu_linear,
        "sigmoidglu": activations.sigmoidglu,
        "sigmoidglu_linear": activations.sigmoidglu_linear,
        "powglu": activations.powglu,
        "powglu_linear": activations.powglu_linear,
    },
    "fla.modules.causal_conv1d.ops": {
        "causal_conv1d": conv.causal_conv1d,
        "causal_conv1d_update": conv.causal_conv1d_update,
        "causal_conv1d_update_states": conv.causal_conv1d_update_states,
    },
    "fla.modules.fused_cross_entropy.ops": {
        "cross_entropy_loss": losses.cross_entropy_loss,
        "FusedCrossEntropyLoss.forward": losses.cross_entropy_module,
    },
    "fla.modules.fused_kl_div.ops": {"fused_kl_div_loss": losses.fused_kl_div_loss},
    "fla.modules.fused_linear_cross_entropy.ops": {
        "fused_linear_cross_entropy_loss": losses.fused_linear_cross_entropy_loss,
    },
    "fla.modules.norm.fused_norm_gate": {
        "layer_norm_gated": gated_norms.layer_norm_gated,
        "rms_norm_gated": gated_norms.rms_norm_gated,
        "layer_norm_swish_gate_linear": gated_norms.layer_norm_swish_gate_linear,
        "rms_norm_swish_gate_linear": gated_norms.rms_norm_swish_gate_linear,
    },
    "fla.modules.norm.l2norm": {"l2norm": norms.l2norm},
    "fla.modules.norm.layernorm": {
        "layer_norm": norms.layer_norm,
        "group_norm": norms.group_norm,
        "rms_norm": norms.rms_norm,
        "layer_norm_linear": norms.layer_norm_linear,
        "rms_norm_linear": norms.rms_norm_linear,
        "group_norm_linear": norms.group_norm_linear,
    },
    "fla.modules.norm.layernorm_gated": {
        "layernorm_fn": gated.layernorm_fn,
        "rmsnorm_fn": gated.rmsnorm_fn,
    },
    "fla.modules.rotary.ops": {"rotary_embedding": rotary.rotary_embedding},
    "fla.modules.token_shift": {"token_shift": token_shift.token_shift},
    "fla.ops.common.gate": {"fused_beta_sigmoid": gates.fused_beta_sigmoid},
    "fla.ops.gated_delta_rule.gate": {"fused_gdn_gate": gates.fused_gdn_gate},
    "fla.ops.kda.gate": {"fused_kda_gate": gates.fused_kda_gate},
    "fla.ops.rwkv7.channel_mixing": {"channel_mixing_rwkv7": rwkv.channel_mixing_rwkv7},
    "fla.ops.rwkv7.fused_addcmul": {"fused_addcmul_rwkv7": rwkv.fused_addcmul_rwkv7},
    "fla.ops.rwkv7.fused_k_update": {"fused_k_rwkv7": rwkv.fused_k_rwkv7},
    "fla.ops.rwkv7.gate_output_correction": {"gate_output_correction": rwkv.gate_output_correction},
}
"""By the module of fla that defines the original, its name there, ``Class.method`` for a method: the adapter.

``layernorm_fn`` and ``rmsnorm_fn`` are mamba_ssm's own, under its signature.
"""

_FLASH_ATTENTION: dict[str, Adapter] = {
    "flash_attn_func": attention.flash_attn_func,
    "flash_attn_varlen_func": attention.flash_attn_varlen_func,
}

ABSENT: dict[str, dict[str, Adapter]] = {
    f"fla.layers.{name}": _FLASH_ATTENTION for name in ("attn", "bitattn", "mla", "moba", "rodimus")
}
"""Names that a module of fla has as None, or not at all, where flash-attn is not installed: what to set there."""
