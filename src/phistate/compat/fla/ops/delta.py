"""Delta writes: the delta rule, gated, with a decay per channel, in several micro-steps, with an erase key.

Each is S_t = S'_t + β_t k_t (v_t − S'_tᵀ e_t)ᵀ, S'_t = Diag(e^g_t) S_{t-1}, with e = k but where it says otherwise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phistate.compat.fla.ops.call import Result, attend, check_options, check_packed, refuse, take_layout
from phistate.compat.fla.ops.gates import check_bound, fused_gdn_gate, fused_kda_gate, strength
from phistate.compat.fla.precision import widened


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **kwargs: Any,
) -> Result:
    """DeltaNet (Yang et al. 2024, arXiv:2406.06484): no decay, ``beta [B,T,H]``."""
    check_options(kwargs, (16, 32, 64))
    return fused_recurrent_delta_rule(
        q, k, v, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
    )


def fused_recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """As :func:`chunk_delta_rule`; ``beta`` may be ``[B,T,H,V]``, a strength per channel of v."""
    return attend(
        q,
        k,
        v,
        beta=beta,
        write="delta",
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        qk_l2norm=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
    )


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> Result:
    """Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464): a decay per head, ``g [B,T,HV]``.

    In ``kwargs``: ``use_gate_in_kernel``, then g = −e^A_log softplus(g + dt_bias), with ``A_log, dt_bias [HV]``.
    """
    state_v_first = take_layout(state_v_first, kwargs)
    in_kernel, A_log, dt_bias = (kwargs.pop(name, None) for name in ("use_gate_in_kernel", "A_log", "dt_bias"))
    check_options(kwargs, (16, 32, 64))
    refuse(cp_context=cp_context)
    _check_groups(q, k, v)
    return attend(
        q,
        k,
        v,
        decay=fused_gdn_gate(g, A_log, dt_bias) if in_kernel else g,
        beta=strength(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval),
        write="delta",
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        qk_l2norm=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
    )


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> Result:
    """As :func:`chunk_gated_delta_rule`; decays per channel ``gk [B,T,HV,K]``, ``gv [B,T,HV,V]`` add to g."""
    state_v_first = take_layout(state_v_first, kwargs)
    check_options(kwargs)
    if use_gate_in_kernel:
        if g is None:
            raise ValueError("g: got None with use_gate_in_kernel=True; takes what the gate is made of")
        g = fused_gdn_gate(g, A_log, dt_bias)
    decay = g if gk is None else gk if g is None else widened(gk) + widened(g).unsqueeze(-1)
    return attend(
        q,
        k,
        v,
        decay=decay,
        decay_of_values=gv,
        beta=strength(
            torch.ones_like(v[..., 0]) if beta is None else beta, use_beta_sigmoid_in_kernel, allow_neg_eigval
        ),
        write="delta",
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        qk_l2norm=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        dtype=v.dtype,
        gate=" or ".join(name for name, x in (("g", g), ("gk", gk), ("gv", gv)) if x is not None),
    )


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    **kwargs: Any,
) -> Result:
    """Kimi delta attention (arXiv:2510.26692): a decay per channel, ``g [B,T,HV,K]``.

    ``use_gate_in_kernel``: g is made by :func:`~phistate.compat.fla.ops.gates.fused_kda_gate` of ``A_log [HV]`` and
    ``dt_bias [HV·K]`` in ``kwargs``. ``safe_gate`` and ``disable_recompute`` change nothing here.
    """
    state_v_first = take_layout(state_v_first, kwargs)
    A_log, dt_bias = kwargs.pop("A_log", None), kwargs.pop("dt_bias", None)
    check_options(kwargs, (32, 64))
    refuse(cp_context=cp_context, return_intermediate_states=return_intermediate_states)
    check_bound(lower_bound, safe_gate and use_gate_in_kernel)
    _check_groups(q, k, v)
    return _kda(
        q,
        k,
        v,
        g,
        beta,
        (A_log, dt_bias, lower_bound) if use_gate_in_kernel else None,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        qk_l2norm=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
    )


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> Result:
    """As :func:`chunk_kda`; ``beta`` may be ``[B,T,HV,V]``."""
    state_v_first = take_layout(state_v_first, kwargs)
    check_options(kwargs)
    return _kda(
        q,
        k,
        v,
        g,
        beta,
        (A_log, dt_bias, lower_bound) if use_gate_in_kernel else None,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        qk_l2norm=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        dtype=v.dtype,
    )


def _kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    gate: tuple[Tensor | None, Tensor | None, float | None] | None,
    sigmoid: bool,
    negative: bool,
    **rest: Any,
) -> Result:
    decay = g if gate is None else fused_kda_gate(g, *gate)
    return attend(q, k, v, decay=decay, beta=strength(beta, sigmoid, negative), write="delta", **rest)


def chunk_gated_delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    num_householder: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
) -> Result:
    """Gated DeltaProduct (Siems et al. 2025, arXiv:2502.10297): n delta writes a token, then one read.

    ``q [B,T,H,K]``, ``g [B,T,H]``, and ``k, v, beta`` with n·T micro-steps along time; ``cu_seqlens`` counts tokens.
    The first micro-step decays, the last reads; what the others read is thrown away.
    """
    refuse(cp_context=cp_context)
    check_packed(q, cu_seqlens, None if initial_state is None else initial_state.shape[0])
    n = num_householder
    if k.shape[1] != n * q.shape[1]:
        raise ValueError(f"k: got {k.shape[1]} micro-steps; takes num_householder · T = {n} · {q.shape[1]}")
    decay = None
    if g is not None:
        decay = torch.nn.functional.pad(g.unsqueeze(2), (0, 0, 0, n - 1)).flatten(1, 2)
    reads = torch.nn.functional.pad(q.unsqueeze(2), (0, 0, 0, 0, n - 1, 0)).flatten(1, 2)
    o, state = attend(
        reads,
        k,
        v,
        decay=decay,
        beta=beta,
        write="delta",
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        qk_l2norm=use_qk_l2norm_in_kernel,
        cu_seqlens=None if cu_seqlens is None else cu_seqlens * n,
    )
    return o[:, n - 1 :: n].contiguous(), state


def _check_groups(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"k: got {k.shape[2]} heads; takes {q.shape[2]}, as q has")
    if v.shape[2] % q.shape[2]:
        raise ValueError(f"v: got {v.shape[2]} heads; takes a multiple of q's and k's {q.shape[2]}")
