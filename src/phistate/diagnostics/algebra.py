"""The error algebra of one kernel against softmax, from the logarithms of both."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def error_algebra(
    logits: Tensor, log_abs: Tensor, sign: Tensor | None, hidden: Tensor | None, v: Tensor
) -> list[Tensor]:
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
