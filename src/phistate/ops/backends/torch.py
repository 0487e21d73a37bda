"""Backend ``torch``: the reference, on any device and in any floating type."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
from torch import Tensor

from phistate.ops import reference
from phistate.ops.backends.base import Call, Result
from phistate.ops.log_space import by_vector_decay
from phistate.ops.packing import Rows, bounds_of

# Below this many steps a loop over time costs less than setting up a chunk.
_FEW_STEPS = 4


class TorchBackend:
    """Brings a call into the layout of :mod:`phistate.ops.reference` and runs one of its forms."""

    name = "torch"

    def reasons_against(self, call: Call) -> list[str]:
        """The reference runs everything."""
        return []

    def run(self, call: Call) -> Result:
        """See :class:`~phistate.ops.backends.base.Backend`."""
        if call.log_features:
            return by_vector_decay(call, self.run)
        call = call.mapped()
        bounds = None if call.cu_seqlens is None else bounds_of(call.cu_seqlens)
        if call.cu_seqlens is not None and bounds is None:
            rows = Rows(call.cu_seqlens, call.q, call.mask)
            result = self.run(_in_rows(call, rows))
            return result._replace(o=rows.gather(result.o))
        q, k, v, decay, beta, e = _prepare(call)
        T = k.shape[2]
        S = _initial(call, k, v)
        if bounds is None:
            o, S = _form(call, T)(q, k, v, decay, beta, e, S)
        else:
            pieces, states = [], []
            for n, (start, stop) in enumerate(itertools.pairwise(bounds)):
                piece, state = _form(call, stop - start)(
                    q[:, :, :, start:stop],
                    k[:, :, start:stop],
                    v[:, :, start:stop],
                    None if decay is None else decay[:, :, start:stop],
                    None if beta is None else beta[:, :, start:stop],
                    None if e is None else e[:, :, start:stop],
                    S[n : n + 1],
                )
                pieces.append(piece)
                states.append(state)
            o = torch.cat(pieces, 3) if pieces else q.new_zeros(*q.shape[:4], v.shape[-1])
            S = torch.cat(states, 0) if states else S
        z = None
        if call.normalize:
            o = divide(o[..., :-1], o[..., -1:])
            S, z = S[..., :-1].contiguous(), S[..., -1].contiguous()
        else:
            o = o * call.scale
        o = o.permute(0, 3, 1, 2, 4).flatten(2, 3)
        # Without a step the forms give back the state they were given, which the caller may yet overwrite.
        return Result(o.to(call.v.dtype), S.clone() if S is call.s else S, z)

    def step_(self, call: Call) -> Tensor:
        """See :class:`~phistate.ops.backends.base.Backend`."""
        o, s, z, _ = self.run(call)
        for held, after in ((call.s, s), (call.z, z)):
            if held is not None and after is not None:
                held.copy_(after)
        return o


def divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator / denominator, with a zero row where the denominator is exactly zero."""
    empty = denominator == 0
    return (numerator / denominator.masked_fill(empty, 1.0)).masked_fill(empty, 0.0)


def _in_rows(call: Call, rows: Rows) -> Call:
    """The packed call as one of N rows."""
    q, k, v = (rows.spread(x) for x in (call.q, call.k, call.v))
    decay, beta = call.decay, call.beta
    if decay is not None and decay.ndim > 1:
        decay = rows.spread(decay)
    beta, erase = (None if x is None else rows.spread(x) for x in (beta, call.erase))
    return replace(call, q=q, k=k, v=v, decay=decay, beta=beta, erase=erase, mask=rows.mask, cu_seqlens=None)


def _form(call: Call, T: int) -> reference.Form:
    if not call.causal:
        return reference.bidirectional if call.form != "parallel" else _bidirectional_parallel
    if call.form == "auto":
        return reference.recurrent if T <= _FEW_STEPS else reference.chunked
    return reference.FORMS[call.form]


def _bidirectional_parallel(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, beta: Tensor | None, e: Tensor | None, S: Tensor
) -> tuple[Tensor, Tensor]:
    u = v if beta is None else beta * v
    return q @ S.unsqueeze(2) + (q @ k.unsqueeze(2).mT) @ u.unsqueeze(2), S + k.mT @ u


def _prepare(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """q ``[B,Hs,G,T,K]``, k, v, decay, beta and what is erased ``[B,Hs,T,·]``, in the accumulation type.

    Padded steps are made void.
    """
    heads = call.state_heads
    q, k, v = (x.to(call.accumulation) for x in (call.q, call.k, call.v))
    e = None if call.erase is None else call.erase.to(call.accumulation)
    padded = None if call.mask is None else ~call.mask[:, :, None, None]
    if padded is not None:
        q, k, v = (x.masked_fill(padded, 0.0) for x in (q, k, v))
        e = None if e is None else e.masked_fill(padded, 0.0)
    if call.qk_l2norm:
        # 1e-6 is part of the models' definition of this norm, not a guard of ours.
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    if call.normalize:
        ones = v.new_ones(*v.shape[:-1], 1)
        v = torch.cat([v, ones if padded is None else ones.masked_fill(padded, 0.0)], -1)
    q = _to_heads(q, max(q.shape[2], heads)).unflatten(1, (heads, -1))
    k, v = _to_heads(k, heads), _to_heads(v, heads)
    if call.write == "delta":
        e = k if e is None else _to_heads(e, heads)

    decay = call.decay
    if decay is not None:
        decay = decay.to(call.accumulation)
        if decay.ndim == 1:
            decay = decay.expand(*call.k.shape[:2], heads)
        if decay.ndim == 3:
            decay = decay.unsqueeze(-1)
        if padded is not None:
            decay = decay.masked_fill(padded, 0.0)
        decay = decay.transpose(1, 2)
    beta = call.beta
    if beta is not None:
        beta = beta.to(call.accumulation).unsqueeze(-1)
        if padded is not None:
            beta = beta.masked_fill(padded, 0.0)
        beta = beta.transpose(1, 2)
    return q, k, v, decay, beta, e


def _to_heads(x: Tensor, heads: int) -> Tensor:
    """``[B,T,h,D] -> [B,heads,T,D]``, head i taken from head i // (heads // h)."""
    return x.transpose(1, 2).repeat_interleave(heads // x.shape[2], dim=1)


def _initial(call: Call, k: Tensor, v: Tensor) -> Tensor:
    if call.s is None:
        return k.new_zeros(call.sequences, call.state_heads, k.shape[-1], v.shape[-1])
    return call.s if call.z is None else torch.cat([call.s, call.z.unsqueeze(-1)], -1)
