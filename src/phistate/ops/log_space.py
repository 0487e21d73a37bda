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

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from phistate.ops.backends.base import Call, Result
from phistate.ops.packing import bounds_of, sequence_of

_EMPTY = float("-inf")


def by_vector_decay(call: Call, run: Callable[[Call], Result]) -> Result:
    """Run a call whose q and k are log features as the plain call with a vector decay that it is."""
    heads = call.state_heads
    log_q = call.q.repeat_interleave(max(heads // call.q.shape[2], 1), dim=2)
    log_k = call.k.repeat_interleave(heads // call.k.shape[2], dim=2)
    B, T, _, F = log_k.shape
    padded = None if call.mask is None else ~call.mask[:, :, None, None]
    if padded is not None:
        log_k = log_k.masked_fill(padded, _EMPTY)
    decay = call.decay
    if decay is not None:
        decay = decay.to(log_k.dtype)
        decay = decay.expand(B, T, -1) if decay.ndim == 1 else decay
        decay = decay if decay.ndim == 4 else decay.unsqueeze(-1)
        if padded is not None:
            decay = decay.masked_fill(padded, 0.0)
    start = log_k.new_full((call.sequences, heads, F), _EMPTY) if call.log_scale is None else call.log_scale

    with torch.no_grad():
        before, now, last = _running_maximum(log_k, decay, start, call.cu_seqlens)
        if not call.causal:
            now = _spread(last, T, call.cu_seqlens)
        seen = now != _EMPTY
        forget = torch.where((before != _EMPTY) & seen, before - now, 0.0)
    k = (log_k - now.masked_fill(~seen, 0.0)).exp()
    log_q = log_q + now.repeat_interleave(log_q.shape[2] // heads, dim=2)
    with torch.no_grad():
        log_norm = log_q.amax(-1, keepdim=True)
        log_norm = log_norm.masked_fill(log_norm == _EMPTY, 0.0)
    q = (log_q - log_norm).exp()

    s, z = call.s, call.z
    if not call.causal and s is not None:
        kept = torch.where(start != _EMPTY, start - last, _EMPTY).exp()
        s, z = s * kept.unsqueeze(-1), None if z is None else z * kept
    if decay is not None:
        # Rounding in the scan must not turn a decay positive; the gradient stays the user's.
        total = decay + ((forget + decay).clamp(max=0.0) - decay).detach()
        forget = torch.where(decay == _EMPTY, decay, total)
    plain = replace(
        call,
        q=q.to(call.v.dtype),
        k=k.to(call.v.dtype),
        decay=forget if call.causal else None,
        s=s,
        z=z,
        log_features=False,
        log_scale=None,
    )
    o, s, z, _ = run(plain)
    if not call.normalize:
        o = (o * log_norm.exp()).to(o.dtype)
    return Result(o, s, z, last)


def _running_maximum(
    log_k: Tensor, decay: Tensor | None, start: Tensor, offsets: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """C_{t-1}, C_t ``[B,T,Hs,F]`` and the last C ``[N,Hs,F]``, sequence by sequence."""
    if offsets is None:
        return _of_rows(log_k, decay, start)
    bounds = bounds_of(offsets)
    if decay is not None or bounds is None:
        return _of_packed(log_k, decay, start, offsets.to(log_k.device))
    # One pass over each sequence instead of log T over all of them.
    pieces = [_of_rows(log_k[:, a:b], None, start[n : n + 1]) for n, (a, b) in enumerate(pairwise(bounds))]
    if not pieces:
        return log_k, log_k, start.clone()
    before, now, last = zip(*pieces, strict=True)
    return torch.cat(before, 1), torch.cat(now, 1), torch.cat(last, 0)


def _of_rows(log_k: Tensor, decay: Tensor | None, start: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    start = start.unsqueeze(1)
    if decay is None:
        now = torch.cat([start, log_k], 1).cummax(1).values[:, 1:]
    else:
        fall, best = _prefixes(decay.expand_as(log_k), log_k)
        now = torch.maximum(best, start + fall)
    history = torch.cat([start, now], 1)
    return history[:, :-1], now, history[:, -1]


def _of_packed(log_k: Tensor, decay: Tensor | None, start: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """By no loop over sequences: the first step of each forgets all before it and knows its own start."""
    T = log_k.shape[1]
    sequence = sequence_of(offsets, T)
    first = (torch.arange(T, device=log_k.device) == offsets[sequence])[:, None, None]
    begun = start[sequence].unsqueeze(0)
    fall = torch.zeros_like(log_k) if decay is None else decay.expand_as(log_k)
    best = torch.where(first, torch.maximum(log_k, begun + fall), log_k)
    _, now = _prefixes(fall.masked_fill(first, _EMPTY), best)
    history = torch.cat([now.new_zeros(1, 1, *now.shape[2:]), now], 1)  # history[t] stands before step t
    before = torch.where(first, begun, history[:, :-1])
    ended = (offsets.diff() > 0)[:, None, None]
    return before, now, torch.where(ended, history[0, offsets[1:]], start)


def _prefixes(fall: Tensor, best: Tensor) -> tuple[Tensor, Tensor]:
    """(Σ decay, max) over all steps up to each: a max-plus prefix scan, no sum ever subtracted."""
    step = 1
    while step < best.shape[1]:
        reached = torch.maximum(best[:, step:], best[:, :-step] + fall[:, step:])
        fallen = fall[:, step:] + fall[:, :-step]
        best = torch.cat([best[:, :step], reached], 1)
        fall = torch.cat([fall[:, :step], fallen], 1)
        step *= 2
    return fall, best


def _spread(last: Tensor, T: int, offsets: Tensor | None) -> Tensor:
    """``[N,Hs,F] -> [B,T,Hs,F]``: each step's sequence's value."""
    if offsets is None:
        return last.unsqueeze(1).expand(-1, T, -1, -1)
    return last[sequence_of(offsets.to(last.device), T)].unsqueeze(0)
