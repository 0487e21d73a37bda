"""MiniMax's lightning attention, the whole layer: transformers has no function inside it that could be replaced."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phistate.compat.packing import packing
from phistate.compat.states import state_of
from phistate.ops.linear_attention import linear_attention


def forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: object,
    attention_mask: Tensor | None,
    cache: Any = None,
    cu_seq_lens_q: Tensor | None = None,
    seq_idx: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: object,
) -> tuple[Tensor, Tensor]:
    """S ← e^-slope S + k vᵀ, o = Sᵀ q per head, then norm and gate; ``self`` is a MiniMaxLightningAttention.

    A padded step changes nothing here, on either side; the state is float32 and goes on over any number of tokens.
    The layer takes positions and flags like every attention layer and needs none of them. ``past_key_values`` is what
    callers before transformers 5.40 may still call the cache.
    """
    cache = past_key_values if cache is None else cache
    heads = (*hidden_states.shape[:2], self.num_attention_heads, 3 * self.head_dim)
    q, k, v = self.act_fn(self.qkv_proj(hidden_states)).view(heads).split(self.head_dim, dim=-1)
    mask = None if attention_mask is None else attention_mask.bool()
    kept = None if cache is None else cache.get_linear_cache(self.layer_idx)
    pack = packing(hidden_states, None, cu_seq_lens_q, seq_idx)
    if pack is not None:
        q, k, v = (pack.fold(x) for x in (q, k, v))
        mask = None if mask is None else pack.fold(mask)
        kept = pack.enter(kept)
    out, state = linear_attention(
        q,
        k,
        v,
        decay=-self.slope_rate.flatten().to(torch.float32),
        scale=1.0,
        initial_state=None if kept is None else state_of(kept, q),
        return_state=True,
        mask=mask,
        cu_seqlens=None if pack is None else pack.offsets,
    )
    s = state.s
    if pack is not None:
        out, s = pack.unfold(out), pack.leave(s)
    out = self.norm(out.flatten(2))
    out = self.out_proj(torch.sigmoid(self.output_gate(hidden_states)) * out)
    if cache is not None:
        cache.set_linear_cache(self.layer_idx, s)
    return out, s
