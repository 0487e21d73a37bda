"""What people import from causal_conv1d: the short convolution, its decode step and its states, ``[B,D,L]``."""

from __future__ import annotations

import torch
from torch import Tensor

from phistate.compat.arguments import FLOATING, beside, on_cpu
from phistate.compat.package import Package
from phistate.compat.packing import packing
from phistate.compat.rows import chosen, put_back, row_numbers
from phistate.ops.causal_conv1d import MAX_WIDTH, causal_conv1d, causal_conv1d_step_
from phistate.ops.checks import check_float, check_overwritable, check_side_input

ACTIVATIONS = {None: None, "silu": "silu", "swish": "silu"}
"""What other libraries call our convolution's activations."""


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """causal_conv1d: every channel filtered by its own taps.

    Args:
        x: ``[B,D,L]``, in any order in memory.
        weight: ``[D,W]``, W from 2 to 8, the last tap at the present.
        bias: ``[D]`` or None.
        seq_idx: ``[B,L]`` a number per token: where it changes, another sequence begins, which sees nothing of the one
            before. A negative one is padding, whose row is 0.
        initial_states: ``[B,D,W-1]`` the inputs before the first; with seq_idx before the first sequence of each row.
        return_final_states: give the last W - 1 inputs too; not with seq_idx.
        final_states_out: ``[B,D,W-1]`` where these are written.
        activation: ``"silu"``, ``"swish"`` (the same) or None.

    Returns:
        ``[B,D,L]``, and the states if asked.

    Raises:
        ValueError: shapes or choices that do not fit.
        TypeError: a wrong type or dtype.

    >>> causal_conv1d_fn(torch.ones(1, 1, 4), torch.ones(1, 3)).tolist()
    [[[1.0, 2.0, 3.0, 3.0]]]
    """
    on_cpu("causal_conv1d", "x", x, "[B,D,L]", 3)
    weight, bias, act = _filter(x, weight, bias, activation)
    past = (x.shape[0], *weight.shape[:1], weight.shape[1] - 1)
    before = beside("initial_states", initial_states, x, past)
    before = None if before is None else before.to(x.dtype)
    tokens = x.transpose(1, 2)
    if seq_idx is None:
        y, last = causal_conv1d(tokens, weight, bias, act, before, return_state=True)
        y = y.transpose(1, 2)
        if not return_final_states:
            return y
        if final_states_out is None:
            return y, last
        check_side_input("final_states_out", final_states_out, x, [past], FLOATING)
        return y, final_states_out.copy_(last)
    if return_final_states:
        raise ValueError("return_final_states: got it beside seq_idx; takes one of the two")
    pack = packing(tokens, seq_idx=seq_idx)
    assert pack is not None
    y = causal_conv1d(pack.fold(tokens), weight, bias, act, pack.enter(before), cu_seqlens=pack.offsets)
    return pack.unfold(y).transpose(1, 2).masked_fill((seq_idx < 0).unsqueeze(1), 0.0)


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
) -> Tensor:
    """causal_conv1d_step_: the next tokens, with the last inputs kept in place.

    Records no gradient, as there.

    Args:
        x: ``[B,D]``, one token, or ``[B,D,L]``.
        conv_state: ``[B,D,S]``, S ≥ W - 1, the last inputs, oldest first; overwritten.
        weight: ``[D,W]``.
        bias: ``[D]`` or None.
        activation: as in :func:`causal_conv1d_fn`.
        cache_seqlens: ``[B]`` int, how many tokens each row has seen: conv_state is then a ring, token t at t mod S.
        conv_state_indices: ``[B]`` int, which row of a larger conv_state each row of x goes on from; a negative one is
            padding, whose row is 0 and which touches no state.

    Returns:
        ``[B,D]`` or ``[B,D,L]``, as x.

    Raises:
        ValueError: shapes or choices that do not fit.
        TypeError: a wrong type or dtype.

    >>> state = torch.zeros(1, 1, 3)
    >>> causal_conv1d_update(torch.ones(1, 1), state, torch.ones(1, 3)).tolist(), state.tolist()
    ([[1.0]], [[[0.0, 0.0, 1.0]]])
    """
    tokens = x.unsqueeze(2) if isinstance(x, Tensor) and x.ndim == 2 else x
    on_cpu("causal_conv1d", "x", tokens, "[B,D] or [B,D,L]", 3)
    weight, bias, act = _filter(tokens, weight, bias, activation)
    seen = row_numbers("cache_seqlens", cache_seqlens, x.shape[0])
    numbers = row_numbers("conv_state_indices", conv_state_indices, x.shape[0])
    check_float("conv_state", conv_state, "[B,D,S]", 3)
    rows, kept = (x.shape[0] if numbers is None else conv_state.shape[0]), conv_state.shape[2]
    check_side_input("conv_state", conv_state, x, [(rows, x.shape[1], max(kept, weight.shape[1] - 1))], FLOATING)
    check_overwritable("conv_state", conv_state)
    with torch.no_grad():
        state = chosen(conv_state, numbers)
        if seen is not None:
            y = _around(state, tokens, weight, bias, act, seen)
        elif tokens.shape[2] == 1:
            y = causal_conv1d_step_(state, tokens.squeeze(2), weight, bias, act).unsqueeze(2)
        else:
            past = state[..., kept - weight.shape[1] + 1 :]
            y = _after(past, tokens, weight, bias, act)
            state.copy_(torch.cat([state, tokens.to(state.dtype)], 2)[..., tokens.shape[2] :])
        y = put_back(conv_state, state, y, numbers)
    return y.view(x.shape)


