"""Layers of fla's that take a slow path on a CPU although every function of their fast one is there: Mamba, Mamba-2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from phistate.compat.functions import Function, Hook
from phistate.compat.mamba_ssm.selective import mamba_inner_fn, selective_scan_fn, selective_state_update
from phistate.compat.mamba_ssm.ssd import mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined

_NO_LIMIT = (0.0, float("inf"))
_SLOW = "self, input_states, last_state=None, use_cache=False, attention_mask=None"
_WHAT = "the layer's own fast path, by selective_scan, mamba2_scan and causal_conv1d"


def _mamba(original: Function) -> Function:
    def forward(
        self: Any,
        input_states: Tensor,
        last_state: dict[str, Any] | None = None,
        use_cache: bool | None = False,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return _fast(self, input_states, last_state, use_cache, attention_mask, **kwargs)

    return forward


def _mamba2(original: Function) -> Function:
    def forward(
        self: Any,
        input_states: Tensor,
        last_state: dict[str, Any] | None = None,
        use_cache: bool = False,
        attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        if last_state is not None and tuple(self.dt_limit) != _NO_LIMIT:
            # The fast step knows no limits of Δ.
            return original(self, input_states, last_state, use_cache, attention_mask)
        return _fast(self, input_states, last_state, use_cache, attention_mask)

    return forward


def _fast(
    self: Any, x: Tensor, last_state: dict[str, Any] | None, use_cache: bool | None, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The fast path in the one form that heeds the mask: when training without a cache, a fused call ignores it."""
    out, conv_state, state = self.cuda_kernels_forward(x, last_state, True, mask, **kwargs)
    return (out, conv_state, state) if use_cache else (out, None, None)


HOOKS: dict[str, dict[str, Hook]] = {
    "fla.layers.mamba": {"Mamba.slow_forward": Hook(f"{_SLOW}, **kwargs", _WHAT, _mamba, 1, True)},
    "fla.layers.mamba2": {"Mamba2.torch_forward": Hook(_SLOW, _WHAT, _mamba2, 1, True)},
}

ABSENT: dict[str, dict[str, Callable[..., Any]]] = {
    "fla.layers.mamba": {
        "selective_scan_fn": selective_scan_fn,
        "selective_state_update": selective_state_update,
        "mamba_inner_fn": mamba_inner_fn,
    },
    "fla.layers.mamba2": {
        "selective_state_update": selective_state_update,
        "mamba_chunk_scan_combined": mamba_chunk_scan_combined,
        "mamba_split_conv1d_scan_combined": mamba_split_conv1d_scan_combined,
    },
}
