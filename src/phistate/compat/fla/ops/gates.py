"""Decays and strengths made inside fla's kernels, from what a layer projects; some are functions of their own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from phistate.compat.fla.precision import widened


def fused_beta_sigmoid(x: Tensor, scale: float = 1.0) -> Tensor:
    """``scale · σ(x)`` in float32."""
    return scale * widened(x).sigmoid()


def fused_gdn_gate(
    g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None = None, output_dtype: torch.dtype = torch.float32
) -> Tensor:
    """Gated DeltaNet's log-decay −e^A_log softplus(g + dt_bias): ``g [...,HV]``, ``A_log, dt_bias [HV]``."""
    if A_log is None:
        raise ValueError("A_log: got None for a gate made in the kernel; takes [HV]")
    raw = widened(g) if dt_bias is None else widened(g) + widened(dt_bias)
    return (-widened(A_log).exp() * F.softplus(raw)).to(output_dtype)


def fused_kda_gate(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """KDA's log-decay −e^A_log softplus(g + dt_bias), or lower_bound · σ(e^A_log (g + dt_bias)).

    ``g [...,HV,K]``, ``A_log [HV]`` (with a bound it may be None, which stands for 0), ``dt_bias [HV·K]``.
    """
    if A_log is None and lower_bound is None:
        raise ValueError("A_log: got None for a gate made in the kernel without a lower_bound; takes [HV]")
    raw = widened(g) if dt_bias is None else widened(g) + widened(dt_bias).view(g.shape[-2:])
    rate = 1.0 if A_log is None else widened(A_log).exp().view(-1, 1)
    decay = -rate * F.softplus(raw) if lower_bound is None else lower_bound * torch.sigmoid(rate * raw)
    return decay.to(output_dtype)


def check_bound(lower_bound: float | None, safe: bool) -> None:
    """A gate asked to be safe has a bound that fla calls so."""
    if safe and (lower_bound is None or not -5 <= lower_bound < 0):
        raise ValueError(f"lower_bound: got {lower_bound} with safe_gate=True; takes -5 <= lower_bound < 0")


def strength(beta: Tensor, sigmoid: bool, negative: bool) -> Tensor:
    """``beta`` as given, or its sigmoid, or twice that, which lets eigenvalues of the transition be negative."""
    if negative and not sigmoid:
        raise ValueError("allow_neg_eigval: got True without use_beta_sigmoid_in_kernel; takes it beside that")
    return fused_beta_sigmoid(beta, 2.0 if negative else 1.0) if sigmoid else beta
