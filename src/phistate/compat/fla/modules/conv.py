"""fla's short convolution and its step: ``fla.modules.causal_conv1d``. Its cache holds W inputs, one more than ours."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phistate.compat.arguments import wide
from phistate.compat.causal_conv1d import ACTIVATIONS
from phistate.compat.fla.precision import widened
from phistate.compat.packing import packing
from phistate.ops import causal_conv1d as ops
from phistate.ops.checks import check_choice
from phistate.values import any_tangent


def causal_conv1d(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool | None = False,
    activation: str | None = None,
    backend: str | None = "triton",
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Each channel filtered by its own W taps, then activated, then ``residual`` added.

    Args:
        x: ``[B,T,D]``, or ``[B,T,H,D/H]``, which is filtered as one.
        weight: ``[D,W]``.
        bias: ``[D]``.
        residual: as x.
        initial_state: ``[N,D,W]``, the last inputs, oldest first; the very first of them is in no window.
        output_final_state: give the last W inputs of each sequence too, in x's type; else None.
        activation: ``"silu"``, ``"swish"`` or None.
        backend: fla's name of a backend, all of which are this one here.
        cu_seqlens: ``[N+1]`` offsets of packed sequences, B == 1.
        cu_seqlens_cpu: the same in memory; read if it is there.
        chunk_indices: not needed here.
        cp_context: None; sequences split over processes are not served.
        kwargs: ``seq_idx [B,T]``, a number for each sequence, in place of ``cu_seqlens``.
    """
    if cp_context is not None:
        raise ValueError("cp_context: got one; takes None, sequences are not split over processes here")
    check_choice("backend", str(backend), ("triton", "mix", "cuda"))
    seq_idx = kwargs.pop("seq_idx", None)
    if kwargs:
        raise TypeError(f"{next(iter(kwargs))}: got an argument that causal_conv1d does not have; takes seq_idx")
    weight = _taps(weight, activation)
    flat = x if x.shape[-1] == weight.shape[0] else x.flatten(2)
    pack = packing(flat, cu_seqlens_cpu if cu_seqlens is not None and cu_seqlens_cpu is not None else cu_seqlens)
    pack = pack or packing(flat, seq_idx=seq_idx)
    if pack is not None:
        flat = pack.fold(flat)
    offsets = None if pack is None else pack.offsets
    sequences = flat.shape[0] if offsets is None else offsets.numel() - 1
    state = initial_state if pack is None else pack.enter(initial_state)
    if state is not None:
        _check_cache("initial_state", state, (sequences, *weight.shape))
        state = state.to(x.dtype)

    y = _filter(flat, weight, bias, activation, state, offsets)
    y = (y if pack is None else pack.unfold(y)).reshape(x.shape)
    if residual is not None:
        y = y + residual.reshape(x.shape).to(x.dtype)
    if not output_final_state:
        return y, None
    last = _last_inputs(flat, weight.shape[1], state, offsets)
    return y, last if pack is None else pack.leave(last)


