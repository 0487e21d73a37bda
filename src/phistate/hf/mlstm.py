"""xLSTM's mLSTM: a layer binds transformers' functions when it is made, so what calls them is replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phistate.compat.arguments import wide
from phistate.compat.states import state_of
from phistate.ops.backends import native
from phistate.ops.linear_attention import linear_attention, linear_attention_step_

States = tuple[Tensor, Tensor, Tensor]
_MODES = ("inference", "train", "train_with_padding")


def backend(original: Callable[..., Any]) -> Callable[..., Any]:
    """``query, key [B,H,T,K]``, ``value [B,H,T,V]``, gates ``[B,H,T]``; states as :func:`mlstm` has them.

    In training mode transformers takes whole chunks only, and no states where it pads; here both are as good as any.
    A single step of inference overwrites the C and n it is given: the cache would copy the new ones into them anyhow.
    Without native kernels transformers' own step is as good.
    """
    native_steps = native.why_not() is None

    def forward(
        self: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        igate: Tensor,
        fgate: Tensor,
        c_initial: Tensor | None = None,
        n_initial: Tensor | None = None,
        m_initial: Tensor | None = None,
        return_last_states: bool | None = None,
        mode: str | None = None,
    ) -> Tensor | tuple[Tensor, States]:
        mode = self.config.mode if mode is None else mode
        given = [state is not None for state in (c_initial, n_initial, m_initial)]
        one = query.shape[2] == 1
        odd = mode not in _MODES or query.shape[2] == 0 or any(given) != all(given)
        if odd or (one and mode == "inference" and not native_steps):
            return original(
                self, query, key, value, igate, fgate, c_initial, n_initial, m_initial, return_last_states, mode
            )
        states = None
        if c_initial is not None and n_initial is not None and m_initial is not None:
            C, n, m = (state.to(wide(query)) for state in (c_initial, n_initial, m_initial))
            states = (C, n, m)
        overwrite = mode == "inference" and one and native_steps and not torch.is_grad_enabled()
        out, last = mlstm(query, key, value, igate, fgate, states, self.config.eps, overwrite)
        keep = self.config.return_last_states if return_last_states is None else return_last_states
        return (out, last) if keep or mode == "inference" else out

    return forward


def mlstm(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    igate: Tensor,
    fgate: Tensor,
    states: States | None,
    eps: float,
    overwrite: bool = False,
) -> tuple[Tensor, States]:
    """Exponential input gates, and a denominator that stops at a bound (Beck et al. 2024, arXiv:2405.04517, § 2.3).

    With f_t = log σ(fgate_t)::

        m_t = max(f_t + m_{t-1}, igate_t)
        C_t = e^{f_t + m_{t-1} − m_t} C_{t-1} + e^{igate_t − m_t} k_t v_tᵀ        n_t: C_t with v ≡ 1
        h_t = C_tᵀ q_t / (max(|n_tᵀ q_t|, e^{−m_t}) + eps)                       q scaled by K^-½

    That is additive linear attention with a decay ≤ 0 and a write strength ≤ 1: n is a column of C whose value is 1,
    and the division follows. Unrolled, m_t = (f_1 + … + f_t) + M_t, M_t the running maximum of m_0 and all
    igate_s − (f_1 + … + f_s): both logarithms are differences to M, so rounding cannot make them positive. A sum over a
    long sequence leaves float32 no digits for such differences; it is float64.

    C is in units of e^m. Another choice of units changes h by eps alone, so m counts as a constant but there and in
    the states: what it adds to every other gradient cancels.

    Args:
        query: ``[B,H,T,K]``, T ≥ 1.
        key: ``[B,H,T,K]``.
        value: ``[B,H,T,V]``.
        igate: ``[B,H,T]``.
        fgate: ``[B,H,T]``, before its sigmoid.
        states: C ``[B,H,K,V]``, n ``[B,H,K]``, m ``[B,H,1]`` in float32 (float64 for float64); None: zeros.
        eps: beside the denominator, in units of e^m as transformers has it.
        overwrite: put the new C and n in the place of those given, where that is possible; T = 1, without gradients.

    Returns:
        h ``[B,H,T,V]`` in query's dtype, and the states after it.

    >>> q = k = v = torch.ones(1, 1, 2, 1)
    >>> h, (C, n, m) = mlstm(q, k, v, torch.zeros(1, 1, 2), torch.zeros(1, 1, 2), None, eps=0.5)
    >>> h.flatten().tolist(), C.item(), n.item(), m.item()
    ([0.6666666865348816, 0.75], 1.5, 1.5, 0.0)
    """
    dtype = wide(query)
    f, i = F.logsigmoid(fgate.double()), igate.double()
    before = i.new_zeros(*i.shape[:2], 1) if states is None else states[2].double()
    total = f.cumsum(-1)
    offset = i - total
    M = torch.cat([before, offset], -1).cummax(-1).values
    m = total + M[..., 1:]
    kept = torch.cat([f[..., :1] + before, f[..., 1:]], -1)
    decay = _valued(M[..., :-1] - M[..., 1:], kept).transpose(1, 2).to(dtype)
    gain = _valued(offset - M[..., 1:], i).exp().transpose(1, 2).to(dtype)
    constant = m.detach()

    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if overwrite and states is not None and states[0].is_contiguous() and states[1].is_contiguous():
        C, n = states[:2]
        numerator = linear_attention_step_(state_of(C, q), q, k, v, decay=decay, beta=gain)
        n.mul_(decay.exp().transpose(1, 2)).add_(gain.transpose(1, 2) * key.squeeze(2))
        denominator = (n.unsqueeze(2) * query).sum(-1) * q.shape[-1] ** -0.5
    else:
        initial = None if states is None else state_of(torch.cat([states[0], states[1].unsqueeze(-1)], -1), q)
        ones = v.new_ones(*v.shape[:3], 1)
        out, state = linear_attention(
            q, k, torch.cat([v, ones], -1), decay=decay, beta=gain, initial_state=initial, return_state=True
        )
        numerator, denominator = out[..., :-1], out[..., -1].transpose(1, 2)
        C, n = state.s[..., :-1], state.s[..., -1]
        if m.requires_grad:
            unit = (constant - m)[..., -1:].exp().to(dtype)
            C, n = C * unit.unsqueeze(-1), n * unit
    divisor = torch.maximum(denominator.double().abs(), (-constant).exp()) + eps * (m - constant).exp()
    h = numerator.transpose(1, 2) / divisor.to(dtype).unsqueeze(-1)
    return h.to(query.dtype), (C, n, m[..., -1:].to(dtype))


def _valued(value: Tensor, like: Tensor) -> Tensor:
    """``value``'s numbers with ``like``'s gradient."""
    finite = like.masked_fill(like.isinf(), 0.0)  # a gate of -inf has no gradient
    return value.detach() + (finite - finite.detach())
