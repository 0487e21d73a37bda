"""fla.ops: one adapter a function, by what it computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from phistate.compat.fla.ops import additive, delta, diagonal, erase, gated, polynomial, rwkv

Function = Callable[..., Any]

# By what runs, then by the module of fla's where the function is found.
OPS: dict[str, dict[str, list[Function]]] = {
    "linear_attention": {
        "fla.ops.linear_attn": [
            additive.chunk_linear_attn,
            additive.fused_chunk_linear_attn,
            additive.fused_recurrent_linear_attn,
        ],
        "fla.ops.simple_gla": [
            additive.chunk_simple_gla,
            additive.fused_chunk_simple_gla,
            additive.fused_recurrent_simple_gla,
            additive.parallel_simple_gla,
        ],
        "fla.ops.retention": [
            additive.chunk_retention,
            additive.fused_chunk_retention,
            additive.fused_recurrent_retention,
            additive.parallel_retention,
        ],
        "fla.ops.lightning_attn": [additive.chunk_lightning_attn, additive.fused_recurrent_lightning_attn],
        "fla.ops.gla": [additive.chunk_gla, additive.fused_recurrent_gla],
    },
    "linear_attention on the features of a polynomial": {
        "fla.ops.based": [polynomial.parallel_based, polynomial.fused_chunk_based],
        "fla.ops.rebased": [polynomial.parallel_rebased],
    },
    "linear_attention, keys and decays made of a running sum": {
        "fla.ops.lightnet": [gated.chunk_lightnet, gated.fused_recurrent_lightnet],
        "fla.ops.gsa.gate": [gated.fused_additive_gate],
    },
    "linear_attention twice, the first with a decay per channel of the values": {
        "fla.ops.gsa": [gated.chunk_gsa, gated.fused_recurrent_gsa],
    },
    "linear_attention, which reads before it writes": {
        "fla.ops.rwkv6": [rwkv.chunk_rwkv6, rwkv.fused_recurrent_rwkv6],
    },
    "linear_attention(write='delta')": {
        "fla.ops.delta_rule": [delta.chunk_delta_rule, delta.fused_recurrent_delta_rule],
        "fla.ops.gated_delta_rule": [delta.chunk_gated_delta_rule, delta.fused_recurrent_gated_delta_rule],
        "fla.ops.kda": [delta.chunk_kda, delta.fused_recurrent_kda],
    },
    "linear_attention(write='delta'), several micro-steps a token": {
        "fla.ops.gated_delta_product": [delta.chunk_gated_delta_product],
    },
    "linear_attention(write='delta', erase=…)": {
        "fla.ops.comba": [erase.chunk_comba, erase.fused_recurrent_comba],
        "fla.ops.gdn2": [erase.chunk_gdn2, erase.fused_recurrent_gdn2],
    },
    "linear_attention(write='delta', erase=…), two micro-steps a token": {
        "fla.ops.generalized_delta_rule": [
            rwkv.chunk_dplr_delta_rule,
            rwkv.fused_recurrent_dplr_delta_rule,
            rwkv.chunk_iplr_delta_rule,
            rwkv.fused_recurrent_iplr_delta_rule,
        ],
        "fla.ops.rwkv7": [rwkv.chunk_rwkv7, rwkv.fused_recurrent_rwkv7],
        "fla.ops.rwkv7.fused_recurrent": [rwkv.fused_mul_recurrent_rwkv7],
    },
    "selective_scan with one state entry per channel": {
        "fla.ops.hgrn": [diagonal.chunk_hgrn, diagonal.fused_recurrent_hgrn],
    },
}
