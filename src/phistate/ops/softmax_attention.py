"""Exact softmax attention, the baseline every other mixer is measured against: full, or a window and sinks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from phistate.ops.checks import check_layout, check_mask


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    sinks: int = 0,
    mask: Tensor | None = None,
) -> Tensor:
    """The Nadaraya–Watson smoother with the exponential kernel, over all keys or a window and sinks.

    o_i = Σ_j κ_ij v_j / Σ_j κ_ij with κ_ij = exp(scale · q_i·k_j), j over the keys query i sees. With Tq < Tk the
    queries are the last Tq positions (a cached continuation).

    Args:
        q: ``[B,Tq,Hq,D]``.
        k: ``[B,Tk,Hk,D]``, Hk dividing Hq in interleaved groups.
        v: ``[B,Tk,Hk,V]``.
        scale: None: D ** -0.5.
        causal: query i sees keys up to its own position.
        window: query i sees only the last ``window`` keys, its own included; None: all.
        sinks: beside the window, the first ``sinks`` keys stay visible.
        mask: ``[B,Tk]`` bool, True = token; padded keys are seen by nobody, and a row that sees no key is 0.

    Raises:
        ValueError: shapes or counts that do not fit, ``sinks`` without a window, a window that is not causal.
        TypeError: a wrong type or dtype.

    Source: Vaswani et al. 2017 (arXiv:1706.03762); sinks: Xiao et al. 2023 (arXiv:2309.17453).

    >>> import torch, phistate
    >>> q, k, v = torch.rand(3, 1, 6, 2, 4).unbind()
    >>> near = phistate.softmax_attention(q, k, v, window=6)
    >>> torch.allclose(near, phistate.softmax_attention(q, k, v), atol=1e-6)
    True
    """
    check_layout(q=q, k=k, v=v)
    Tq, Tk = q.shape[1], k.shape[1]
    if v.shape[2] != k.shape[2]:
        raise ValueError(f"v: got {v.shape[2]} heads; takes {k.shape[2]}, as k has")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(f"k: got {k.shape[2]} heads; takes a count that divides q's {q.shape[2]}")
    if causal and Tq > Tk:
        raise ValueError(f"q: got length {Tq}; takes at most the keys' {Tk} when causal")
    check_mask(mask, k)
    if window is None:
        if sinks:
            raise ValueError(f"sinks: got {sinks} without a window; takes 0")
    elif window < 1:
        raise ValueError(f"window: got {window}; takes an integer ≥ 1 or None")
    elif sinks < 0:
        raise ValueError(f"sinks: got {sinks}; takes an integer ≥ 0")
    elif not causal:
        raise ValueError("window: got one with causal=False; takes causal=True")

    queries, keys, values = (x.transpose(1, 2) for x in (q, k, v))
    if window is not None and Tq == Tk and Tk > 2 * window:
        o = _in_blocks(queries, keys, values, scale, window, sinks, mask)
    else:
        o = _attend(queries, keys, values, _visible(q, k, causal, window, sinks, mask), scale, causal)
    return o.transpose(1, 2)


def _visible(q: Tensor, k: Tensor, causal: bool, window: int | None, sinks: int, mask: Tensor | None) -> Tensor | None:
    """``[B or 1,1,Tq,Tk]``: which keys each query sees; None where plain causal or full attention says it all."""
    Tq, Tk = q.shape[1], k.shape[1]
    plain = window is None and mask is None
    if plain and (not causal or Tq == Tk):
        return None
    query = torch.arange(Tk - Tq, Tk, device=q.device)[:, None]
    key = torch.arange(Tk, device=q.device)
    seen = torch.ones(Tq, Tk, dtype=torch.bool, device=q.device)
    if causal:
        seen = seen & (key <= query)
    if window is not None:
        seen = seen & ((key > query - window) | (key < sinks))
    seen = seen[None, None]
    return seen if mask is None else seen & mask[:, None, None]


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scale: float | None, causal: bool) -> Tensor:
    """Torch's fused attention ``[B,H,T,D]``; a row that sees nothing is 0."""
    grouped = q.shape[1] != k.shape[1]
    o = F.scaled_dot_product_attention(
        q, k, v, attn_mask=visible, is_causal=visible is None and causal, scale=scale, enable_gqa=grouped
    )
    return o if visible is None else o.masked_fill(~visible.any(-1, keepdim=True), 0.0)


def _in_blocks(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int, sinks: int, mask: Tensor | None
) -> Tensor:
    """Blocks of ``window`` queries against their own and the preceding block of keys, and the sinks: linear time."""
    B, _, T, _ = q.shape
    blocks = -(-T // window)
    tail = blocks * window - T
    position = torch.arange(blocks * window, device=q.device).view(blocks, window)
    previous = position - window
    sink = torch.arange(min(sinks, T), device=q.device).expand(blocks, -1)
    key_position = torch.cat([sink, previous, position], 1)

    seen = (key_position[:, None] <= position[..., None]) & (key_position[:, None] > position[..., None] - window)
    seen[..., : sink.shape[1]] = sink[:, None] <= position[..., None]
    # A sink inside the window would be counted twice.
    near = (key_position >= sinks) & (key_position >= 0) & (key_position < T)
    near[:, : sink.shape[1]] = True
    seen = (seen & near[:, None])[None]
    if mask is not None:
        seen = seen & mask[:, key_position.clamp(0, T - 1)][:, :, None]
    seen = seen.expand(B, -1, -1, -1).flatten(0, 1).unsqueeze(1)

    def gather(x: Tensor) -> Tensor:
        """``[B,h,T,D] -> [B·blocks,h,sinks + 2·window,D]``."""
        padded = F.pad(x, (0, 0, window, tail)).unflatten(2, (blocks + 1, window))
        near = torch.cat([padded[:, :, :-1], padded[:, :, 1:]], 3)
        first = x[:, :, None, : sink.shape[1]].expand(-1, -1, blocks, -1, -1)
        return torch.cat([first, near], 3).transpose(1, 2).flatten(0, 1)

    queries = F.pad(q, (0, 0, 0, tail)).unflatten(2, (blocks, window)).transpose(1, 2).flatten(0, 1)
    o = _attend(queries, gather(k), gather(v), seen, scale, causal=False)
    return o.unflatten(0, (B, blocks)).transpose(1, 2).flatten(2, 3)[:, :, :T]
