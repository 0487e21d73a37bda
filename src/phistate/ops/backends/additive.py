"""The additive kernels as torch operators: ``phistate::additive``, its backward, and the one-token step in place.

Defined with ``torch.library``'s define/impl rather than ``custom_op``: a third of the calling cost, which decoding
pays per layer and token. The kernels fill an output they are given, so every operator here allocates its own.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from phistate.ops.backends import native

SEGMENT = 512
"""PHISTATE_SEGMENT: tokens between two states kept for backward."""

# struct phistate_additive: 8-byte fields, integers or pointers all but scale, the 18th, and map_scale, the last; a view
# is five of them.
_LAYOUT = struct.Struct("=17qd75qd")
_NONE = (0, 0, 0, 0, 0)
_DTYPES = native.DTYPES

_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? decay, Tensor? beta, Tensor? s, Tensor? z, Tensor? mask, "
    "Tensor? cu_seqlens, float scale, bool normalize, bool causal, bool delta, bool qk_l2norm, str? map, "
    "float map_scale"
)

_LOG_SCHEMA = (
    "Tensor log_q, Tensor log_k, Tensor v, Tensor? beta, Tensor? s, Tensor? z, Tensor? log_scale, Tensor? mask, "
    "Tensor? cu_seqlens, float scale, bool normalize"
)

library = torch.library.Library("phistate", "FRAGMENT")
library.define(f"additive_log({_LOG_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)")
library.define(f"additive({_SCHEMA}, bool keep) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
library.define(
    f"additive_backward({_SCHEMA}, Tensor d_o, Tensor? d_s, Tensor? d_z, Tensor o, Tensor final_s, Tensor final_z, "
    "Tensor checkpoints, Tensor denominators, bool wants_decay, bool wants_beta, bool wants_s, bool wants_z) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
library.define(
    "additive_step_(Tensor q, Tensor k, Tensor v, Tensor? decay, Tensor? beta, Tensor(a!) s, Tensor(b!)? z, "
    "float scale, bool delta, bool qk_l2norm) -> Tensor"
)


@functools.cache
def _kernel(name: str) -> Callable[[bytes], int]:
    return native.packed_kernel(name, _LAYOUT.size)


def _view(x: Tensor | None) -> tuple[int, int, int, int, int]:
    if x is None:
        return _NONE
    batch, time, head = x.stride()[:3]
    return x.data_ptr(), batch, time, head, _DTYPES[x.dtype]


def _decay_view(x: Tensor | None) -> tuple[int, tuple[int, int, int, int, int]]:
    """The kind of a decay, by its rank, and its view."""
    if x is None:
        return 0, _NONE
    if x.ndim == 1:
        return 1, (x.data_ptr(), 0, 0, x.stride(0), _DTYPES[x.dtype])
    return x.ndim - 1, _view(x)


def _data(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _dense(x: Tensor) -> Tensor:
    """A view the kernels can read: last dimension dense."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _head(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
    s: Tensor | None,
    z: Tensor | None,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    normalize: bool,
    causal: bool,
) -> tuple[Any, ...]:
    """The structure's fields up to and with z0. The tensors must outlive the call."""
    B, T, Hq, K = q.shape
    Hk, Hv, V = k.shape[2], v.shape[2], v.shape[3]
    kind, decay_view = _decay_view(decay)
    mask_strides = (0, 0) if mask is None else mask.stride()
    return (
        _LAYOUT.size,
        *(B, T, Hq, Hk, Hv, Hk if Hk > Hv else Hv, K, V),
        B if cu_seqlens is None else cu_seqlens.numel() - 1,
        _data(cu_seqlens),
        _data(mask),
        *mask_strides,
        kind,
        normalize,
        causal,
        scale,
        *_view(q),
        *_view(k),
        *_view(v),
        *decay_view,
        *_view(beta),
        _data(s),
        _data(z),
    )


