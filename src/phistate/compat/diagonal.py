"""The linear recurrence h_t = a_t h_{t-1} + x_t, one number per channel, by Mamba-1's scan."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phistate.ops.selective_scan import selective_scan


def diagonal_scan(a: Tensor, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """All h_t = a_t h_{t-1} + x_t and the last; ``a, x [B,T,D]`` with 0 ≤ a ≤ 1, ``h [B,D]``; float32.

    >>> y, last = diagonal_scan(torch.tensor([[[0.5], [0.0]]]), torch.ones(1, 2, 1), torch.full((1, 1), 4.0))
    >>> y.flatten().tolist(), last.tolist()
    ([3.0, 1.0], [[1.0]])
    """
    return _DiagonalScan.apply(a, x, h)


class _DiagonalScan(torch.autograd.Function):
    """Its derivatives are the same recurrence again, so those of any order are.

    Reverse, backwards in time: G_t = g_t + a_{t+1} G_{t+1}, dx = G, da_t = G_t h_{t-1}. Forward, with ȧ, ẋ, ḣ the
    tangents: ḣ_t = a_t ḣ_{t-1} + (ȧ_t h_{t-1} + ẋ_t).
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return _scan(a, x, h)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        (a, _, h), (y, _) = inputs, output
        ctx.save_for_backward(a, y, h)
        ctx.save_for_forward(a, y, h)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dlast: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, y, h = ctx.saved_tensors
        following = torch.cat([torch.ones_like(a[:, :1]), a.flip(1)[:, :-1]], 1)
        G, _ = diagonal_scan(following, dy.flip(1), dlast)
        G = G.flip(1)
        first = torch.cat([G[:, :1] * a[:, :1], dlast.unsqueeze(1)], 1)[:, 0]  # of no steps, the last is the first
        return G * _before(y, h), G, first

    @staticmethod
    def jvp(ctx: Any, da: Tensor, dx: Tensor, dh: Tensor) -> tuple[Tensor, Tensor]:
        a, y, h = ctx.saved_tensors
        return diagonal_scan(a, da * _before(y, h) + dx, dh)


def _before(y: Tensor, h: Tensor) -> Tensor:
    """h_{t-1} of each step."""
    return torch.cat([h.unsqueeze(1), y[:, :-1]], 1)


def _scan(a: Tensor, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """selective_scan with N = 1, A = -1, B = C = 1: h ← e^-Δ h + Δ (x/Δ), Δ = -log a.

    The bounds of Δ change nothing in float32: the smallest -log a below 1 is 6e-8 and e^-1000 is 0. They keep x/Δ
    defined where a is 1 or 0.
    """
    delta = -a.log()
    delta = delta.clamp(1e-30, 1e3)
    ones = x.new_ones(x.shape[0], x.shape[1], 1)
    rate = x.new_full((x.shape[2], 1), -1.0)
    y, h = selective_scan(x / delta, delta, rate, ones, ones, initial_state=h.unsqueeze(-1), return_state=True)
    return y, h.squeeze(-1)
