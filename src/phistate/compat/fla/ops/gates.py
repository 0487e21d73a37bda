"""Decays and strengths made inside fla's kernels, from what a layer projects."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def head_gate(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None) -> Tensor:
    """−e^A_log softplus(g + dt_bias), float32: ``g [B,T,HV]``, ``A_log, dt_bias [HV]``."""
    if A_log is None:
        raise ValueError("A_log: got None with use_gate_in_kernel=True; takes [HV]")
    raw = g.float() if dt_bias is None else g.float() + dt_bias.float()
    return -A_log.float().exp() * F.softplus(raw)


def channel_gate(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None) -> Tensor:
    """−e^A_log softplus(g + dt_bias), or lower_bound · σ(e^A_log (g + dt_bias)), float32.

    ``g [B,T,HV,K]``, ``A_log [HV]`` (None with a lower bound: 0), ``dt_bias [HV·K]``.
    """
    heads, width = g.shape[-2:]
    raw = g.float() if dt_bias is None else g.float() + dt_bias.float().view(heads, width)
    rate = None if A_log is None else A_log.float().exp().view(heads, 1)
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(raw if rate is None else rate * raw)
    if rate is None:
        raise ValueError("A_log: got None with use_gate_in_kernel=True and no lower_bound; takes [HV]")
    return -rate * F.softplus(raw)


def strength(beta: Tensor, sigmoid: bool, negative: bool) -> Tensor:
    """``beta`` as given, or its sigmoid, or twice that, which lets eigenvalues of the transition be negative."""
    if negative and not sigmoid:
        raise ValueError("allow_neg_eigval: got True without use_beta_sigmoid_in_kernel; takes it beside that")
    if not sigmoid:
        return beta
    return beta.float().sigmoid() * 2 if negative else beta.float().sigmoid()
