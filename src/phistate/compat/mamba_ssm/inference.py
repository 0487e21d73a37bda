"""What people import from mamba_ssm to decode: the parameters a cache travels in, and a layer's states in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

States = tuple[Tensor, Tensor]
"""The last inputs of a layer's convolution, and the state of its scan."""


@dataclass
class InferenceParams:
    """What a model hands its layers while it decodes.

    Args:
        max_seqlen: tokens there may be.
        max_batch_size: rows there may be.
        seqlen_offset: tokens the cache has seen; above 0 a layer takes one token more.
        batch_size_offset: rows before these.
        key_value_memory_dict: each layer's states, by its layer_idx.
        lengths_per_sample: ``[B]`` tokens each row has seen, or None.
    """

    max_seqlen: int
    max_batch_size: int
    seqlen_offset: int = 0
    batch_size_offset: int = 0
    key_value_memory_dict: dict[Any, Any] = field(default_factory=dict)
    lengths_per_sample: Tensor | None = None

    def reset(self, max_seqlen: int, max_batch_size: int) -> None:
        """Begin again; states are kept and will be overwritten."""
        self.max_seqlen = max_seqlen
        self.max_batch_size = max_batch_size
        self.seqlen_offset = 0
        if self.lengths_per_sample is not None:
            self.lengths_per_sample.zero_()


def states_in(inference_params: Any, layer_idx: int | None, make: Callable[[], States], fresh: bool) -> States:
    """A layer's states in the cache, made where there are none, zeros where ``fresh`` ones are asked for.

    Raises:
        ValueError: the layer has no number, so that its states have no place.
    """
    if layer_idx is None:
        raise ValueError(
            "layer_idx: got None, so that the cache has no place for this layer; takes a number of its own"
        )
    held = inference_params.key_value_memory_dict
    if layer_idx not in held:
        held[layer_idx] = make()
    elif fresh:
        for state in held[layer_idx]:
            state.zero_()
    return held[layer_idx]
