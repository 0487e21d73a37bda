"""One kernel against softmax, per query, streamed over blocks of queries."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from phistate.diagnostics.algebra import error_algebra
from phistate.diagnostics.inputs import check_positions, check_shapes, queries_at_once
from phistate.diagnostics.kernels import LogKernel
from phistate.diagnostics.weights import Weights
from phistate.features.base import FeatureMap


@dataclass(frozen=True)
class Comparison:
    """One kernel against softmax, per query: every field is ``[B,Q,H]`` in float64.

    A row whose candidate denominator Σ κ̂_j is exactly zero reads as a zero output, as the op does: p̂ = 0.
    """

    delta: Tensor
    """δ = Σ_j p_j ε_j = Σκ̂/Σκ − 1: the denominator's relative error."""
    spread: Tensor
    """sd_p(ε) = √(Σ_j p_j (ε_j − δ)²): the part of the kernel's error that does not cancel."""
    output_error: Tensor
    """‖ô − o‖ / ‖o‖, with ô − o = Σ_j p_j (ε_j − δ)(v_j − o)/(1 + δ)."""
    total_variation: Tensor
    """``TV(p, p̂) = ½ Σ_j |p̂_j − p_j| = ½ Σ_j p_j |ε_j − δ| / |1 + δ|``."""
    kl: Tensor
    """KL(p‖p̂) = log(1 + δ) − Σ_j p_j log(1 + ε_j), in nats; inf where a key that softmax gives weight (p_j
    > 0) is given none or negative weight by the candidate (p̂_j ≤ 0)."""
    top1: Tensor
    """Whether the candidate's heaviest key is softmax's: 1 or 0, and 1/n where n keys tie for the
    heaviest."""
    entropy: Tensor
    """H(p) = −Σ_j p_j log p_j of the exact row, in nats."""
    negative_share: Tensor
    """The share of visible keys whose weight κ̂_j is negative."""
    denominator_ratio: Tensor
    """``Σ_j κ̂_j / Σ_j |κ̂_j|``: 1 for a positive kernel; near or below 0, the normaliser has cancelled. 0 where
    all are 0."""
    output_error_norm: Tensor
    """‖ô − o‖: what ``output_error`` divides by ``output_norm``."""
    output_norm: Tensor
    """‖o‖ of the exact row."""

    @property
    def relative_spread(self) -> Tensor:
        """``sd_p(ε)/|1 + δ| = √(χ²(p̂, p))``: the spread that a common factor of κ̂ leaves alone.

        By Cauchy–Schwarz, ``‖ô − o‖ ≤ sd_p(ε)/|1 + δ| · √(Σ_j p_j ‖v_j − o‖²)``.
        """
        return self.spread / (1 + self.delta).abs()


def compare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    candidate: FeatureMap | LogKernel,
    *,
    scale: float | None = None,
    causal: bool = True,
    queries: Tensor | None = None,
) -> Comparison:
    """The error algebra of a kernel against softmax attention on the same q, k, v (after any rotary
    embedding).

    ε_j = exp(log κ̂_j − log κ_j) − 1 and everything in `Comparison`, streamed over blocks of queries: memory
    grows with T, never with T².

    Args:
        q: queries ``[B,T,Hq,D]``.
        k: keys ``[B,T,Hk,D]``; Hk divides Hq and query head h reads key head ``h // (Hq // Hk)``.
        v: values ``[B,T,Hk,V]``.
        candidate: a feature map, or a function of softmax's logits and the positions that gives log κ̂
            (`uniform_kernel`, `window_kernel`).
        scale: softmax's scale; None: the feature map's own, or D ** -0.5.
        causal: a query sees the keys up to its own position; else all of them.
        queries: 1-D positions of the queries to look at, ascending; None: all T.

    Returns:
        A `Comparison` of ``[B,Q,Hq]`` tensors in float64.

    Raises:
        ValueError: shapes that do not fit, T = 0, positions outside the sequence, or a map for another head
        size.

    Example:
        >>> from phistate.diagnostics import window_kernel
        >>> q, k, v = torch.randn(3, 1, 8, 2, 4).unbind()
        >>> same = compare(q, k, v, window_kernel(window=8))
        >>> bool(same.delta.abs().max() < 1e-12), bool(same.output_error.max() < 1e-12)
        (True, True)
    """
    batch, length, heads, kv_heads = check_shapes(q, k, v)
    if scale is None:
        scale = candidate.scale if isinstance(candidate, FeatureMap) else q.shape[-1] ** -0.5
    positions = check_positions(queries, length, q.device)
    group = heads // kv_heads
    block = queries_at_once(group * length)
    if isinstance(candidate, FeatureMap):
        # A float32 map would put its rounding (1e-7) into ε, where an exact map should show 1e-15.
        candidate = copy.deepcopy(candidate).double()
    with torch.no_grad():
        per_sequence = [
            _compare_sequence(q[b], k[b], v[b], candidate, scale, causal, positions, block) for b in range(batch)
        ]
    return Comparison(*(torch.stack(parts) for parts in zip(*per_sequence, strict=True)))


def _compare_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    candidate: FeatureMap | LogKernel,
    scale: float,
    causal: bool,
    positions: Tensor,
    block: int,
) -> list[Tensor]:
    """One sequence: q ``[T,Hq,D]``, k ``[T,Hk,D]``, v ``[T,Hk,V]`` → the fields of `Comparison`, each ``[Q,Hq]``."""
    length, kv_heads = k.shape[:2]
    k, v = k.double().transpose(0, 1), v.double().transpose(0, 1)
    weights = Weights(candidate, k)
    parts: list[list[Tensor]] = []
    for at in positions.split(block):
        # Keys after the last query of the block are seen by none of its queries.
        stop = int(at[-1]) + 1 if causal else length
        keys = torch.arange(stop, device=k.device)
        hidden = keys > at[:, None] if causal else None
        rows = q[at].double()
        phi = weights.queries(rows, at)
        rows = rows.transpose(0, 1).unflatten(0, (kv_heads, -1))
        heads = []
        for h in range(kv_heads):
            logits = rows[h] @ k[h, :stop].T * scale
            log_abs, sign = weights.of(h, phi, logits, at, keys)
            heads.append(error_algebra(logits, log_abs, sign, hidden, v[h, :stop]))
        parts.append([torch.cat(fields).T for fields in zip(*heads, strict=True)])
    return [torch.cat(columns) for columns in zip(*parts, strict=True)]
