"""How many dimensions an attention matrix has."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from phistate.diagnostics.inputs import check_positions, check_shapes


def effective_rank(
    q: Tensor, k: Tensor, *, scale: float | None = None, causal: bool = True, queries: Tensor | None = None
) -> Tensor:
    """How many dimensions the attention matrix has: exp(−Σ_i s_i log s_i), s the singular values divided by
    their sum.

    Args:
        q: queries ``[B,T,Hq,D]``.
        k: keys ``[B,T,Hk,D]``, Hk dividing Hq.
        scale: softmax's scale; None: D ** -0.5.
        causal: a query sees the keys up to its own position; else all of them.
        queries: 1-D positions of the rows to look at, ascending; None: all T. The rows are held together, so
            choose some (a few hundred) for a long sequence; the rank is at most their number.

    Returns:
        ``[B,Hq]`` in float64, between 1 and the number of rows.

    Raises:
        ValueError: shapes that do not fit, T = 0, or positions outside the sequence.

    The measure is of Roy and Vetterli, "The effective rank" (EUSIPCO 2007).

    Example:
        >>> q = torch.zeros(1, 5, 1, 4)  # without causality every row is the same uniform average: rank 1
        >>> round(effective_rank(q, q, causal=False).item(), 6)
        1.0
    """
    _, length, heads, kv_heads = check_shapes(q, k, k)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    positions = check_positions(queries, length, q.device)
    with torch.no_grad():
        rows = q[:, positions].double().unflatten(2, (kv_heads, heads // kv_heads))
        logits = torch.einsum("bqhgd,bjhd->bhgqj", rows, k.double()) * scale
        if causal:
            logits.masked_fill_(torch.arange(length, device=q.device) > positions[:, None], -math.inf)
        singular = torch.linalg.svdvals(logits.softmax(-1))
        share = singular / singular.sum(-1, keepdim=True)
        return torch.special.entr(share).sum(-1).exp().flatten(1)
