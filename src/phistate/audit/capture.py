"""One attention function for both jobs: keep what each layer attends with, and attend by something else.

Transformers hands q, k and v to a registered function after rotary embedding and before K and V are
repeated. Ours passes them on to torch's attention unless a `Tap` is told otherwise for that layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from phistate.audit.errors import BadInput

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``(q [B,T,Hq,D], k [B,T,Hk,D], v [B,T,Hk,V]) -> [B,T,Hq,V]``."""

_NAME = "phistate_audit"
_PROBE_TOKENS = 16
_ROUNDING = 1e-5  # of the largest logit: float32 sums of the same numbers in another order differ by less
_SAME = 1e-3  # likewise, for one way to attend against another through all layers


@dataclass(frozen=True)
class Inputs:
    """What one layer attends with: ``q [B,T,Hq,D]``, ``k [B,T,Hk,D]``, ``v [B,T,Hk,V]``, and softmax's
    scale."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    plain: bool
    """Causal softmax(scale · q·k) over every earlier key, nothing else: no window, bias or sink term."""


@dataclass
class Tap:
    """What the attention function does while it is active; modules are the model's attention modules."""

    keep: bool = False
    kept: dict[nn.Module, Inputs] = field(default_factory=dict)
    replaced: Mapping[nn.Module, Attend] = field(default_factory=dict)


@dataclass(frozen=True)
class Layer:
    """One decoder layer with softmax attention."""

    index: int
    block: nn.Module
    attention: nn.Module


_active: ContextVar[Tap | None] = ContextVar("phistate_audit_tap", default=None)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention function: ``[B,H,T,D]`` in, ``[B,T,H,D]`` out. Its keywords vary by model."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    tap = _active.get()
    assert tap is not None, "the audit's attention function was called outside an audit"
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    if tap.keep:
        extra = any(kwargs.get(name) is not None for name in ("softcap", "s_aux", "position_bias"))
        tap.kept[module] = Inputs(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            scale,
            attention_mask is None and not extra,
        )
    if (attend := tap.replaced.get(module)) is not None:
        return attend(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)


@contextmanager
def tapped(model: Any, tap: Tap) -> Iterator[Tap]:
    """While this lasts, every attention of the model goes through ``tap``; then the model is as before.

    Raises:
        BadInput: a model whose attention cannot be exchanged.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(_NAME, _attention)
    # Without a mask function of this name, masks (a layer's window among them) would be lost in silence.
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    own = model.config._attn_implementation
    try:
        model.set_attn_implementation(_NAME)
    except ValueError:
        raise BadInput(_not_exchangeable(model)) from None
    if model.config._attn_implementation != _NAME:
        raise BadInput(_not_exchangeable(model))
    token = _active.set(tap)
    try:
        yield tap
    finally:
        _active.reset(token)
        model.set_attn_implementation(own)


def find_layers(model: Any) -> list[Layer]:
    """The decoder layers with softmax attention, found by running a few tokens through the model.

    Raises:
        BadInput: an encoder (its earlier outputs change with later tokens); a model whose attention does not
            go through transformers' attention interface, or is more than softmax(scale · q·k) v.
    """
    kind = type(model).__name__
    vocabulary = model.get_input_embeddings().num_embeddings
    half = _PROBE_TOKENS // 2
    probe = torch.randint(vocabulary, (1, _PROBE_TOKENS), generator=torch.Generator().manual_seed(0))
    other = torch.cat([probe[:, :half], (probe[:, half:] + 1) % vocabulary], 1)
    with torch.inference_mode():
        own = model(probe, use_cache=False).logits
        size = own.abs().max()
        if (own - model(other, use_cache=False).logits)[:, :half].abs().max() > _ROUNDING * size:
            raise BadInput(
                f"MODEL: got {kind}, an encoder: its earlier outputs change with later tokens; "
                "takes a causal language model"
            )
        try:
            with tapped(model, Tap(keep=True)) as tap:
                through = model(probe, use_cache=False).logits
        except ValueError as error:
            if isinstance(error, BadInput):
                raise
            raise BadInput(f"MODEL: got {kind}, whose attention is not plain softmax ({error})") from None
    if not tap.kept:
        raise BadInput(_not_exchangeable(model))
    if (own - through).abs().max() > _SAME * size:
        raise BadInput(f"MODEL: got {kind}, whose attention is more than softmax(scale·q·k)v; takes one that is not")
    return _place(model, tap.kept)


def _place(model: Any, attentions: Iterable[nn.Module]) -> list[Layer]:
    """Where in the model's list of blocks each attention module stands."""
    names = {module: name for name, module in model.named_modules()}
    modules = dict(model.named_modules())
    layers, lists = [], set()
    for attention in attentions:
        parts = names[attention].split(".")
        depth = next((n for n in range(1, len(parts)) if isinstance(modules[".".join(parts[:n])], nn.ModuleList)), None)
        if depth is None:
            raise BadInput(f"MODEL: got {type(model).__name__}, whose layers stand in no list; takes a stack of layers")
        lists.add(".".join(parts[:depth]))
        block = modules[".".join(parts[: depth + 1])]
        layers.append(Layer(int(parts[depth]), block, attention))
    if len(lists) != 1 or len({layer.index for layer in layers}) != len(layers):
        raise BadInput(
            f"MODEL: got {type(model).__name__}, with attention in {', '.join(sorted(lists))}; "
            "takes one stack of layers with one attention each"
        )
    return sorted(layers, key=lambda layer: layer.index)


def _not_exchangeable(model: Any) -> str:
    return (
        f"MODEL: got {type(model).__name__}, whose attention does not go through transformers' attention interface; "
        "takes a model that does (Llama, Qwen, Mistral, GPT-2, …)"
    )
