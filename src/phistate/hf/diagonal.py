"""RecurrentGemma's linear recurrence, one number per channel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from phistate.compat.diagonal import diagonal_scan


def rnn_scan(original: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """``hidden_states, recurrent_gate [B,T,D]``, ``reset [B,T,1]``, states ``[B,D]``; one token is the original's."""

    def scan(
        self: Any,
        hidden_states: Tensor,
        recurrent_gate: Tensor,
        reset: Tensor,
        recurrent_states: Tensor | None,
        acc_dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor, Tensor]:
        if hidden_states.shape[1] <= 1 or acc_dtype != torch.float32:
            return original(self, hidden_states, recurrent_gate, reset, recurrent_states, acc_dtype)
        a = (recurrent_gate * ~reset).float()
        x = hidden_states.float()
        h = x.new_zeros(x.shape[0], x.shape[2]) if recurrent_states is None else recurrent_states.float()
        y, h = diagonal_scan(a, x, h)
        return y.to(hidden_states.dtype), h

    return scan
