"""What every op of fla shares: its options checked, its layouts into linear_attention's, its states and dtypes back.

fla's functions take a ``**kwargs`` that swallows what it does not know. Here it holds the names fla itself looks for,
and anything else is an error.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from phistate.compat.arguments import on_cpu
from phistate.compat.fla.precision import widened
from phistate.compat.states import state_of
from phistate.ops.linear_attention import linear_attention

Result = tuple[Tensor, Tensor | None]

LEAST = -60.0
"""The least decay of ops that divide by one. Of a state kept by less than e^-60 nothing is left beside what float32
holds, and e^60 is finite in it."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    decay: Tensor | None = None,
    decay_of_values: Tensor | None = None,
    beta: Tensor | None = None,
    erase: Tensor | None = None,
    write: str = "add",
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    reverse: bool = False,
    qk_l2norm: bool = False,
    dtype: torch.dtype | None = None,
    gate: str = "g",
) -> Result:
    """One call of :func:`phistate.linear_attention` in fla's terms; gives o and the final state, if asked for.

    Args:
        q: ``[B,T,Hq,K]``; q, k and v may differ in dtype and are then promoted.
        k: ``[B,T,H,K]``.
        v: ``[B,T,HV,V]``.
        decay: log of what a step keeps, ``[HV]``, ``[B,T,HV]`` or ``[B,T,HV,K]``.
        decay_of_values: the same per channel of v, ``[B,T,HV,V]``.
        beta: ``[B,T,HV]``, or ``[B,T,HV,V]``: a strength per channel of v.
        erase: as k: what a delta write erases by, in place of k.
        write: ``"add"`` or ``"delta"``.
        scale: None: K ** -0.5.
        initial_state: ``[N,HV,K,V]`` of any floating type.
        output_final_state: False: the state given back is None.
        state_v_first: states are ``[N,HV,V,K]``.
        cu_seqlens: ``[N+1]`` offsets of packed sequences, B == 1.
        reverse: run each sequence from its end to its beginning.
        qk_l2norm: divide q and k by √(Σx² + 1e-6).
        dtype: of o; None: q's.
        gate: what the caller's argument for the decay is called, for messages.
    """
    on_cpu("fla", "q", q, "[B,T,H,K]", 4)
    check_packed(q, cu_seqlens, None if initial_state is None else initial_state.shape[0])
    dtype = q.dtype if dtype is None else dtype
    operands = [x for x in (q, k, v, erase) if x is not None]
    common = functools.reduce(torch.promote_types, (x.dtype for x in operands))
    q, k, v = (x.to(common) for x in (q, k, v))
    erase = None if erase is None else erase.to(common)
    decay, decay_of_values, beta = (_side(x, common) for x in (decay, decay_of_values, beta))
    if reverse:
        back = turned(q, cu_seqlens)
        q, k, v = (back(x) for x in (q, k, v))
        erase, decay_of_values, beta = (None if x is None else back(x) for x in (erase, decay_of_values, beta))
        decay = decay if decay is None or decay.ndim == 1 else back(decay)
    kept = initial_state if initial_state is None or not state_v_first else initial_state.mT
    columns = v.shape[-1]
    by_column = decay_of_values is not None or (beta is not None and beta.ndim == v.ndim)
    if by_column:
        v, decay, beta, kept = _columns_as_heads(v, decay, decay_of_values, beta, kept)
    with _named(gate):
        o, state = linear_attention(
            q,
            k,
            v,
            decay=decay,
            beta=beta,
            write=write,
            erase=erase,
            scale=scale,
            qk_l2norm=qk_l2norm,
            initial_state=None if kept is None else state_of(kept, q),
            return_state=True,
            cu_seqlens=cu_seqlens,
        )
    s = state.s
    if by_column:
        o = o.unflatten(2, (-1, columns)).squeeze(-1)
        s = s.unflatten(1, (-1, columns)).squeeze(-1).mT
    if reverse:
        o = turned(o, cu_seqlens)(o)
    if state_v_first:
        s = s.mT
    return o.to(dtype), s.contiguous() if output_final_state else None


def _side(x: Tensor | None, common: torch.dtype) -> Tensor | None:
    return x if x is None or x.dtype in (common, torch.float32) else widened(x)


