"""The gates of the delta-rule layers where they are functions of their own in ``fla.ops``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from phistate.compat.fla.modules.precision import widened


def fused_beta_sigmoid(x: Tensor, scale: float = 1.0) -> Tensor:
    """``scale · sigmoid(x)`` in float32."""
    return scale * widened(x).sigmoid()


def fused_gdn_gate(
    g: Tensor, A_log: Tensor, dt_bias: Tensor | None = None, output_dtype: torch.dtype = torch.float32
) -> Tensor:
    """Gated DeltaNet's log decay ``-e^A_log softplus(g + dt_bias)``, a number a head: ``g [...,H]``."""
    x = widened(g) if dt_bias is None else widened(g) + widened(dt_bias)
    return (-widened(A_log).exp() * F.softplus(x)).to(output_dtype)


def fused_kda_gate(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Kimi Delta Attention's log decay, a number a channel: ``g [...,H,K]``, ``A_log`` of H, ``dt_bias`` of H·K.

    ``-e^A_log softplus(g + dt_bias)``, or with a ``lower_bound`` ``lower_bound · sigmoid(e^A_log (g + dt_bias))``,
    where ``A_log`` may be None, which stands for 0.
    """
    if A_log is None and lower_bound is None:
        raise ValueError("A_log: got None without a lower_bound; takes H numbers")
    x = widened(g) if dt_bias is None else widened(g) + widened(dt_bias).view(g.shape[-2:])
    rate = 1.0 if A_log is None else widened(A_log).exp().view(-1, 1)
    decay = -rate * F.softplus(x) if lower_bound is None else lower_bound * torch.sigmoid(rate * x)
    return decay.to(output_dtype)
