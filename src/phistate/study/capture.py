"""Queries, keys and values of a model's layer."""

from __future__ import annotations

import torch

from phistate.audit.capture import Inputs as Attended
from phistate.audit.capture import Tap, find_layers, tapped
from phistate.audit.errors import BadInput
from phistate.audit.models import LoadedModel
from phistate.audit.text import Text
from phistate.study.inputs import Inputs


def captured(loaded: LoadedModel, layer: int, text: Text) -> Inputs:
    """What one layer attends with on ``text.measure``, and on ``text.choose`` for maps that are fitted.

    Queries and keys are as attention meets them: after rotary embedding, keys not repeated.

    Raises:
        BadInput: a layer that is not there or is not plain causal softmax, a model that cannot be tapped.
    """
    model = loaded.model
    found = {one.index: one for one in find_layers(model)}
    if layer not in found:
        raise BadInput(f"--layer: got {layer}; {loaded.name} has {min(found)} to {max(found)}")
    attention = found[layer].attention
    taken: list[Attended] = []
    with torch.inference_mode():
        for tokens in (text.measure, text.choose):
            with tapped(model, Tap(keep=True)) as tap:
                model(tokens, use_cache=False)
            taken.append(tap.kept[attention])
    use, fit = taken
    if not use.plain:
        raise BadInput(f"--layer: got {layer}, whose attention is not plain causal softmax over every earlier key")
    return Inputs(f"layer {layer} of {loaded.name} on {text.source}", use.q, use.k, use.v, fit.q, fit.k, use.scale)
