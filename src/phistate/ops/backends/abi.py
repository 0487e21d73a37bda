"""The structures of csrc/phistate.h, field by field, and how one is filled by naming what a call gives.

Every field is an ``int64_t``, a pointer or a ``double``, 8 bytes each; pointers are passed as addresses.
"""

from __future__ import annotations

import struct
from ctypes import Structure, c_double, c_int64, c_void_p, sizeof
from typing import Any

import torch
from torch import Tensor

VERSION = 6
"""PHISTATE_ABI."""

DTYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
"""Storage types the kernels read and write, by their code in ``enum phistate_dtype``."""

MAPS = {None: 0, "elu": 1, "relu": 2}
"""``enum phistate_map``, by the names of :attr:`phistate.features.FeatureMap.pointwise`."""

SEGMENT = 512
"""PHISTATE_SEGMENT: tokens between two states of linear attention kept for backward."""

SELECTIVE_SEGMENT = 32
"""PHISTATE_SELECTIVE_SEGMENT: steps between two states of a selective scan kept for backward."""


def _fields(*groups: tuple[Any, str]) -> list[tuple[str, Any]]:
    return [(name, kind) for kind, names in groups for name in names.split()]


class View(Structure):
    """``phistate_view``: an operand ``[batch, time, head, features]``, its last dimension dense."""

    _fields_ = _fields((c_void_p, "data"), (c_int64, "batch time head dtype"))


class Series(Structure):
    """``phistate_series``: an operand ``[batch, time, groups, channels]`` of any strides."""

    _fields_ = _fields((c_void_p, "data"), (c_int64, "batch time group channel dtype"))


class Layout(Structure):
    """``phistate_layout``: which steps are tokens, and of which sequence."""

    _fields_ = _fields(
        (c_int64, "batch time sequences"), (c_void_p, "cu_seqlens mask"), (c_int64, "mask_batch mask_time")
    )


class LinearAttention(Structure):
    """``phistate_linear_attention``."""

    _fields_ = _fields(
        (c_int64, "bytes batch time heads_q heads_k heads_v heads_s key_dim value_dim sequences"),
        (c_void_p, "cu_seqlens mask"),
        (c_int64, "mask_batch mask_time decay_kind normalize causal"),
        (c_double, "scale"),
        (View, "q k v decay beta"),
        (c_void_p, "s0 z0"),
        (View, "o"),
        (c_void_p, "s z checkpoints denominators"),
        (View, "d_o"),
        (c_void_p, "d_s d_z"),
        (View, "d_q d_k d_v d_decay d_beta"),
        (c_void_p, "d_s0 d_z0"),
        (c_int64, "qk_l2norm log_features"),
        (c_void_p, "log_scale0 log_scale"),
        (c_int64, "map"),
        (c_double, "map_scale"),
        (View, "erase d_erase"),
    )


class Selective(Structure):
    """``phistate_selective``."""

    _fields_ = _fields(
        (c_int64, "bytes"),
        (Layout, "layout"),
        (c_int64, "channels groups states softplus"),
        (Series, "x delta z b c"),
        (c_void_p, "a d bias h0"),
        (Series, "y"),
        (c_void_p, "h checkpoints"),
        (Series, "d_y"),
        (c_void_p, "d_h"),
        (Series, "d_x d_delta d_z"),
        (c_int64, "parts"),
        (c_void_p, "d_b d_c d_a d_d d_bias d_h0"),
    )


class SelectiveStep(Structure):
    """``phistate_selective_step``."""

    _fields_ = _fields(
        (c_int64, "bytes batch channels groups states repeat softplus"),
        (c_double, "low high"),
        (Series, "x delta z b c"),
        (c_void_p, "a"),
        (c_int64, "a_channel a_state"),
        (c_void_p, "d bias"),
        (Series, "h y"),
    )


class Conv(Structure):
    """``phistate_conv``."""

    _fields_ = _fields(
        (c_int64, "bytes"),
        (Layout, "layout"),
        (c_int64, "channels width silu"),
        (Series, "x y"),
        (c_void_p, "weight bias"),
        (Series, "s0 s d_y d_s d_x d_s0"),
        (c_void_p, "d_weight d_bias"),
    )


class ConvStep(Structure):
    """``phistate_conv_step``."""

    _fields_ = _fields(
        (c_int64, "bytes batch channels width kept silu"),
        (Series, "x y"),
        (c_void_p, "weight bias"),
        (Series, "s"),
    )


STRUCTURES: dict[str, type[Structure]] = {
    "phistate_view": View,
    "phistate_series": Series,
    "phistate_layout": Layout,
    "phistate_linear_attention": LinearAttention,
    "phistate_selective": Selective,
    "phistate_selective_step": SelectiveStep,
    "phistate_conv": Conv,
    "phistate_conv_step": ConvStep,
}
"""By their name in C."""


def form(structure: type[Structure], names: str) -> struct.Struct:
    """What packs ``structure`` from the fields ``names`` (words, in its own order), with zeros in all others.

    A nested structure takes as many values as it has fields. ``struct`` packs several times faster than ctypes fills.

    Raises:
        ValueError: a name that is no field, or not in the structure's order.

    >>> form(View, "data dtype").pack(7, 1) == bytes(View(data=7, dtype=1))
    True
    """
    wanted = names.split()
    kept = [name for name, *_ in structure._fields_ if name in wanted]
    if kept != wanted:
        raise ValueError(f"names: got {wanted}; takes fields of {structure.__name__} in its order")
    parts = (
        _codes(kind) if name in wanted else f"{sizeof(kind)}x"
        for name, kind in ((name, kind) for name, kind, *_ in structure._fields_)
    )
    return struct.Struct("=" + "".join(parts))


def _codes(kind: Any) -> str:
    """``struct``'s letters for one field."""
    if issubclass(kind, Structure):
        return "".join(_codes(inner) for _, inner, *_ in kind._fields_)
    return "d" if kind is c_double else "q"


ABSENT_VIEW = (0,) * len(View._fields_)
"""A view of nothing."""

ABSENT_SERIES = (0,) * len(Series._fields_)
"""A series of nothing."""


def view(x: Tensor | None) -> tuple[int, ...]:
    """``phistate_view`` of a ``[B,T,H,·]`` or ``[B,T,H]`` tensor."""
    if x is None:
        return ABSENT_VIEW
    batch, time, head = x.stride()[:3]
    return x.data_ptr(), batch, time, head, DTYPES[x.dtype]


def series(x: Tensor | None) -> tuple[int, ...]:
    """``phistate_series`` of a ``[B,T,C]`` or ``[B,T,G,N]`` tensor."""
    if x is None:
        return ABSENT_SERIES
    if x.ndim == 3:
        batch, time, channel = x.stride()
        return x.data_ptr(), batch, time, 0, channel, DTYPES[x.dtype]
    batch, time, group, channel = x.stride()
    return x.data_ptr(), batch, time, group, channel, DTYPES[x.dtype]


def layout(x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> tuple[int, ...]:
    """``phistate_layout`` of a ``[B,T,·]`` tensor. cu_seqlens is int64 and dense."""
    B, T = x.shape[:2]
    masked = (0, 0, 0) if mask is None else (mask.data_ptr(), *mask.stride())
    if cu_seqlens is None:
        return B, T, B, 0, *masked
    return B, T, cu_seqlens.numel() - 1, cu_seqlens.data_ptr(), *masked


def address(x: Tensor | None) -> int:
    """Where a dense tensor's data starts; absent: null."""
    return 0 if x is None else x.data_ptr()
