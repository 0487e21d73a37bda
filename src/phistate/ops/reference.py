"""The equation in plain PyTorch, in three forms: the oracle for every backend, and the path for any device.

    S'_t = Diag(exp d_t) S_{t-1}                          forget
    S_t  = S'_t + β_t k_t v_tᵀ                            write="add"
    S_t  = S'_t + β_t k_t (v_t − S'_tᵀ e_t)ᵀ              write="delta"; e = k unless an erase key is given
    o_t  = S_tᵀ q_t                                       read, after the write

Every form takes the same arguments and gives (o, S_T):

    q      [B,H,G,T,K]   H states, each read by G query heads
    k, v   [B,H,T,K]  [B,H,T,V]
    decay  [B,H,T,1] (one per step) or [B,H,T,K] (one per step and feature), ≤ 0; None: no forgetting
    beta   [B,H,T,1]; None: 1
    e      [B,H,T,K]; None: the write is additive
    S      [B,H,K,V]

Scale, normaliser, masks, head groups and packed sequences are the caller's (``backends/torch.py``): the normaliser
z is S with v ≡ 1, so a column of ones in v carries it through every form, and a padded step is k = v = d = e = 0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64

Form = Callable[
    [Tensor, Tensor, Tensor, "Tensor | None", "Tensor | None", "Tensor | None", Tensor], "tuple[Tensor, Tensor]"
]


def recurrent(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, beta: Tensor | None, e: Tensor | None, S: Tensor
) -> tuple[Tensor, Tensor]:
    """The equation as written, one step at a time: the definition, and the decode step."""
    outputs = []
    for t in range(k.shape[2]):
        k_t, v_t = k[:, :, t], v[:, :, t]
        if decay is not None:
            S = decay[:, :, t].exp().unsqueeze(-1) * S
        if e is not None:
            v_t = v_t - torch.einsum("bhkv,bhk->bhv", S, e[:, :, t])
        if beta is not None:
            v_t = beta[:, :, t] * v_t
        S = S + k_t.unsqueeze(-1) * v_t.unsqueeze(-2)
        outputs.append(q[:, :, :, t] @ S)
    return _stack(outputs, q, v), S


def parallel(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, beta: Tensor | None, e: Tensor | None, S: Tensor
) -> tuple[Tensor, Tensor]:
    """The T×T kernel matrix times the writes: what attention is.

    With c_t = Σ_{i≤t} d_i, A(q,k)_tj = Σ_κ q_tκ k_jκ exp(Σ_{j<i≤t} d_iκ) for j ≤ t, and the writes

        U = βV                                             write="add"
        (I + β strict_lower A(e,k)) U = β(V − (E⊙exp c) S)   write="delta", a triangular system

    the read and the state after T steps are

        O = (Q⊙exp c) S + A(q,k) U
        S ← Diag(exp c_T) S + Σ_j (k_j ⊙ exp(Σ_{i>j} d_i)) u_jᵀ

    No decay ever enters but as a sum of decays, which is ≤ 0.
    """
    e_start, q_start, k_end, left = e, q, k, S
    if decay is not None:
        since_start = decay.cumsum(-2).exp()
        e_start = None if e is None else e * since_start
        q_start = q * since_start.unsqueeze(2)
        k_end = k * _sum_after(decay).exp()
        left = decay.sum(-2).exp().unsqueeze(-1) * S

    u = v if e_start is None else v - e_start @ S
    if beta is not None:
        u = beta * u
    if e is not None:
        interference = kernel_matrix(e.unsqueeze(2), k, decay).squeeze(2).tril(-1)
        if beta is not None:
            interference = beta * interference
        u = torch.linalg.solve_triangular(interference, u, upper=False, unitriangular=True)

    o = q_start @ S.unsqueeze(2) + kernel_matrix(q, k, decay) @ u.unsqueeze(2)
    return o, left + k_end.mT @ u


def chunked(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, beta: Tensor | None, e: Tensor | None, S: Tensor
) -> tuple[Tensor, Tensor]:
    """Parallel inside a chunk, the state between chunks: linear time by matrix products; training and prefill."""
    outputs = []
    for start in range(0, k.shape[2], CHUNK):
        chunk = slice(start, start + CHUNK)
        o, S = parallel(
            q[:, :, :, chunk],
            k[:, :, chunk],
            v[:, :, chunk],
            None if decay is None else decay[:, :, chunk],
            None if beta is None else beta[:, :, chunk],
            None if e is None else e[:, :, chunk],
            S,
        )
        outputs.append(o)
    return (torch.cat(outputs, -2) if outputs else _stack([], q, v)), S


def bidirectional(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, beta: Tensor | None, e: Tensor | None, S: Tensor
) -> tuple[Tensor, Tensor]:
    """Not causal: every query reads the sum of all writes, S + Σ_j β_j k_j v_jᵀ; for additive writes without decay."""
    S = S + k.mT @ (v if beta is None else beta * v)
    return q @ S.unsqueeze(2), S


FORMS: dict[str, Form] = {"recurrent": recurrent, "parallel": parallel, "chunked": chunked}


def kernel_matrix(q: Tensor, k: Tensor, decay: Tensor | None) -> Tensor:
    """A_tj = Σ_κ q_tκ k_jκ exp(Σ_{j<i≤t} d_iκ) for j ≤ t, 0 above the diagonal: ``[B,H,G,T,T]``."""
    if decay is None:
        return (q @ k.unsqueeze(2).mT).tril()
    if decay.shape[-1] == 1:
        return (q @ k.unsqueeze(2).mT) * segment_sums(decay.squeeze(-1)).exp().unsqueeze(2)
    return _kernel_matrix_by_halves(q, k.unsqueeze(2), decay.unsqueeze(2))


def segment_sums(decay: Tensor) -> Tensor:
    """D_tj = Σ_{j<i≤t} d_i for j ≤ t, −inf above the diagonal: ``[…,T] -> […,T,T]``.

    Each entry is a sum of its own terms, never a difference of two running sums: it is ≤ 0 by construction, and a
    decay of −inf or −1e38 (a document's end) leaves every other segment exact.
    """
    T = decay.shape[-1]
    lower = torch.ones(T, T, dtype=torch.bool, device=decay.device).tril(-1)
    terms = decay.unsqueeze(-1).expand(*decay.shape, T).masked_fill(~lower, 0.0)
    return terms.cumsum(-2).masked_fill(lower.mT, float("-inf"))


def _kernel_matrix_by_halves(q: Tensor, k: Tensor, decay: Tensor) -> Tensor:
    """``kernel_matrix`` for a decay per feature, without a T×T×K tensor.

    A block is two half-size blocks on its diagonal and, below them, a product of a late half and an early half:
    exp(Σ_{j<i≤t}) = exp(Σ from the middle to t) · exp(Σ from j to the middle), and both factors are ≤ 1.
    """
    T = q.shape[-2]
    size = 1 << max(T - 1, 0).bit_length()
    q, k, decay = (F.pad(x, (0, 0, 0, size - T)) for x in (q, k, decay))
    blocks = (q * k).sum(-1)[..., None, None]
    half = 1
    while half < size:
        q_late = q.unflatten(-2, (-1, 2, half))[..., 1, :, :]
        k_early = k.unflatten(-2, (-1, 2, half))[..., 0, :, :]
        d_early, d_late = decay.unflatten(-2, (-1, 2, half)).unbind(-3)
        below = (q_late * d_late.cumsum(-2).exp()) @ (k_early * _sum_after(d_early).exp()).mT
        above = torch.zeros_like(below)
        first, second = blocks.unflatten(-3, (-1, 2)).unbind(-3)
        blocks = torch.cat([torch.cat([first, above], -1), torch.cat([below, second], -1)], -2)
        half *= 2
    return blocks.squeeze(-3)[..., :T, :T]


def _sum_after(decay: Tensor) -> Tensor:
    """Σ_{i>j} d_i along time, for each j."""
    return F.pad(decay[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2)


def _stack(outputs: list[Tensor], q: Tensor, v: Tensor) -> Tensor:
    return torch.stack(outputs, 3) if outputs else q.new_zeros(*q.shape[:4], v.shape[-1])
