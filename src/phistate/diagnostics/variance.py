"""What positive random features will cost, before any is drawn."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from phistate.diagnostics.inputs import check_positions, check_shapes, queries_at_once


def predicted_variance(
    q: Tensor,
    k: Tensor,
    num_features: int,
    *,
    scale: float | None = None,
    causal: bool = True,
    queries: Tensor | None = None,
) -> Tensor:
    """Relative variance of the denominator under i.i.d. positive random features, E δ² = (pᵀGp − 1)/m.

    G_jl = exp((x + y_j)·(x + y_l)) with x = q·√scale, y = k·√scale, m the number of features. It is computed
    as exp(‖x‖²) Σ_jl e^{b_j + b_l} e^{−‖y_j − y_l‖²/2} with b_j = log p_j + x·y_j + ‖y_j‖²/2, in which no
    term can overflow that the sum does not.

    Args:
        q: queries ``[B,T,Hq,D]``.
        k: keys ``[B,T,Hk,D]``, Hk dividing Hq.
        num_features: m.
        scale: softmax's scale; None: D ** -0.5.
        causal: a query sees the keys up to its own position; else all of them.
        queries: 1-D positions of the queries to look at, ascending; None: all T. A query costs T² operations.

    Returns:
        ``[B,Q,Hq]`` in float64; inf where it is beyond float64.

    Raises:
        ValueError: shapes that do not fit, T = 0, positions outside the sequence, or ``num_features`` below
        1.

    The variance of one positive feature is Lemma 2 of Choromanski et al., "Rethinking attention with
    Performers" (arXiv:2009.14794).

    Example:
        >>> q = torch.zeros(1, 3, 1, 4)  # exp(0) = 1 whatever is drawn
        >>> predicted_variance(q, q, num_features=8).abs().max().item()
        0.0
    """
    if num_features < 1:
        raise ValueError(f"num_features: got {num_features}; takes an integer ≥ 1")
    batch, length, heads, kv_heads = check_shapes(q, k, k)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    positions = check_positions(queries, length, q.device)
    group = heads // kv_heads
    out = q.new_empty((batch, positions.numel(), heads), dtype=torch.float64)
    key_positions = torch.arange(length, device=q.device)
    block = queries_at_once(length)
    with torch.no_grad():
        for b in range(batch):
            for h in range(kv_heads):
                y = k[b, :, h].double() * math.sqrt(scale)
                x = q[b, positions, h * group : (h + 1) * group].double().transpose(0, 1) * math.sqrt(scale)
                logits = x @ y.T
                if causal:
                    logits.masked_fill_(key_positions > positions[:, None], -math.inf)
                half_norm = y.square().sum(-1) / 2
                log_b = logits.log_softmax(-1) + logits + half_norm
                peak = log_b.amax(-1, keepdim=True)
                weight = (log_b - peak).exp()
                total = torch.zeros_like(peak[..., 0])
                for rows in key_positions.split(block):
                    gauss = (y[rows] @ y.T - half_norm[rows, None] - half_norm).clamp_(max=0).exp_()
                    total += ((weight[..., rows] @ gauss) * weight).sum(-1)
                log_second = x.square().sum(-1) + 2 * peak[..., 0] + total.log()
                out[b, :, h * group : (h + 1) * group] = (torch.expm1(log_second) / num_features).T
    # E δ² ≥ 0: where every key agrees the exponent is 0 up to rounding, which may fall below.
    return out.clamp_(min=0)