_NO_BACKWARD = (0,) * 34
_NO_LOGS = (0, 0, 0)
_NO_MAP = (0, 0.0)
MAPS = {None: 0, "elu": 1, "relu": 2}
"""enum phistate_map, by the names of :attr:`phistate.features.FeatureMap.pointwise`."""


def _sizes(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> tuple[int, int, int]:
    """Sequences, state heads, output heads."""
    Hs = max(k.shape[2], v.shape[2])
    return q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1, Hs, max(q.shape[2], Hs)


def _outputs(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, normalize: bool, causal: bool, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    N, Hs, Ho = _sizes(q, k, v, cu_seqlens)
    B, T, _, K = q.shape
    V = v.shape[3]
    state = torch.float32
    slots = T // SEGMENT if keep and causal else 0
    return (
        q.new_empty(B, T, Ho, V),
        q.new_empty(N, Hs, K, V, dtype=state),
        q.new_empty((N, Hs, K) if normalize else (0,), dtype=state),
        q.new_empty((B, Hs, slots, K * (V + normalize)) if slots else (0,), dtype=state),
        q.new_empty((B, T, Ho) if keep and normalize else (0,), dtype=state),
    )


def _additive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
    s: Tensor | None,
    z: Tensor | None,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    normalize: bool,
    causal: bool,
    delta: bool,
    qk_l2norm: bool,
    map: str | None,
    map_scale: float,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, k, v = _dense(q), _dense(k), _dense(v)
    decay = decay if decay is None or decay.ndim < 4 else _dense(decay)
    s = None if s is None else s.contiguous()
    z = None if z is None else z.contiguous()
    outputs = o, final_s, final_z, checkpoints, denominators = _outputs(q, k, v, cu_seqlens, normalize, causal, keep)
    fields = (
        *_head(q, k, v, decay, beta, s, z, mask, cu_seqlens, scale, normalize, causal),
        *_view(o),
        final_s.data_ptr(),
        final_z.data_ptr() if normalize else 0,
        checkpoints.data_ptr() if checkpoints.numel() else 0,
        denominators.data_ptr() if denominators.numel() else 0,
        *_NO_BACKWARD,
        qk_l2norm,
        *_NO_LOGS,
        *(MAPS[map], map_scale),
    )
    if _kernel("delta_forward" if delta else "additive_forward")(_LAYOUT.pack(*fields)):
        native.check(-1)
    return outputs


def _log_outputs(
    log_q: Tensor, log_k: Tensor, v: Tensor, cu_seqlens: Tensor | None, normalize: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    N, Hs, Ho = _sizes(log_q, log_k, v, cu_seqlens)
    B, T, _, K = log_q.shape
    state = torch.float32
    return (
        v.new_empty(B, T, Ho, v.shape[3]),
        v.new_empty(N, Hs, K, v.shape[3], dtype=state),
        v.new_empty((N, Hs, K) if normalize else (0,), dtype=state),
        v.new_empty(N, Hs, K, dtype=state),
    )


def _additive_log(
    log_q: Tensor,
    log_k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    s: Tensor | None,
    z: Tensor | None,
    log_scale: Tensor | None,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    normalize: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    log_q, log_k, v = _dense(log_q), _dense(log_k), _dense(v)
    s, z, log_scale = (None if x is None else x.contiguous() for x in (s, z, log_scale))
    outputs = o, final_s, final_z, final_log_scale = _log_outputs(log_q, log_k, v, cu_seqlens, normalize)
    fields = (
        *_head(log_q, log_k, v, None, beta, s, z, mask, cu_seqlens, scale, normalize, True),
        *_view(o),
        final_s.data_ptr(),
        final_z.data_ptr() if normalize else 0,
        0,
        0,
        *_NO_BACKWARD,
        0,
        *(1, _data(log_scale), final_log_scale.data_ptr()),
        *_NO_MAP,
    )
    if _kernel("additive_forward")(_LAYOUT.pack(*fields)):
        native.check(-1)
    return outputs


def _additive_step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
    s: Tensor,
    z: Tensor | None,
    scale: float,
    delta: bool,
    qk_l2norm: bool,
) -> Tensor:
    q, k, v = _dense(q), _dense(k), _dense(v)
    decay = decay if decay is None or decay.ndim < 4 else _dense(decay)
    o = q.new_empty(q.shape[0], 1, max(q.shape[2], s.shape[1]), s.shape[3])
    state, normaliser = s.data_ptr(), _data(z)
    fields = (
        *_head(q, k, v, decay, beta, s, z, None, None, scale, z is not None, True),
        *_view(o),
        state,
        normaliser,
        0,
        0,
        *_NO_BACKWARD,
        qk_l2norm,
        *_NO_LOGS,
        *_NO_MAP,
    )
    if _kernel("delta_forward" if delta else "additive_forward")(_LAYOUT.pack(*fields)):
        native.check(-1)
    return o


def _additive_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
    s: Tensor | None,
    z: Tensor | None,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    normalize: bool,
    causal: bool,
    delta: bool,
    qk_l2norm: bool,
    map: str | None,
    map_scale: float,
    d_o: Tensor,
    d_s: Tensor | None,
    d_z: Tensor | None,
    o: Tensor,
    final_s: Tensor,
    final_z: Tensor,
    checkpoints: Tensor,
    denominators: Tensor,
    wants_decay: bool,
    wants_beta: bool,
    wants_s: bool,
    wants_z: bool,
) -> tuple[Tensor, ...]:
    q, k, v, d_o, o = _dense(q), _dense(k), _dense(v), _dense(d_o), _dense(o)
    decay = decay if decay is None or decay.ndim < 4 else _dense(decay)
    s = None if s is None else s.contiguous()
    z = None if z is None else z.contiguous()
    d_s = None if d_s is None else d_s.contiguous()
    d_z = None if d_z is None else d_z.contiguous()
    final_s, final_z = final_s.contiguous(), final_z.contiguous()
    outputs = _gradients(q, k, v, decay, beta, s, z, cu_seqlens, wants_decay, wants_beta, wants_s, wants_z)
    d_q, d_k, d_v, d_decay, d_beta, d_s0, d_z0 = outputs
    # Heads whose gradient gathers over several states or readers do so in float32.
    N, Hs, Ho = _sizes(q, k, v, cu_seqlens)
    wide = [
        x.new_empty(x.shape, dtype=torch.float32) if x.shape[2] != Ho and x.dtype != torch.float32 else x
        for x in (d_q, d_k, d_v)
    ]
    d_heads = d_decay
    if wants_decay and decay is not None and decay.ndim == 1:
        d_heads = q.new_empty(N, Hs, dtype=torch.float32)
    fields = (
        *_head(q, k, v, decay, beta, s, z, mask, cu_seqlens, scale, normalize, causal),
        *_view(o),
        final_s.data_ptr(),
        final_z.data_ptr() if normalize else 0,
        checkpoints.data_ptr() if checkpoints.numel() else 0,
        denominators.data_ptr() if denominators.numel() else 0,
        *_view(d_o),
        _data(d_s),
        _data(d_z) if normalize else 0,
        *_view(wide[0]),
        *_view(wide[1]),
        *_view(wide[2]),
        *((_view(d_heads) if d_heads.ndim > 2 else (d_heads.data_ptr(), 0, 0, 0, 1)) if wants_decay else _NONE),
        *(_view(d_beta) if wants_beta else _NONE),
        d_s0.data_ptr() if wants_s else 0,
        d_z0.data_ptr() if wants_z else 0,
        qk_l2norm,
        *_NO_LOGS,
        *(MAPS[map], map_scale),
    )
    if _kernel("delta_backward" if delta else "additive_backward")(_LAYOUT.pack(*fields)):
        native.check(-1)
    for x, y in zip((d_q, d_k, d_v), wide, strict=True):
        if x is not y:
            x.copy_(y)
    if d_heads is not d_decay:
        d_decay.copy_(d_heads.sum(0))
    return outputs


def _gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
    s: Tensor | None,
    z: Tensor | None,
    cu_seqlens: Tensor | None,
    wants_decay: bool,
    wants_beta: bool,
    wants_s: bool,
    wants_z: bool,
) -> tuple[Tensor, ...]:
    def like(x: Tensor | None, wanted: bool = True) -> Tensor:
        return q.new_empty(0) if x is None or not wanted else x.new_empty(x.shape)

    return (
        like(q),
        like(k),
        like(v),
        like(decay, wants_decay),
        like(beta, wants_beta),
        like(s, wants_s),
        like(z, wants_z),
    )


def _fake_additive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
    s: Tensor | None,
    z: Tensor | None,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    normalize: bool,
    causal: bool,
    delta: bool,
    qk_l2norm: bool,
    map: str | None,
    map_scale: float,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _outputs(q, k, v, cu_seqlens, normalize, causal, keep)


def _fake_log(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    log_q, log_k, v = arguments[:3]
    return _log_outputs(log_q, log_k, v, cu_seqlens=arguments[8], normalize=arguments[10])


def _fake_backward(*arguments: Any) -> tuple[Tensor, ...]:
    q, k, v, decay, beta, s, z, _mask, cu_seqlens = arguments[:9]
    return _gradients(q, k, v, decay, beta, s, z, cu_seqlens, *arguments[-4:])


def _fake_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
    s: Tensor,
    z: Tensor | None,
    scale: float,
    delta: bool,
    qk_l2norm: bool,
) -> Tensor:
    return q.new_empty(q.shape[0], 1, max(q.shape[2], s.shape[1]), s.shape[3])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, decay, beta, s, z, mask, cu_seqlens, *options, _keep = inputs
    o, final_s, final_z, checkpoints, denominators = output
    _scale, normalize, causal, *_ = options
    # The output is read again only where it was a quotient, the final state only where every query read it.
    void = q.new_empty(0)
    held = (o if normalize else void, void if causal else final_s, void if causal else final_z)
    ctx.save_for_backward(q, k, v, decay, beta, s, z, mask, cu_seqlens, *held, checkpoints, denominators)
    ctx.options = options
    ctx.mark_non_differentiable(checkpoints, denominators)
    ctx.set_materialize_grads(False)  # zeros for the checkpoints' would be as large as they


def _backward(
    ctx: Any, d_o: Tensor | None, d_s: Tensor | None, d_z: Tensor | None, *_: None
) -> tuple[Tensor | None, ...]:
    q, k, v, decay, beta, s, z, mask, cu_seqlens, o, final_s, final_z, checkpoints, denominators = ctx.saved_tensors
    wanted = ctx.needs_input_grad[3:7]
    if d_o is None:
        d_o = q.new_zeros(*q.shape[:2], _sizes(q, k, v, cu_seqlens)[2], v.shape[3])
    if o.numel() == 0:
        o = d_o
    *gradients, d_decay, d_beta, d_s0, d_z0 = torch.ops.phistate.additive_backward(
        *(q, k, v, decay, beta, s, z, mask, cu_seqlens),
        *ctx.options,
        *(d_o, d_s, d_z, o, final_s, final_z, checkpoints, denominators),
        *wanted,
    )
    side = [x if want else None for x, want in zip((d_decay, d_beta, d_s0, d_z0), wanted, strict=True)]
    return (*gradients, *side, *(None,) * 10)


library.impl("additive", _additive, "CPU")
library.impl("additive_log", _additive_log, "CPU")
library.impl("additive_backward", _additive_backward, "CPU")
library.impl("additive_step_", _additive_step_, "CPU")
torch.library.register_fake("phistate::additive", _fake_additive, lib=library)
torch.library.register_fake("phistate::additive_log", _fake_log, lib=library)
torch.library.register_fake("phistate::additive_backward", _fake_backward, lib=library)
torch.library.register_fake("phistate::additive_step_", _fake_step, lib=library)
torch.library.register_autograd("phistate::additive", _backward, setup_context=_setup, lib=library)