def causal_conv1d_update(
    x: Tensor,
    cache: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """One token of each sequence, the last W inputs ``cache [N,D,W]`` updated in place.

    ``x`` has N rows of D channels in any shape: ``[N,D]``, ``[N,1,D]``, ``[1,N,D]`` (packed), ``[N,1,H,D/H]``. What is
    in the cache carries no gradient; the token and the parameters do.
    """
    weight = _taps(weight, activation)
    rows = x.reshape(-1, weight.shape[0])
    _check_cache("cache", cache, (rows.shape[0], *weight.shape))
    tensors = (rows, weight, bias)
    recorded = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if recorded or any_tangent(tensors) or not _native(weight):
        past = cache.detach().to(x.dtype, copy=True)
        y = _filter(rows.unsqueeze(1), weight, bias, activation, past, None).squeeze(1)
        with torch.no_grad():
            cache.copy_(torch.cat([cache[..., 1:], rows.unsqueeze(-1).to(cache.dtype)], -1))
    else:
        with torch.no_grad():
            y = ops.causal_conv1d_step_(cache, rows, *_parameters(rows, weight, bias), ACTIVATIONS[activation])
    y = y.reshape(x.shape)
    return y if residual is None else y + residual.reshape(x.shape).to(x.dtype), cache


def causal_conv1d_update_states(
    x: Tensor, state_len: int, initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> Tensor:
    """``[N,D,state_len]``: the last inputs of each sequence, those of ``initial_state`` where it is shorter."""
    if x.ndim == 2:
        x = x.unsqueeze(0)
    pack = packing(x, cu_seqlens)
    offsets = None if pack is None else pack.offsets
    sequences = x.shape[0] if offsets is None else offsets.numel() - 1
    if initial_state is not None:
        _check_cache("initial_state", initial_state, (sequences, x.shape[2], state_len))
        initial_state = initial_state.to(x.dtype)
    return _last_inputs(x, state_len, initial_state, offsets)


def _taps(weight: Tensor | None, activation: str | None) -> Tensor:
    if weight is None or weight.ndim != 2:
        got = "None" if weight is None else f"shape {tuple(weight.shape)}"
        raise ValueError(f"weight: got {got}; takes [D,W]")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: got {activation!r}; takes 'silu', 'swish' or None")
    return weight


def _check_cache(name: str, cache: Tensor | None, shape: tuple[int, ...]) -> None:
    if cache is None or cache.shape != shape:
        got = "None" if cache is None else f"shape {tuple(cache.shape)}"
        raise ValueError(f"{name}: got {got}; takes [N,D,W] = {shape}")


def _native(weight: Tensor) -> bool:
    """Whether our convolution takes filters of this width."""
    return 2 <= weight.shape[1] <= ops.MAX_WIDTH


def _parameters(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Weight and bias in a type that our convolution takes beside x."""
    weight = weight if weight.dtype == x.dtype else weight.to(wide(x))
    return weight, None if bias is None else bias if bias.dtype == x.dtype else bias.to(wide(x))


def _filter(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, state: Tensor | None, offsets: Tensor | None
) -> Tensor:
    """The activated convolution of ``x [B,T,D]``, without a residual."""
    if _native(weight):
        past = None if state is None else state[..., 1:]
        parameters = _parameters(x, weight, bias)
        return ops.causal_conv1d(x, *parameters, ACTIVATIONS[activation], past, cu_seqlens=offsets)
    y = _any_width(widened(x), widened(weight), None if state is None else widened(state), offsets)
    if bias is not None:
        y = y + widened(bias)
    return (y if activation is None else F.silu(y)).to(x.dtype)


def _any_width(x: Tensor, weight: Tensor, state: Tensor | None, offsets: Tensor | None) -> Tensor:
    """The convolution by torch's own, sequence by sequence."""
    channels, width = weight.shape
    lengths = [x.shape[1]] * x.shape[0] if offsets is None else offsets.diff().tolist()
    parts = x.flatten(0, 1).split(lengths)
    pieces = []
    for n, part in enumerate(parts):
        past = x.new_zeros(channels, width - 1) if state is None else state[n, :, 1:]
        series = torch.cat([past, part.T], 1)
        pieces.append(F.conv1d(series, weight.unsqueeze(1), groups=channels).T if len(part) else part)
    return torch.cat(pieces).view(x.shape) if pieces else x


def _last_inputs(x: Tensor, width: int, state: Tensor | None, offsets: Tensor | None) -> Tensor:
    """``[N,D,W]``: the last W inputs of each sequence, older ones from ``state`` or 0."""
    N = x.shape[0] if offsets is None else offsets.numel() - 1
    past = x.new_zeros(N, x.shape[2], width) if state is None else state
    if offsets is None:
        return torch.cat([past, x[:, -width:].mT], -1)[..., -width:].contiguous()
    # Slot w of a sequence of L steps is its step L - W + w, or that many before the first: slot L + w of the past.
    lengths = offsets.diff().unsqueeze(1)
    slot = torch.arange(width)
    step = lengths - width + slot
    if x.shape[1] == 0:
        return past.clone()
    here = x[0, (offsets[:-1].unsqueeze(1) + step).clamp_min(0)].mT
    older = past.gather(2, (lengths + slot).clamp_max(width - 1).unsqueeze(1).expand(-1, x.shape[2], -1))
    return torch.where((step >= 0).unsqueeze(1), here, older).contiguous()
