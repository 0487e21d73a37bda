"""The functions of transformers that phistate has a kernel for: name and signature in, replacement out.

Checked against transformers 5.24. A name whose signature differs is another function and is left alone.
"""

from __future__ import annotations

from collections.abc import Callable

from phistate.compat.functions import Function, Hook
from phistate.hf import conv, delta, diagonal, griffin, lightning, mamba, mlstm


def _always(function: Function) -> Callable[[Function], Function]:
    return lambda original: function


_DELTA = "initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, **kwargs"
_STEP = "state, hidden_states, dt, A, B, C, D=None, dt_bias=None, dt_softplus=False, z=None, **kwargs"

# By name in the module; "Class.method" where a method is all there is to replace.
HOOKS: dict[str, Hook] = {
    "torch_chunk_gated_delta_rule": Hook(
        f"query, key, value, g, beta, chunk_size=64, {_DELTA}",
        "linear_attention(write='delta'), a decay per head",
        _always(delta.delta_rule),
    ),
    "torch_recurrent_gated_delta_rule": Hook(
        f"query, key, value, g, beta, {_DELTA}",
        "linear_attention_step_(write='delta'), a decay per head: the decode step, in place",
        delta.delta_rule_steps,
    ),
    "chunk_kimi_delta_attention": Hook(
        f"query, key, value, g, beta, chunk_size=64, {_DELTA}",
        "linear_attention(write='delta'), a decay per channel",
        _always(delta.delta_rule),
    ),
    "recurrent_kimi_delta_attention": Hook(
        "query, key, value, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel=False, **kwargs",
        "linear_attention_step_(write='delta'), a decay per channel: the decode step, in place",
        delta.delta_rule_steps,
    ),
    "mamba2_chunk_scan": Hook(
        "hidden_states, dt, A, B, C, chunk_size, D=None, dt_bias=None, initial_states=None, dt_softplus=False, "
        "dt_limit=(0.0, inf), return_final_states=False, **kwargs",
        "mamba2_scan",
        _always(mamba.ssd),
    ),
    "mamba2_selective_state_update": Hook(_STEP, "selective_scan_step_, in place", mamba.ssd_update),
    "mamba2_split_conv1d_scan_combined": Hook(
        "zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, initial_states=None, dt_limit=(0.0, inf), "
        "return_final_states=False, activation='silu', rmsnorm_weight=None, rmsnorm_eps=1e-06, outproj_weight=None, "
        "outproj_bias=None, headdim=None, ngroups=1, norm_before_gate=True, **kwargs",
        "nothing fused: training takes the same path as inference",
        _always(mamba.no_shortcut),
    ),
    "mamba_selective_scan": Hook(
        "hidden_states, dt, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False, "
        "use_mambapy=False, use_associative_scan=False, **kwargs",
        "selective_scan",
        _always(mamba.selective),
    ),
    "mamba_selective_state_update": Hook(_STEP, "selective_scan_step_, in place", mamba.selective_update),
    "mamba_inner_fn": Hook(
        "xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias, A, B=None, "
        "C=None, D=None, delta_bias=None, delta_softplus=True, b_rms_weight=None, c_rms_weight=None, "
        "dt_rms_weight=None, b_c_dt_rms_eps=1e-06, **kwargs",
        "nothing fused: training takes the same path as inference",
        _always(mamba.no_shortcut),
    ),
    "causal_conv1d_fn": Hook(
        "hidden_states, weight, bias=None, activation=None, **kwargs", "causal_conv1d", conv.convolution
    ),
    "causal_conv1d_update": Hook(
        "hidden_states, conv_state, weight, bias=None, activation=None", "causal_conv1d_step_, in place", conv.update
    ),
    "MiniMaxLightningAttention.forward": Hook(
        "self, hidden_states, position_embeddings, attention_mask, cache=None, **kwargs",
        "linear_attention, a constant decay per head",
        _always(lightning.forward),
        tensor=1,
    ),
    "RecurrentGemmaRglru._rnn_scan": Hook(
        "self, hidden_states, recurrent_gate, reset, recurrent_states, acc_dtype=torch.float32",
        "selective_scan with one state entry per channel",
        diagonal.rnn_scan,
        tensor=1,
    ),
    "RecurrentGemmaRecurrentBlock.forward": Hook(
        "self, input_states, position_ids, attention_mask, use_cache=True, **kwargs",
        "causal_conv1d and causal_conv1d_step_ inside it",
        griffin.block,
        tensor=1,
    ),
    "xLSTMBackend.forward": Hook(
        "self, query, key, value, igate, fgate, c_initial=None, n_initial=None, m_initial=None, "
        "return_last_states=None, mode=None",
        "linear_attention with the denominator as one more column; linear_attention_step_ in place",
        mlstm.backend,
        tensor=1,
    ),
}

# Linear recurrences that are known and not replaced, and why.
UNCOVERED: dict[str, str] = {
    "rwkv_linear_attention_cpu": "RWKV-4 weighs the current token by a bonus of its own, which the equation lacks",
}
