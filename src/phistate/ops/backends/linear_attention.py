"""Linear attention's forward kernels as torch operators: over all tokens, on log features, and one token in place.

``torch.ops.phistate.linear_attention``, ``…_log`` and ``…_step_``; the backward kernel and the derivatives are
``linear_attention_backward.py``'s. Defined with ``torch.library``'s define/impl rather than ``custom_op``: a third of
the calling cost, which decoding pays per layer and token. The kernels fill an output they are given, so every operator
allocates its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phistate.ops.backends import abi, native

HEAD = (
    "bytes batch time heads_q heads_k heads_v heads_s key_dim value_dim sequences cu_seqlens mask mask_batch mask_time "
    "decay_kind normalize causal scale q k v decay beta s0 z0"
)
"""What every call says, in the words of ``struct phistate_linear_attention``."""

_FORWARD = abi.form(abi.LinearAttention, f"{HEAD} o s z checkpoints denominators qk_l2norm map map_scale erase")
_LOG = abi.form(abi.LinearAttention, f"{HEAD} o s z log_features log_scale0 log_scale")
_STEP = abi.form(abi.LinearAttention, f"{HEAD} o s z qk_l2norm erase")
_SIZE = _FORWARD.size

SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? decay, Tensor? beta, Tensor? erase, Tensor? s, Tensor? z, Tensor? mask, "
    "Tensor? cu_seqlens, float scale, bool normalize, bool causal, bool delta, bool qk_l2norm, str? map, "
    "float map_scale"
)
"""What forward and backward both take."""

_LOG_SCHEMA = (
    "Tensor log_q, Tensor log_k, Tensor v, Tensor? beta, Tensor? s, Tensor? z, Tensor? log_scale, Tensor? mask, "
    "Tensor? cu_seqlens, float scale, bool normalize"
)

library = torch.library.Library("phistate", "FRAGMENT")
library.define(f"linear_attention({SCHEMA}, bool keep) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
library.define(f"linear_attention_log({_LOG_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)")
library.define(
    "linear_attention_step_(Tensor q, Tensor k, Tensor v, Tensor? decay, Tensor? beta, Tensor? erase, Tensor(a!) s, "
    "Tensor(b!)? z, float scale, bool delta, bool qk_l2norm) -> Tensor"
)


def _decay_view(x: Tensor | None) -> tuple[int, tuple[int, ...]]:
    """The kind of a decay, by its rank, and its view."""
    if x is None:
        return 0, abi.ABSENT_VIEW
    if x.ndim == 1:
        return 1, (x.data_ptr(), 0, 0, x.stride(0), abi.DTYPES[x.dtype])
    return x.ndim - 1, abi.view(x)


def dense(x: Tensor) -> Tensor:
    """A view the kernels can read: last dimension dense."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def dense_side(x: Tensor | None) -> Tensor | None:
    """The same for a side input, of which only one per feature is read by rows."""
    return x if x is None or x.ndim < 4 else dense(x)


def contiguous(x: Tensor | None) -> Tensor | None:
    """A state as the kernels read it."""
    return None if x is None else x.contiguous()


def head(
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
) -> tuple[float, ...]:
    """The values of the fields ``HEAD``. The tensors must outlive the call."""
    B, T, Hq, K = q.shape
    Hk, Hv, V = k.shape[2], v.shape[2], v.shape[3]
    kind, decay_view = _decay_view(decay)
    mask_strides = (0, 0) if mask is None else mask.stride()
    return (
        _SIZE,
        *(B, T, Hq, Hk, Hv, Hk if Hk > Hv else Hv, K, V),
        B if cu_seqlens is None else cu_seqlens.numel() - 1,
        abi.address(cu_seqlens),
        abi.address(mask),
        *mask_strides,
        kind,
        normalize,
        causal,
        scale,
        *abi.view(q),
        *abi.view(k),
        *abi.view(v),
        *decay_view,
        *abi.view(beta),
        abi.address(s),
        abi.address(z),
    )


