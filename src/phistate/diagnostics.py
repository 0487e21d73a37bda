"""What a kernel κ̂ does to softmax attention, exactly: the error algebra of one against the other.

With κ_j = exp(scale · q·k_j), p = κ / Σκ the exact row of attention, o = Σ_j p_j v_j its output,
ε_j = κ̂_j/κ_j − 1 the kernel's relative error on key j and δ = Σ_j p_j ε_j the denominator's:

    p̂_j − p_j = p_j (ε_j − δ) / (1 + δ)          ô − o = Σ_j p_j (ε_j − δ)(v_j − o) / (1 + δ)

So δ says how wrong the normaliser is and sd_p(ε) how wrong the output is: an error common to all keys
cancels. Everything is computed in float64 from log κ̂ − log κ, a block of queries at a time, so that neither
large logits nor long sequences are a limit.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from phistate.features.base import ExponentialFeatureMap, FeatureMap

LogKernel: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A kernel given by its logarithm: ``(logits [..., Q, J], query positions [Q], key positions [J]) -> log
κ̂``, where ``logits`` are softmax's own and −inf means weight zero."""

_BLOCK_ELEMENTS = 2**18  # 2 MB of float64: the temporaries of one block stay in the second-level cache
_MIN_BLOCK = 16  # fewer queries at a time make the matrix products slower than the memory they save is worth
_PAIRS_AT_ONCE = 2**22  # exact log-sum-exp of underflowed pairs: 32 MB of float64