def turned(x: Tensor, cu_seqlens: Tensor | None) -> Any:
    """What turns each sequence along dimension 1 around; turning twice is nothing."""
    if cu_seqlens is None:
        return lambda t: t.flip(1)
    ends = cu_seqlens.to(x.device, torch.int64)
    lengths = ends.diff()
    steps = torch.arange(x.shape[1], device=x.device)
    order = torch.repeat_interleave(ends[1:] + ends[:-1] - 1, lengths) - steps
    return lambda t: t.index_select(1, order)


def _columns_as_heads(
    v: Tensor, decay: Tensor | None, by_value: Tensor | None, beta: Tensor | None, kept: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """A decay or strength per channel of v: every channel becomes a head with one value, at V times the work.

    A channel's own column of the state obeys the equation, with the decays of its head and its channel together.
    """
    width = v.shape[-1]
    if by_value is not None:
        by_value = by_value.flatten(2)
    if decay is not None:
        if decay.ndim == 1:
            decay = decay.expand(*v.shape[:3])
        decay = decay.repeat_interleave(width, 2)
        if by_value is not None:
            by_value = by_value if decay.ndim == 3 else by_value.unsqueeze(-1)
            decay = widened(decay) + widened(by_value)
    else:
        decay = by_value
    if beta is not None:
        beta = beta.flatten(2) if beta.ndim == 4 else beta.repeat_interleave(width, 2)
    if kept is not None:
        kept = kept.mT.flatten(1, 2).unsqueeze(-1)
    return v.flatten(2).unsqueeze(-1), decay, beta, kept


@contextmanager
def _named(gate: str) -> Iterator[None]:
    """A refusal of the decay speaks of the caller's own argument."""
    try:
        yield
    except (ValueError, TypeError) as error:
        message = str(error)
        if message.startswith("decay: "):
            raise type(error)(f"{gate}{message.removeprefix('decay')}") from None
        raise


def check_packed(x: Tensor, cu_seqlens: Tensor | None, states: int | None) -> None:
    """Packed sequences come in one row, with as many states as sequences."""
    if cu_seqlens is None:
        return
    if x.shape[0] != 1:
        raise ValueError(
            f"The batch size is expected to be 1 rather than {x.shape[0]} when using `cu_seqlens`: "
            "takes the sequences one after the other in one row"
        )
    if states is not None and states != cu_seqlens.numel() - 1:
        raise ValueError(
            "The number of initial states is expected to be equal to the number of input sequences, "
            f"i.e., {cu_seqlens.numel() - 1} rather than {states}"
        )


def check_options(kwargs: dict[str, Any], chunk_sizes: tuple[int, ...] | None = None) -> None:
    """What is left in ``kwargs``: how fla would cut the work, which changes nothing here; or an error.

    Args:
        kwargs: what the caller gave beside the named arguments.
        chunk_sizes: those the op takes; None: any power of two.
    """
    kwargs = dict(kwargs)
    if "head_first" in kwargs:
        raise DeprecationWarning("head_first: got it, which fla has removed; takes inputs in [B,T,H,D]")
    size = kwargs.pop("chunk_size", None)
    if size is not None:
        fits = size > 0 and size & (size - 1) == 0 if chunk_sizes is None else size in chunk_sizes
        if not fits:
            takes = "a power of 2" if chunk_sizes is None else ", ".join(map(str, chunk_sizes))
            raise ValueError(f"`chunk_size` must be {takes}, got {size}.")
    for name in kwargs:
        raise TypeError(f"{name}: got an argument that fla does not know either; takes none of that name")


def take_layout(state_v_first: bool, kwargs: dict[str, Any]) -> bool:
    """``state_v_first``, or what is said under its former name ``transpose_state_layout``."""
    if "transpose_state_layout" not in kwargs:
        return state_v_first
    if state_v_first:
        raise ValueError("state_v_first: got it beside `transpose_state_layout`, its former name; takes one of them")
    warnings.warn("`transpose_state_layout` is the former name of `state_v_first`", DeprecationWarning, stacklevel=3)
    return bool(kwargs.pop("transpose_state_layout"))


def refuse(**asked: object) -> None:
    """An error for an argument of fla's that only its own kernels serve."""
    for name, value in asked.items():
        if value is not None and value is not False:
            raise ValueError(f"{name}: got {value!r}; takes None or False on a CPU")