def causal_conv1d_varlen_states(x: Tensor, cu_seqlens: Tensor, state_len: int) -> Tensor:
    """The last ``state_len`` inputs of each packed sequence, oldest first, zeros before its first.

    Args:
        x: ``[T,D]`` the inputs of N sequences, one after another.
        cu_seqlens: ``[N+1]`` int, where each begins, from 0 to T.
        state_len: how many are kept, 1 or more.

    Returns:
        ``[N,D,state_len]``.

    Raises:
        ValueError: shapes that do not fit.
        TypeError: a wrong type or dtype.

    >>> causal_conv1d_varlen_states(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([0, 1, 3]), 2).tolist()
    [[[0.0, 1.0]], [[2.0, 3.0]]]
    """
    on_cpu("causal_conv1d", "x", x, "[T,D]", 2)
    if state_len < 1:
        raise ValueError(f"state_len: got {state_len}; takes 1 or more")
    pack = packing(x.unsqueeze(0), cu_seqlens)
    assert pack is not None
    begin, end = pack.offsets[:-1, None].to(x.device), pack.offsets[1:, None].to(x.device)
    step = end - state_len + torch.arange(state_len, device=x.device)
    # A step of no token reads a row of zeros before the first.
    held = torch.cat([x.new_zeros(1, x.shape[1]), x])
    return held[(step + 1).masked_fill(step < begin, 0)].transpose(1, 2)


def causal_conv1d_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
    seq_idx: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """causal_conv1d, as :func:`causal_conv1d_fn`, in the order of arguments of the package's reference."""
    return causal_conv1d_fn(x, weight, bias, seq_idx, initial_states, return_final_states, final_states_out, activation)


def causal_conv1d_update_ref(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
) -> Tensor:
    """causal_conv1d_step_, as :func:`causal_conv1d_update`, for a state of the batch's own rows."""
    return causal_conv1d_update(x, conv_state, weight, bias, activation, cache_seqlens)


def _filter(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> tuple[Tensor, Tensor | None, str | None]:
    """Weight, bias and activation as the op takes them beside ``x [B,D,L]``."""
    dim = x.shape[1]
    if not isinstance(weight, Tensor) or weight.ndim != 2 or not 2 <= weight.shape[1] <= MAX_WIDTH:
        got = f"shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else type(weight).__name__
        raise ValueError(f"weight: got {got}; takes [D,W] with W from 2 to {MAX_WIDTH}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: got {activation!r}; takes 'silu', 'swish' or None")
    weight = beside("weight", weight, x, (dim, weight.shape[1]))
    return weight, beside("bias", bias, x, (dim,)), ACTIVATIONS[activation]


def _after(past: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """``x [B,D,L]`` filtered after the inputs ``past [B,D,W-1]``."""
    return causal_conv1d(x.transpose(1, 2), weight, bias, activation, past.to(x.dtype)).transpose(1, 2)


def _around(
    ring: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, seen: Tensor
) -> Tensor:
    """``x [B,D,L]`` filtered after the last inputs in ``ring [B,D,S]``, where token t stands at t mod S."""
    dim, length, slots = x.shape[1], x.shape[2], ring.shape[2]

    def places(first: int, last: int) -> Tensor:
        steps = seen[:, None] + torch.arange(first, last, device=x.device)
        return steps.remainder(slots).unsqueeze(1).expand(-1, dim, -1)

    y = _after(ring.gather(2, places(1 - weight.shape[1], 0)), x, weight, bias, activation)
    begin = max(length - slots, 0)  # what would be overwritten again
    ring.scatter_(2, places(begin, length), x[..., begin:].to(ring.dtype))
    return y


def _probe() -> None:
    from causal_conv1d import causal_conv1d_fn as installed  # type: ignore[import-not-found]

    installed(torch.zeros(1, 8, 8), torch.zeros(8, 4))


_INTERFACE = {
    function.__name__: function
    for function in (causal_conv1d_fn, causal_conv1d_update, causal_conv1d_ref, causal_conv1d_update_ref)
}

PACKAGE = Package(
    name="causal_conv1d",
    versions=("1.7.0",),
    table={
        "causal_conv1d": {
            "causal_conv1d_fn": causal_conv1d_fn,
            "causal_conv1d_update": causal_conv1d_update,
        },
        "causal_conv1d.causal_conv1d_interface": _INTERFACE,
        "causal_conv1d.causal_conv1d_varlen": {
            "causal_conv1d_varlen_states": causal_conv1d_varlen_states,
            "causal_conv1d_varlen_states_ref": causal_conv1d_varlen_states,
        },
    },
    file=__file__,
    probe=_probe,
)
