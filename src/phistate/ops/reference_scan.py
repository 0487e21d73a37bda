"""Mamba-1's scan and the short convolution in plain PyTorch, as written: the oracle, and the path for any device.

    h_t = exp(Δ_t A) h_{t-1} + Δ_t x_t B_tᵀ        per channel, N numbers of state
    y_t = h_t C_t

    y_t = Σ_w weight_w x_{t-W+1+w}                  per channel, W taps

Softplus, bias, skip, gate, masks, groups and packed sequences are the caller's (``backends/torch_scan.py``).
"""

from __future__ import annotations

import torch
from torch import Tensor


def scan(x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence one step at a time.

    x, delta ``[b,T,G,P]`` (channels in G groups of P); A ``[G,P,N]``; B, C ``[b,T,G,N]``; h ``[b,G,P,N]``. Gives y
    ``[b,T,G,P]`` and the last h.
    """
    outputs = []
    for t in range(x.shape[1]):
        step = delta[:, t].unsqueeze(-1)
        write = (delta[:, t] * x[:, t]).unsqueeze(-1) * B[:, t].unsqueeze(-2)
        h = (step * A).exp() * h + write
        outputs.append((h @ C[:, t].unsqueeze(-1)).squeeze(-1))
    if not outputs:  # the caller may yet overwrite the state it gave
        return torch.zeros_like(x), h.clone()
    return torch.stack(outputs, 1), h


def convolve(x: Tensor, weight: Tensor, past: Tensor) -> Tensor:
    """x ``[b,T,C]`` behind its ``past [b,W-1,C]``, weight ``[C,W]``: y ``[b,T,C]``."""
    T = x.shape[1]
    whole = torch.cat([past, x], 1)
    return torch.stack([weight[:, w] * whole[:, w : w + T] for w in range(weight.shape[1])]).sum(0)
