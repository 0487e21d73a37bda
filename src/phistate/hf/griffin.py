"""RecurrentGemma's recurrent block, the whole layer: its short convolution is no function that could be replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from phistate.hf.conv import fits
from phistate.ops.backends import native
from phistate.ops.causal_conv1d import causal_conv1d, causal_conv1d_step_

Result = tuple[Tensor, None]


def block(original: Callable[..., Result]) -> Callable[..., Result]:
    """``input_states [B,T,D]`` through convolution, gate and recurrence (De et al. 2024, arXiv:2402.19427, fig. 2).

    The layer keeps its own states. Several tokens set ``conv1d_state [B,C,W-1]`` anew, whatever came before.
    """
    native_steps = native.why_not() is None

    def forward(
        self: Any,
        input_states: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        use_cache: bool = True,
        **kwargs: Any,
    ) -> Result:
        weight, bias = self.conv_1d.weight.squeeze(1), self.conv_1d.bias
        one = use_cache and position_ids.shape[1] == 1
        can_step = input_states.shape[1] == 1 and not torch.is_grad_enabled() and native_steps
        if not fits(input_states, weight, None) or (one and not can_step):
            return original(self, input_states, position_ids, attention_mask, use_cache, **kwargs)
        x = self.linear_x(input_states)
        if use_cache and (self.conv1d_state is None or self.conv1d_state.shape[0] != x.shape[0]):
            self._setup_cache(x.shape[0], x.device, input_states.dtype)
        if one:
            # A few numbers a channel: the layer's state is another tensor after each step, as transformers has it.
            self.conv1d_state = self.conv1d_state.clone()
            x = causal_conv1d_step_(self.conv1d_state, x.squeeze(1), weight, bias).unsqueeze(1)
        else:
            x, state = causal_conv1d(x, weight, bias, return_state=True)
            self.conv1d_state = state if use_cache else None
            if not use_cache:
                self.rg_lru.recurrent_states = None
        x = self.rg_lru(x, position_ids) * self.act_fn(self.linear_y(input_states))
        return self.linear_out(x), None

    return forward
