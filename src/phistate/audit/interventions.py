"""The price of a replacement, measured: the model's loss with it minus the model's own, on the same tokens.

Layers before the first replaced one see what they always saw, so their outputs are recorded once and returned
without being computed again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phistate.audit.capture import Attend, Inputs, Layer, Tap, tapped

_LOSS_ROWS = 1024  # rows of logits taken to float32 log-probabilities at a time


@dataclass(frozen=True)
class Price:
    """What a replacement costs per token, in nats."""

    cost: float
    """Mean loss with the replacement minus the model's own."""
    standard_error: float
    """Of that mean, from the differences token by token, taken as independent."""
    loss: float
    """Mean loss with the replacement."""


class Recording:
    """One text run through the model once: its loss, each layer's inputs to attention and each block's
    output.

    Args:
        model: a causal language model.
        layers: the layers `find_layers` found in it.
        tokens: ``[1,T]``, T ≥ 2.
    """

    def __init__(self, model: Any, layers: Sequence[Layer], tokens: Tensor) -> None:
        self.model = model
        self.tokens = tokens
        self.blocks = [layer.block for layer in layers]
        self.outputs: list[Any] = [None] * len(layers)
        hooks = [
            block.register_forward_hook(lambda module, args, output, n=n: self.outputs.__setitem__(n, output))
            for n, block in enumerate(self.blocks)
        ]
        try:
            with torch.inference_mode(), tapped(model, Tap(keep=True)) as tap:
                self.losses = self._losses()
        finally:
            for hook in hooks:
                hook.remove()
        self.inputs: dict[int, Inputs] = {layer.index: tap.kept[layer.attention] for layer in layers}
        self._layers = {layer.index: layer for layer in layers}
        self._order = {layer.index: n for n, layer in enumerate(layers)}

    @property
    def loss(self) -> float:
        """The model's own next-token loss in nats, the mean over the text."""
        return float(self.losses.mean())

    def price(self, replaced: Mapping[int, Attend]) -> Price:
        """The price of attending differently in some layers, by index; the others are left alone."""
        if not replaced:
            return Price(0.0, 0.0, self.loss)
        first = min(self._order[index] for index in replaced)
        swap = {self._layers[index].attention: attend for index, attend in replaced.items()}
        with torch.inference_mode(), tapped(self.model, Tap(replaced=swap)), self._replay(first):
            losses = self._losses()
        difference = losses - self.losses
        error = float(difference.std() / len(difference) ** 0.5) if len(difference) > 1 else 0.0
        return Price(float(difference.mean()), error, float(losses.mean()))

    def _losses(self) -> Tensor:
        """``[T−1]`` next-token losses in float64."""
        logits = self.model(self.tokens, use_cache=False).logits[0, :-1]
        rows = zip(logits.split(_LOSS_ROWS), self.tokens[0, 1:].split(_LOSS_ROWS), strict=True)
        return torch.cat([F.cross_entropy(part.float(), target, reduction="none") for part, target in rows]).double()

    @contextmanager
    def _replay(self, first: int) -> Iterator[None]:
        """The blocks before the ``first`` replaced one return what they returned in the recording."""
        before = self.blocks[:first]
        own = [block.__dict__.get("forward") for block in before]
        for block, output in zip(before, self.outputs, strict=False):
            block.forward = lambda *args, output=output, **kwargs: output
        try:
            yield
        finally:
            for block, forward in zip(before, own, strict=True):
                if forward is None:
                    del block.forward
                else:
                    block.forward = forward
