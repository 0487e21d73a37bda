"""Exponential feature maps, streamed without overflow and without epsilon.

A map φ = exp(log φ) is kept relative to the running maximum of its keys, one per feature:

    C_t = max(C_{t-1} + decay_t, log φ(k_t))
    key    exp(log φ(k_t) − C_t) ≤ 1
    decay  C_{t-1} + decay_t − C_t ≤ 0
    query  exp(log φ(q_t) + C_t − m_t),   m_t = max over features

The state then holds sums divided by exp(C), and the equation is unchanged: it is the one with a vector decay. C and m
cancel in the result, so no gradient passes through them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from phistate.features.base import ExponentialFeatureMap

_EMPTY = float("-inf")


@dataclass(frozen=True, eq=False)
class LogSpace:
    """The features of one call, relative to their running maximum."""

    q: Tensor
    """``[B,T,Ho,F]``, at most 1."""
    k: Tensor
    """``[B,T,Hs,F]``, at most 1."""
    decay: Tensor | None
    """``[B,T,Hs,F]``; None when not causal, where nothing streams."""
    log_scale: Tensor
    """``[N,Hs,F]``, C after the last step."""
    initial: Tensor | None
    """``[N,Hs,F]``, what the initial sums are to be multiplied by; None when ``decay`` does it."""
    log_norm: Tensor
    """``[B,T,Ho,1]``, m: an unnormalised read is to be multiplied by exp(m)."""


def to_log_space(
    phi: ExponentialFeatureMap,
    q: Tensor,
    k: Tensor,
    *,
    state_heads: int,
    positions: Tensor | None,
    decay: Tensor | None,
    log_scale: Tensor | None,
    mask: Tensor | None,
    bounds: list[int] | None,
    causal: bool,
) -> LogSpace:
    """Features of q and k that never overflow, and the vector decay that streams them.

    ``q [B,T,Hq,D]``, ``k [B,T,Hk,D]``, ``decay`` as in the op, ``log_scale [N,Hs,F]`` of the initial state, ``bounds``
    the packed sequences' offsets.
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    log_q = phi.log_query(q.to(wide), positions)
    log_k = phi.log_key(k.to(wide), positions).repeat_interleave(state_heads // k.shape[2], dim=2)
    B, T, _, F = log_k.shape
    N = B if bounds is None else len(bounds) - 1
    if mask is not None:
        log_k = log_k.masked_fill(~mask[:, :, None, None], _EMPTY)
    if decay is not None:
        decay = decay.to(wide)
        decay = decay.expand(B, T, -1) if decay.ndim == 1 else decay
        decay = decay if decay.ndim == 4 else decay.unsqueeze(-1)
        if mask is not None:
            decay = decay.masked_fill(~mask[:, :, None, None], 0.0)
    start = log_k.new_full((N, state_heads, F), _EMPTY) if log_scale is None else log_scale.to(wide)

    with torch.no_grad():
        before, now, last = _running_maximum(log_k, decay, start, bounds)
        if not causal:
            now = _spread(last, T, bounds)
        seen = now != _EMPTY
        forget = torch.where(before != _EMPTY, before - now.masked_fill(~seen, 0.0), 0.0)
        now = now.masked_fill(~seen, 0.0)

    k = (log_k - now).exp()
    groups = max(log_q.shape[2] // state_heads, 1)
    log_q = log_q.repeat_interleave(max(state_heads // log_q.shape[2], 1), dim=2)
    reach = (now.masked_fill(~seen, _EMPTY)).repeat_interleave(groups, dim=2)
    log_q = log_q + reach
    with torch.no_grad():
        log_norm = log_q.amax(-1, keepdim=True)
        log_norm = log_norm.masked_fill(log_norm == _EMPTY, 0.0)
    q = (log_q - log_norm).exp()

    if not causal:
        kept = torch.where(start != _EMPTY, start - last, _EMPTY).exp()
        return LogSpace(q, k, None, last, kept, log_norm)
    if decay is not None:
        # Rounding in the scan must not turn a decay positive; the gradient stays the user's.
        total = decay + ((forget + decay).clamp(max=0.0) - decay).detach()
        forget = torch.where(decay == _EMPTY, decay, total)
    return LogSpace(q, k, forget, last, None, log_norm)


def _running_maximum(
    log_k: Tensor, decay: Tensor | None, start: Tensor, bounds: list[int] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """C_{t-1}, C_t ``[B,T,Hs,F]`` and the last C ``[N,Hs,F]``, sequence by sequence."""
    if bounds is None:
        return _running_maximum_of_one(log_k, decay, start)
    pieces = [
        _running_maximum_of_one(
            log_k[:, a:b],
            None if decay is None else decay[:, a:b],
            start[n : n + 1],
        )
        for n, (a, b) in enumerate(itertools.pairwise(bounds))
    ]
    if not pieces:
        return log_k, log_k, start
    before, now, last = zip(*pieces, strict=True)
    return torch.cat(before, 1), torch.cat(now, 1), torch.cat(last, 0)


def _running_maximum_of_one(log_k: Tensor, decay: Tensor | None, start: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    T = log_k.shape[1]
    start = start.unsqueeze(1)
    if decay is None:
        now = torch.cat([start, log_k], 1).cummax(1).values[:, 1:]
    else:
        # (Σ decay, max) over the last 1, 2, 4, … steps: a max-plus prefix scan, no sum ever subtracted.
        fall, best, step = decay.expand_as(log_k), log_k, 1
        while step < T:
            reached = torch.maximum(best[:, step:], best[:, :-step] + fall[:, step:])
            fallen = fall[:, step:] + fall[:, :-step]
            best = torch.cat([best[:, :step], reached], 1)
            fall = torch.cat([fall[:, :step], fallen], 1)
            step *= 2
        now = torch.maximum(best, start + fall)
    history = torch.cat([start, now], 1)
    return history[:, :-1], now, history[:, -1]


def _spread(last: Tensor, T: int, bounds: list[int] | None) -> Tensor:
    """``[N,Hs,F] -> [B,T,Hs,F]``: each step's sequence's value."""
    if bounds is None:
        return last.unsqueeze(1).expand(-1, T, -1, -1)
    lengths = torch.tensor(bounds, device=last.device).diff()
    return last.repeat_interleave(lengths, dim=0, output_size=T).unsqueeze(0)