def uniform_kernel(logits: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """The uniform average, κ̂ = 1: the baseline that looks at nothing.

    Example:
        >>> uniform_kernel(torch.tensor([[3.0, -1.0]]), torch.tensor([1]), torch.tensor([0, 1]))
        tensor([[0., 0.]])
    """
    return torch.zeros_like(logits)


def window_kernel(window: int, sinks: int = 0) -> LogKernel:
    """Exact softmax on a window and sinks, nothing elsewhere: κ̂_ij = κ_ij where i − j < window or j <
    sinks, else 0.

    Args:
        window: keys a query sees, itself included.
        sinks: first keys that every query sees.

    Raises:
        ValueError: ``window`` below 1 or ``sinks`` below 0.

    Example:
        >>> kernel = window_kernel(window=1, sinks=1)
        >>> kernel(torch.zeros(1, 3), torch.tensor([2]), torch.tensor([0, 1, 2]))
        tensor([[0., -inf, 0.]])
    """
    if window < 1:
        raise ValueError(f"window: got {window}; takes an integer ≥ 1")
    if sinks < 0:
        raise ValueError(f"sinks: got {sinks}; takes an integer ≥ 0")

    def kernel(logits: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        seen = (queries[:, None] - keys < window) | (keys < sinks)
        return logits.masked_fill(~seen, -math.inf)

    return kernel


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
        >>> q, k, v = torch.randn(3, 1, 8, 2, 4).unbind()
        >>> same = compare(q, k, v, window_kernel(window=8))
        >>> bool(same.delta.abs().max() < 1e-12), bool(same.output_error.max() < 1e-12)
        (True, True)
    """
    batch, length, heads, kv_heads = _check(q, k, v)
    if scale is None:
        scale = candidate.scale if isinstance(candidate, FeatureMap) else q.shape[-1] ** -0.5
    positions = _positions(queries, length, q.device)
    group = heads // kv_heads
    block = max(_MIN_BLOCK, _BLOCK_ELEMENTS // (group * length))
    if isinstance(candidate, FeatureMap):
        # A float32 map would put its rounding (1e-7) into ε, where an exact map should show 1e-15.
        candidate = copy.deepcopy(candidate).double()
    with torch.no_grad():
        per_sequence = [
            _compare_sequence(q[b], k[b], v[b], candidate, scale, causal, positions, block) for b in range(batch)
        ]
    return Comparison(*(torch.stack(parts) for parts in zip(*per_sequence, strict=True)))


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
    _, length, heads, kv_heads = _check(q, k, k)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    positions = _positions(queries, length, q.device)
    with torch.no_grad():
        rows = q[:, positions].double().unflatten(2, (kv_heads, heads // kv_heads))
        logits = torch.einsum("bqhgd,bjhd->bhgqj", rows, k.double()) * scale
        if causal:
            logits.masked_fill_(torch.arange(length, device=q.device) > positions[:, None], -math.inf)
        singular = torch.linalg.svdvals(logits.softmax(-1))
        share = singular / singular.sum(-1, keepdim=True)
        return torch.special.entr(share).sum(-1).exp().flatten(1)


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
    batch, length, heads, kv_heads = _check(q, k, k)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    positions = _positions(queries, length, q.device)
    group = heads // kv_heads
    out = q.new_empty((batch, positions.numel(), heads), dtype=torch.float64)
    key_positions = torch.arange(length, device=q.device)
    block = max(_MIN_BLOCK, _BLOCK_ELEMENTS // length)
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


def evenly_spaced(length: int, count: int) -> Tensor:
    """At most ``count`` ascending positions spread evenly over 0 … length − 1, the last among them.

    Example:
        >>> evenly_spaced(10, 5)
        tensor([1, 3, 5, 7, 9])
    """
    count = min(count, length)
    return torch.div(torch.arange(1, count + 1) * length, count, rounding_mode="floor") - 1


def _check(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int, int, int]:
    """Agree on (B, T, Hq, Hk) or say what does not fit."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}; takes [B,T,H,D]")
    batch, length, heads, dim = q.shape
    if length == 0:
        raise ValueError("q: got T = 0; takes at least one position")
    if k.shape[:2] != (batch, length) or k.shape[3] != dim:
        raise ValueError(f"k: got shape {tuple(k.shape)}; takes [B,T,Hk,D] that fits q's {tuple(q.shape)}")
    if k.shape[2] == 0 or heads % k.shape[2]:
        raise ValueError(f"k: got {k.shape[2]} heads; takes a number that divides q's {heads}")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v: got shape {tuple(v.shape)}; takes [B,T,Hk,V] that fits k's {tuple(k.shape)}")
    return batch, length, heads, k.shape[2]


def _positions(queries: Tensor | None, length: int, device: torch.device) -> Tensor:
    """The query positions to look at, checked."""
    if queries is None:
        return torch.arange(length, device=device)
    if queries.dim() != 1 or queries.numel() == 0 or queries.is_floating_point() or queries.dtype == torch.bool:
        shape = f"{queries.dtype} {tuple(queries.shape)}"
        raise ValueError(f"queries: got {shape}; takes a non-empty 1-D integer tensor or None")
    if queries.min() < 0 or queries.max() >= length or (queries.diff() <= 0).any():
        raise ValueError(f"queries: got {queries.tolist()[:8]}…; takes ascending positions within 0…{length - 1}")
    return queries.to(device=device, dtype=torch.int64)


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
    weights = _Weights(candidate, k)
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
            heads.append(_rows(logits, log_abs, sign, hidden, v[h, :stop]))
        parts.append([torch.cat(fields).T for fields in zip(*heads, strict=True)])
    return [torch.cat(columns) for columns in zip(*parts, strict=True)]


class _Weights:
    """log|κ̂| and sign of a candidate, a block of queries at a time; the keys' features are made once."""

    def __init__(self, candidate: FeatureMap | LogKernel, k: Tensor) -> None:
        self.candidate = candidate
        self.phi_k: Tensor | None = None
        if isinstance(candidate, FeatureMap):
            side = candidate.log_key if isinstance(candidate, ExponentialFeatureMap) else candidate.key
            at = torch.arange(k.shape[1], device=k.device) if candidate.positional else None
            self.phi_k = side(k.transpose(0, 1)[None], at)[0].transpose(0, 1)

    def queries(self, rows: Tensor, at: Tensor) -> Tensor | None:
        """Features (or their logarithms) of a block of queries: ``[Q,Hq,D] -> [Hk,G,Q,F]``."""
        if self.phi_k is None:
            return None
        assert isinstance(self.candidate, FeatureMap)
        side = self.candidate.log_query if isinstance(self.candidate, ExponentialFeatureMap) else self.candidate.query
        phi_q = side(rows[None], at if self.candidate.positional else None)[0]
        return phi_q.transpose(0, 1).unflatten(0, (self.phi_k.shape[0], -1))

    def of(
        self, head: int, phi_q: Tensor | None, logits: Tensor, at: Tensor, keys: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Of one key head: log|κ̂| ``[G,Q,J]`` and its sign (None: nowhere negative)."""
        if phi_q is None or self.phi_k is None:
            assert not isinstance(self.candidate, FeatureMap)
            return self.candidate(logits, at, keys), None
        assert isinstance(self.candidate, FeatureMap)
        phi_k = self.phi_k[head, : keys.numel()]
        if isinstance(self.candidate, ExponentialFeatureMap):
            return _log_product(phi_q[head], phi_k), None
        weight = phi_q[head] @ phi_k.T
        if self.candidate.positive:
            # A map that is positive in exact arithmetic may round to −1e-20; that is a zero, not a negative weight.
            return weight.clamp_(min=0).log(), None
        return weight.abs().log(), weight.sign()


def _log_product(log_q: Tensor, log_k: Tensor) -> Tensor:
    """log Σ_r exp(log_q_ir + log_k_jr), ``[G,Q,F]`` and ``[J,F]`` → ``[G,Q,J]``, by one matrix product.

    C_r = max_j log_k_jr and m_i = max_r(log_q_ir + C_r) keep every exponential at most 1. Pairs so far below
    their row's maximum that the product underflows float64 are summed again in logarithms.
    """
    peak = log_k.amax(0)
    shifted = log_q + peak
    row = shifted.amax(-1, keepdim=True)
    product = (shifted - row).exp() @ (log_k - peak).exp().T
    out = product.log() + row
    lost = (product == 0).nonzero()
    for g, i, j in (pairs.unbind(1) for pairs in lost.split(max(1, _PAIRS_AT_ONCE // log_k.shape[1]))):
        out[g, i, j] = (log_q[g, i] + log_k[j]).logsumexp(-1)
    return out


def _rows(logits: Tensor, log_abs: Tensor, sign: Tensor | None, hidden: Tensor | None, v: Tensor) -> list[Tensor]:
    """The fields of `Comparison` for one block: ``[G,Q,J]`` logits and log|κ̂| → each ``[G,Q]``."""
    if hidden is not None:
        logits = logits.masked_fill(hidden, -math.inf)
        log_abs = log_abs.masked_fill(hidden, -math.inf)
    log_z = logits.logsumexp(-1, keepdim=True)
    log_p = logits - log_z
    p = log_p.exp()
    # log|1 + ε|; hidden keys have p = κ̂ = 0 and no say.
    log_ratio = log_abs - logits
    if hidden is not None:
        log_ratio = log_ratio.masked_fill(hidden, 0.0)

    # p_j ε_j: by expm1 where κ̂ ≈ κ, so that a tiny ε keeps its digits; else as p̃_j − p_j, which cannot
    # overflow early.
    moved = (log_p + log_ratio).exp()
    if hidden is not None:
        moved = moved.masked_fill(hidden, 0.0)
    near = log_ratio.abs() < 1
    if sign is not None:
        moved = moved * sign
        near &= sign > 0
    p_eps = torch.where(near, p * torch.expm1(log_ratio), moved - p)
    delta = p_eps.sum(-1, keepdim=True)

    off = (p_eps - p * delta).abs()
    # Σ p(ε−δ)² as exp(2 log|p(ε−δ)| − log p): p may underflow to 0 where p ε does not.
    spread = torch.where(off > 0, 2 * off.log() - log_p, -math.inf).logsumexp(-1).div(2).exp()

    # 1 + δ with its sign and logarithm, from the sum of weights itself where 1 + δ has lost its digits.
    log_mass = log_abs.logsumexp(-1, keepdim=True)
    total = (log_abs - log_mass.clamp(min=torch.finfo(p.dtype).min)).exp()
    if sign is not None:
        total = total * sign
    ratio = total.sum(-1, keepdim=True)
    dead = ratio == 0
    log_one_delta = torch.where(delta.abs() < 0.5, torch.log1p(delta), log_mass + ratio.abs().log() - log_z)
    flip = torch.where(ratio < 0, -1.0, 1.0)

    # p̂ − p, again by expm1 where they are close.
    log_rel = log_ratio - log_one_delta
    rel_sign = flip if sign is None else sign * flip
    p_hat = (log_p + log_rel).exp() * rel_sign
    close = (log_rel.abs() < 1) & (rel_sign > 0)
    diff = torch.where(close, p * torch.expm1(log_rel), p_hat - p)
    diff = torch.where(dead, -p, diff)
    if hidden is not None:
        diff = diff.masked_fill(hidden, 0.0)

    o = p @ v
    off_o = diff @ v - torch.where(dead, 0.0, diff.sum(-1, keepdim=True)) * o
    norm, error = o.norm(dim=-1), off_o.norm(dim=-1)
    # The mean of v is not 0 but a row of o may be; 0/0 is no error.
    relative = torch.where(error > 0, error / norm, 0.0)

    # KL = Σ_j [(p̂_j − p_j) − p_j log(p̂_j/p_j)]: each term ≥ 0, and Σ(p̂ − p) = 0.
    shortfall = torch.where(p > 0, p * log_rel, 0.0)
    kl = (diff - shortfall).sum(-1)
    absent = (rel_sign <= 0) | (log_abs == -math.inf) if sign is not None else log_abs == -math.inf
    kl = kl.masked_fill((absent & (p > 0)).any(-1) | dead[..., 0], math.inf)

    weight = total if sign is not None else log_abs
    at_top = weight.gather(-1, logits.argmax(-1, keepdim=True))
    seen = torch.ones_like(near) if hidden is None else ~hidden.expand_as(near)
    best = weight.masked_fill(~seen, -math.inf).amax(-1, keepdim=True)
    top1 = (at_top == best).squeeze(-1).to(p.dtype) / ((weight == best) & seen).sum(-1)

    visible = seen.sum(-1)
    negative = torch.zeros_like(norm) if sign is None else ((sign < 0) & seen).sum(-1).to(p.dtype) / visible
    entropy = -torch.where(p > 0, p * log_p, 0.0).sum(-1)
    return [
        delta[..., 0], spread, relative, diff.abs().sum(-1) / 2, kl.clamp(min=0), top1, entropy, negative,
        ratio[..., 0], error, norm,
    ]  # fmt: skip