def sizes(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> tuple[int, int, int]:
    """Sequences, state heads, output heads."""
    Hs = max(k.shape[2], v.shape[2])
    return q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1, Hs, max(q.shape[2], Hs)


def _outputs(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, normalize: bool, causal: bool, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    N, Hs, Ho = sizes(q, k, v, cu_seqlens)
    B, T, _, K = q.shape
    V = v.shape[3]
    state = torch.float32
    slots = T // abi.SEGMENT if keep and causal else 0
    return (
        q.new_empty(B, T, Ho, V),
        q.new_empty(N, Hs, K, V, dtype=state),
        q.new_empty((N, Hs, K) if normalize else (0,), dtype=state),
        q.new_empty((B, Hs, slots, K * (V + normalize)) if slots else (0,), dtype=state),
        q.new_empty((B, T, Ho) if keep and normalize else (0,), dtype=state),
    )


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
    erase: Tensor | None,
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
    q, k, v = dense(q), dense(k), dense(v)
    decay, erase = dense_side(decay), dense_side(erase)
    s, z = contiguous(s), contiguous(z)
    outputs = o, final_s, final_z, checkpoints, denominators = _outputs(q, k, v, cu_seqlens, normalize, causal, keep)
    fields = (
        *head(q, k, v, decay, beta, s, z, mask, cu_seqlens, scale, normalize, causal),
        *abi.view(o),
        final_s.data_ptr(),
        final_z.data_ptr() if normalize else 0,
        checkpoints.data_ptr() if checkpoints.numel() else 0,
        denominators.data_ptr() if denominators.numel() else 0,
        qk_l2norm,
        *(abi.MAPS[map], map_scale),
        *abi.view(erase),
    )
    if native.kernel("delta_forward" if delta else "additive_forward")(_FORWARD.pack(*fields)):
        native.check(-1)
    return outputs


def _log_outputs(
    log_q: Tensor, log_k: Tensor, v: Tensor, cu_seqlens: Tensor | None, normalize: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    N, Hs, Ho = sizes(log_q, log_k, v, cu_seqlens)
    B, T, _, K = log_q.shape
    state = torch.float32
    return (
        v.new_empty(B, T, Ho, v.shape[3]),
        v.new_empty(N, Hs, K, v.shape[3], dtype=state),
        v.new_empty((N, Hs, K) if normalize else (0,), dtype=state),
        v.new_empty(N, Hs, K, dtype=state),
    )


def _log(
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
    log_q, log_k, v = dense(log_q), dense(log_k), dense(v)
    s, z, log_scale = contiguous(s), contiguous(z), contiguous(log_scale)
    outputs = o, final_s, final_z, final_log_scale = _log_outputs(log_q, log_k, v, cu_seqlens, normalize)
    fields = (
        *head(log_q, log_k, v, None, beta, s, z, mask, cu_seqlens, scale, normalize, True),
        *abi.view(o),
        final_s.data_ptr(),
        final_z.data_ptr() if normalize else 0,
        *(1, abi.address(log_scale), final_log_scale.data_ptr()),
    )
    if native.kernel("additive_forward")(_LOG.pack(*fields)):
        native.check(-1)
    return outputs


def _step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
    erase: Tensor | None,
    s: Tensor,
    z: Tensor | None,
    scale: float,
    delta: bool,
    qk_l2norm: bool,
) -> Tensor:
    q, k, v = dense(q), dense(k), dense(v)
    decay, erase = dense_side(decay), dense_side(erase)
    o = q.new_empty(q.shape[0], 1, max(q.shape[2], s.shape[1]), s.shape[3])
    state, normaliser = s.data_ptr(), abi.address(z)
    fields = (
        *head(q, k, v, decay, beta, s, z, None, None, scale, z is not None, True),
        *abi.view(o),
        state,
        normaliser,
        qk_l2norm,
        *abi.view(erase),
    )
    if native.kernel("delta_forward" if delta else "additive_forward")(_STEP.pack(*fields)):
        native.check(-1)
    return o


def _fake_forward(*arguments: Any) -> tuple[Tensor, ...]:
    q, k, v = arguments[:3]
    cu_seqlens, _scale, normalize, causal = arguments[9:13]
    return _outputs(q, k, v, cu_seqlens, normalize, causal, keep=arguments[-1])


def _fake_log(*arguments: Any) -> tuple[Tensor, ...]:
    log_q, log_k, v = arguments[:3]
    return _log_outputs(log_q, log_k, v, cu_seqlens=arguments[8], normalize=arguments[10])


def _fake_step(q: Tensor, *arguments: Any) -> Tensor:
    s = arguments[5]
    return q.new_empty(q.shape[0], 1, max(q.shape[2], s.shape[1]), s.shape[3])


library.impl("linear_attention", _forward, "CPU")
library.impl("linear_attention_log", _log, "CPU")
library.impl("linear_attention_step_", _step_, "CPU")
torch.library.register_fake("phistate::linear_attention", _fake_forward, lib=library)
torch.library.register_fake("phistate::linear_attention_log", _fake_log, lib=library)
torch.library.register_fake("phistate::linear_attention_step_", _fake_step, lib=library)
