"""The short convolution and its step, under the signatures transformers' layers call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from phistate.compat.causal_conv1d import ACTIVATIONS
from phistate.compat.packing import packing
from phistate.hf.handover import current
from phistate.ops.backends import native
from phistate.ops.causal_conv1d import MAX_WIDTH, causal_conv1d, causal_conv1d_step_


def fits(x: Tensor, weight: Tensor, activation: str | None) -> bool:
    """Whether our convolution takes ``x`` with ``weight [C,W]`` and this activation."""
    return (
        activation in ACTIVATIONS
        and 2 <= weight.shape[1] <= MAX_WIDTH
        and weight.dtype in (x.dtype, torch.float32)
        and x.dtype.is_floating_point
    )


def convolution(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``hidden_states [B,C,T]`` filtered per channel by ``weight [C,W]``; packed sequences do not see each other."""

    def convolve(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        cu_seqlens: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        seq_idx: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        x = hidden_states.transpose(1, 2)
        pack = packing(x, cu_seqlens, cu_seq_lens_q, seq_idx) or current().pack
        if not fits(x, weight, activation):
            if pack is None:
                return original(hidden_states, weight, bias, activation)
            return original(hidden_states, weight, bias, activation, seq_idx=pack.offsets)
        if pack is None:
            return causal_conv1d(x, weight, bias, ACTIVATIONS[activation]).transpose(1, 2)
        y = causal_conv1d(pack.fold(x), weight, bias, ACTIVATIONS[activation], cu_seqlens=pack.offsets)
        return pack.unfold(y).transpose(1, 2)

    return convolve


def update(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """One token ``[B,C,1]``, the last inputs ``conv_state [B,C,W]`` updated in place."""
    if native.why_not() is not None:
        return original

    def step(
        hidden_states: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        if hidden_states.shape[2] != 1 or torch.is_grad_enabled() or not fits(hidden_states, weight, activation):
            return original(hidden_states, conv_state, weight, bias, activation)
        x = hidden_states.squeeze(2)
        return causal_conv1d_step_(conv_state, x, weight, bias, ACTIVATIONS[activation]).unsqueeze(2)

    return step
