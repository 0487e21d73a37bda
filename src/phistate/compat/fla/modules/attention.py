"""flash_attn's functions, which fla's softmax layers call: exact attention by torch's own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phistate.ops.checks import check_layout, packed_offsets
from phistate.ops.softmax_attention import softmax_attention


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor:
    """Softmax attention of ``q [B,Tq,Hq,D]`` over ``k, v [B,Tk,Hk,D]``, the queries being the last Tq positions.

    Args:
        q: ``[B,Tq,Hq,D]``.
        k: ``[B,Tk,Hk,D]``, Hk dividing Hq in interleaved groups.
        v: ``[B,Tk,Hk,V]``.
        dropout_p: 0.
        softmax_scale: None: D ** -0.5.
        causal: query i sees keys up to its own position.
        window_size: how many keys before and after its own position a query sees; -1: all of them.
        softcap: 0.
        alibi_slopes: None.
        deterministic: it always is.
        return_attn_probs: False.

    Raises:
        ValueError: an argument for which there is only that one value.
    """
    _check_unserved(dropout_p, softcap, alibi_slopes, return_attn_probs)
    check_layout(q=q, k=k, v=v)
    left, right = window_size
    right = 0 if causal else right
    Tq, Tk = q.shape[1], k.shape[1]
    if Tk == 0:
        return q.new_zeros(*q.shape[:3], v.shape[3])
    if right == 0 and Tq <= Tk:
        return softmax_attention(q, k, v, scale=softmax_scale, window=None if left < 0 else left + 1)
    if left < 0 and right < 0:
        return softmax_attention(q, k, v, scale=softmax_scale, causal=False)

    position = torch.arange(Tk - Tq, Tk, device=q.device).unsqueeze(1)
    key = torch.arange(Tk, device=q.device)
    seen = torch.ones(Tq, Tk, dtype=torch.bool, device=q.device)
    if left >= 0:
        seen &= key >= position - left
    if right >= 0:
        seen &= key <= position + right
    queries, keys, values = (x.transpose(1, 2) for x in (q, k, v))
    o = F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=seen, scale=softmax_scale, enable_gqa=q.shape[2] != k.shape[2]
    )
    return o.masked_fill(~seen.any(-1, keepdim=True), 0.0).transpose(1, 2)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    """:func:`flash_attn_func` of each of N packed sequences: ``q [ΣTq,Hq,D]``, ``k, v [ΣTk,Hk,D]``.

    ``cu_seqlens_q`` and ``cu_seqlens_k`` are ``[N+1]`` offsets; the longest lengths are not needed here. The other
    arguments are as there, and ``block_table`` is None.
    """
    _check_unserved(dropout_p, softcap, alibi_slopes, return_attn_probs)
    if block_table is not None:
        raise ValueError("block_table: got one; takes None, keys are not paged here")
    bounds = []
    for name, offsets, x in (("cu_seqlens_q", cu_seqlens_q, q), ("cu_seqlens_k", cu_seqlens_k, k)):
        read = packed_offsets(offsets, x.unsqueeze(0))
        if read is None:
            raise ValueError(f"{name}: got None; takes [N+1] offsets")
        bounds.append(read.diff().tolist())
    if len(bounds[0]) != len(bounds[1]):
        raise ValueError(f"cu_seqlens_k: got {len(bounds[1])} sequences; takes {len(bounds[0])}, as cu_seqlens_q has")
    shared: dict[str, Any] = {"softmax_scale": softmax_scale, "causal": causal, "window_size": window_size}
    parts = zip(q.split(bounds[0]), k.split(bounds[1]), v.split(bounds[1]), strict=True)
    outputs = [flash_attn_func(a[None], b[None], c[None], **shared)[0] for a, b, c in parts]
    return torch.cat(outputs) if outputs else q.new_zeros(0, q.shape[1], v.shape[2])


def _check_unserved(dropout_p: float, softcap: float, alibi_slopes: Tensor | None, return_attn_probs: bool) -> None:
    for name, value, taken in (("dropout_p", dropout_p, 0.0), ("softcap", softcap, 0.0)):
        if value != taken:
            raise ValueError(f"{name}: got {value}; takes {taken}")
    if alibi_slopes is not None:
        raise ValueError("alibi_slopes: got some; takes None")
    if return_attn_probs:
        raise ValueError("return_attn_probs: got True; takes False")
