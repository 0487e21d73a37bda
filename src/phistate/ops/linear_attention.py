"""The op: check the request, make features, choose a backend, fold the history into a State."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from phistate.features.base import ExponentialFeatureMap, FeatureMap
from phistate.ops.backends import choose
from phistate.ops.backends.base import Call, without_padding
from phistate.ops.checks import (
    check_apart,
    check_choice,
    check_heads,
    check_layout,
    check_log,
    check_mask,
    check_no_gradient,
    check_overwritable,
    check_side_input,
    packed_offsets,
)
from phistate.ops.packing import sequence_of
from phistate.ops.state import State


@overload
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    decay: Tensor | None = ...,
    beta: Tensor | None = ...,
    write: str = ...,
    erase: Tensor | None = ...,
    normalize: bool = ...,
    feature_map: FeatureMap | None = ...,
    scale: float | None = ...,
    causal: bool = ...,
    initial_state: State | None = ...,
    return_state: Literal[False] = ...,
    mask: Tensor | None = ...,
    cu_seqlens: Tensor | None = ...,
    qk_l2norm: bool = ...,
    signed: str = ...,
    form: str = ...,
    backend: str = ...,
) -> Tensor: ...


@overload
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    decay: Tensor | None = ...,
    beta: Tensor | None = ...,
    write: str = ...,
    erase: Tensor | None = ...,
    normalize: bool = ...,
    feature_map: FeatureMap | None = ...,
    scale: float | None = ...,
    causal: bool = ...,
    initial_state: State | None = ...,
    return_state: Literal[True],
    mask: Tensor | None = ...,
    cu_seqlens: Tensor | None = ...,
    qk_l2norm: bool = ...,
    signed: str = ...,
    form: str = ...,
    backend: str = ...,
) -> tuple[Tensor, State]: ...


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
    write: str = "add",
    erase: Tensor | None = None,
    normalize: bool = False,
    feature_map: FeatureMap | None = None,
    scale: float | None = None,
    causal: bool = True,
    initial_state: State | None = None,
    return_state: bool = False,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    qk_l2norm: bool = False,
    signed: str = "refuse",
    form: str = "auto",
    backend: str = "auto",
) -> Tensor | tuple[Tensor, State]:
    """Attention by a kernel that splits, its history folded into a state of fixed size.

    Per head, with a_t = exp(decay_t)::

        S'_t = Diag(a_t) S_{t-1}                          forget
        S_t  = S'_t + β_t k_t v_tᵀ                        write="add"
        S_t  = S'_t + β_t k_t (v_t − S'_tᵀ e_t)ᵀ          write="delta"; e = k unless ``erase`` is given
        o_t  = scale · S_tᵀ q_t                           read, after the write
        o_t  = o_t / (scale · z_tᵀ q_t)                   normalize=True; z is S with v ≡ 1

    Args:
        q: ``[B,T,Hq,K]`` queries, float64, float32, bfloat16 or float16.
        k: ``[B,T,Hk,K]`` keys.
        v: ``[B,T,Hv,V]`` values. There are Hs = max(Hk,Hv) states and max(Hq,Hs) output heads; each count divides the
            output's, in interleaved groups: output head h uses head h // (output heads // count).
        decay: log of what each step keeps, ≤ 0: ``[Hs]``, ``[B,T,Hs]`` or ``[B,T,Hs,K]``; None: nothing is forgotten.
            In q's dtype or float32.
        beta: ``[B,T,Hs]`` write strength; None: 1. In q's dtype or float32.
        write: ``"add"``, or ``"delta"``: overwrite what the key held.
        erase: ``[B,T,Hk,K]`` the key e that a delta write reads and erases by, taken as given: no feature map, no
            ``qk_l2norm``. None: k. In q's dtype or float32. A row of zeros erases nothing, a row of zero values only
            erases: an erasure along one key and a write along another are two steps.
        normalize: divide by the kernel's sum. A denominator of exactly zero gives a zero row; nothing is ever added.
        feature_map: φ, applied to q and k; None: they are features already. An exponential map is streamed in log
            space (additive writes), so it neither overflows nor needs an epsilon.
        scale: None: K ** -0.5, K the last dimension of q as given. Cancels when ``normalize=True``.
        causal: False: every query reads all writes; additive writes without decay only.
        initial_state: carries on from a :class:`State`; None: from nothing.
        return_state: give the final :class:`State` too.
        mask: ``[B,T]`` bool, True = token. A padded step changes nothing: no write, no decay, no count; its row is 0.
        cu_seqlens: ``[N+1]`` offsets of N packed sequences, B == 1, from 0 to T; a state then has batch N.
        qk_l2norm: first divide q and k by √(Σx² + 1e-6), as DeltaNet models do.
        signed: ``"allow"`` lets a map whose weights may be negative be normalised; ``"refuse"``.
        form: ``"auto"``, ``"recurrent"``, ``"chunked"`` or ``"parallel"``: the same values at other costs.
        backend: ``"auto"``, ``"cpu"`` (native kernels) or ``"torch"``.

    Returns:
        ``[B,T,max(Hq,Hs),V]`` in q's dtype, and the State if asked. States and sums are float32 (float64 for float64).

    Raises:
        ValueError: shapes, values or choices that do not fit, naming the argument, what came and what is taken.
        TypeError: a wrong type or dtype.

    Sources: Katharopoulos et al. 2020 (arXiv:2006.16236) for the additive write and its normaliser; Schlag et al. 2021
    (arXiv:2102.11174) for the delta write; Hu et al. 2025 (arXiv:2506.02475) for an erase key of its own; Yang et al.
    2024 (arXiv:2312.06635, 2412.06464) for decays.

    >>> import torch, phistate
    >>> q, k, v = torch.rand(3, 1, 5, 2, 4).unbind()
    >>> whole = phistate.linear_attention(q, k, v, normalize=True)
    >>> first, state = phistate.linear_attention(q[:, :3], k[:, :3], v[:, :3], normalize=True, return_state=True)
    >>> rest = phistate.linear_attention(q[:, 3:], k[:, 3:], v[:, 3:], normalize=True, initial_state=state)
    >>> torch.allclose(whole, torch.cat([first, rest], 1), atol=1e-6)
    True
    """
    check_layout(q=q, k=k, v=v)
    check_heads(q, k, v)
    B, T, _, D = q.shape
    heads = max(k.shape[2], v.shape[2])
    check_choice("write", write, ("add", "delta"))
    check_choice("signed", signed, ("refuse", "allow"))
    check_choice("form", form, ("auto", "recurrent", "chunked", "parallel"))
    check_mask(mask, q)
    offsets = packed_offsets(cu_seqlens, q)
    if feature_map is not None and not isinstance(feature_map, FeatureMap):
        raise TypeError(f"feature_map: got {type(feature_map).__name__}; takes a phistate.FeatureMap or None")
    if feature_map is not None and normalize and not feature_map.positive and signed == "refuse":
        raise ValueError(
            f"feature_map: got {type(feature_map).__name__}, whose weights may be negative, with normalize=True; "
            "takes a positive map, or signed='allow'"
        )
    if feature_map is not None and feature_map.head_dim != D:
        raise ValueError(f"q: got last dimension {D}; takes the feature map's head_dim = {feature_map.head_dim}")
    features = D if feature_map is None else feature_map.num_features
    check_side_input("decay", decay, q, [(heads,), (B, T, heads), (B, T, heads, features)])
    check_side_input("beta", beta, q, [(B, T, heads)])
    check_log("decay", decay)
    _check_erase(erase, q, k, write, feature_map)
    if not causal and (write != "add" or decay is not None):
        got = f"write={write!r}" if write != "add" else "a decay"
        raise ValueError(f"causal: got False with {got}; takes additive writes without decay when not causal")
    sequences = B if offsets is None else offsets.numel() - 1
    if initial_state is not None:
        _check_state(
            "initial_state", initial_state, (sequences, heads, features, v.shape[-1]), q, normalize, feature_map
        )

    positions = None
    if feature_map is not None and feature_map.positional:
        positions = _positions(q, mask, offsets, initial_state)
    phi_q, phi_k, log_features = q, k, False
    if feature_map is not None and feature_map.pointwise is None:
        q, k = without_padding(q, mask), without_padding(k, mask)
        if isinstance(feature_map, ExponentialFeatureMap) and write == "add":
            log_features = True
            phi_q, phi_k = feature_map.log_query(q, positions), feature_map.log_key(k, positions)
        else:
            phi_q, phi_k = feature_map.query(q, positions), feature_map.key(k, positions)

    call = Call(
        q=phi_q,
        k=phi_k,
        v=v,
        decay=decay,
        beta=beta,
        erase=erase,
        write=write,
        normalize=normalize,
        scale=D**-0.5 if scale is None else float(scale),
        causal=causal,
        qk_l2norm=qk_l2norm,
        s=None if initial_state is None else initial_state.s,
        z=None if initial_state is None else initial_state.z,
        mask=mask,
        cu_seqlens=offsets,
        form=form,
        log_features=log_features,
        log_scale=None if initial_state is None else initial_state.log_scale,
        feature_map=feature_map if feature_map is not None and feature_map.pointwise else None,
    )
    o, s, z, log_scale = choose(call, backend).run(call)
    if not return_state:
        return o
    return o, State(
        s=s,
        z=z,
        log_scale=log_scale,
        tokens=_tokens(q, mask, offsets, initial_state),
        fingerprint=None if feature_map is None else feature_map.fingerprint,
    )


def _check_erase(erase: Tensor | None, q: Tensor, k: Tensor, write: str, feature_map: FeatureMap | None) -> None:
    if erase is None:
        return
    if write != "delta":
        raise ValueError(f"erase: got a tensor with write={write!r}; takes None, or write='delta'")
    if feature_map is not None:
        raise ValueError(
            "erase: got a tensor with a feature map, which is for q and k; takes None, or all three as features"
        )
    check_side_input("erase", erase, q, [tuple(k.shape)])


def _check_state(
    name: str, state: State, shape: tuple[int, ...], q: Tensor, normalize: bool, feature_map: FeatureMap | None
) -> None:
    if not isinstance(state, State):
        raise TypeError(f"{name}: got {type(state).__name__}; takes a phistate.State or None")
    if tuple(state.s.shape) != shape:
        raise ValueError(f"{name}: got s of shape {tuple(state.s.shape)}; takes {shape}")
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    if state.s.dtype != wide or state.s.device != q.device:
        raise TypeError(
            f"{name}: got {state.s.dtype} on {state.s.device}; takes {wide} on {q.device} for {q.dtype} inputs"
        )
    if (state.z is not None) != normalize:
        held = "without" if state.z is None else "with"
        raise ValueError(f"{name}: got a state {held} normaliser z; takes one made with normalize={normalize}")
    fingerprint = None if feature_map is None else feature_map.fingerprint
    if state.fingerprint != fingerprint:
        raise ValueError(
            f"{name}: got a state made with the feature map {state.fingerprint}; "
            f"takes one made with this call's, {fingerprint}"
        )


def _positions(q: Tensor, mask: Tensor | None, offsets: Tensor | None, state: State | None) -> Tensor:
    """``[B,T]`` position of each token in its own sequence, padding not counted."""
    B, T = q.shape[:2]
    counted = torch.ones(B, T, dtype=torch.int64, device=q.device) if mask is None else mask.to(torch.int64)
    count = counted.cumsum(1)
    if offsets is None:
        start = torch.zeros(B, 1, dtype=torch.int64, device=q.device) if state is None else state.tokens[:, None]
        return (start + count - 1).clamp(min=0)
    offsets = offsets.to(q.device)
    first = torch.cat([count.new_zeros(1), count[0]])[offsets[:-1]]
    start = (0 if state is None else state.tokens) - first
    return (count + start[sequence_of(offsets, T)] - 1).clamp(min=0)


def _tokens(q: Tensor, mask: Tensor | None, offsets: Tensor | None, state: State | None) -> Tensor:
    """``[N]`` tokens seen, padding not counted."""
    B, T = q.shape[:2]
    if offsets is None:
        seen = q.new_full((B,), T, dtype=torch.int64) if mask is None else mask.sum(1)
    elif mask is None:
        seen = offsets.to(q.device).diff()
    else:
        count = torch.cat([mask.new_zeros(1, dtype=torch.int64), mask[0].cumsum(0)])
        seen = count[offsets.to(q.device)].diff()
    return seen if state is None else state.tokens + seen


def linear_attention_step_(
    state: State,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
    write: str = "add",
    erase: Tensor | None = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
    backend: str = "auto",
) -> Tensor:
    """One token of :func:`linear_attention`, the state updated in place: the decode step. Records no gradient.

    Args:
        state: of features without a map; its s, z and tokens are overwritten, so each must be a tensor with a place for
            every element. Normalised where it has a z. A call that fails leaves it as it was.
        q: ``[B,1,Hq,K]``.
        k: ``[B,1,Hk,K]``.
        v: ``[B,1,Hv,V]``.
        decay: ``[Hs]``, ``[B,1,Hs]`` or ``[B,1,Hs,K]``.
        beta: ``[B,1,Hs]``.
        write: as there.
        erase: ``[B,1,Hk,K]``.
        scale: as there.
        qk_l2norm: as there.
        backend: as there.

    Returns:
        ``[B,1,max(Hq,Hs),V]`` in q's dtype.

    Raises:
        ValueError: shapes or choices that do not fit, more than one token, a state made with a feature map, or inputs
            whose gradient would be lost.
        TypeError: a wrong type or dtype.

    >>> import torch, phistate
    >>> q, k, v = torch.rand(3, 1, 1, 2, 4).unbind()
    >>> state = phistate.State(s=torch.zeros(1, 2, 4, 4), tokens=torch.zeros(1, dtype=torch.int64))
    >>> o = phistate.linear_attention_step_(state, q, k, v)
    >>> torch.allclose(state.s, k[0, 0].unsqueeze(-1) * v[0, 0].unsqueeze(-2)), state.tokens.item()
    (True, 1)
    """
    check_layout(q=q, k=k, v=v)
    if q.shape[1] != 1:
        raise ValueError(f"q: got {q.shape[1]} tokens; takes one, [B,1,Hq,K]")
    if not isinstance(state, State):
        raise TypeError(f"state: got {type(state).__name__}; takes a phistate.State")
    check_heads(q, k, v)
    heads, features = max(k.shape[2], v.shape[2]), q.shape[3]
    check_choice("write", write, ("add", "delta"))
    check_side_input("decay", decay, q, [(heads,), (q.shape[0], 1, heads), (q.shape[0], 1, heads, features)])
    check_side_input("beta", beta, q, [(q.shape[0], 1, heads)])
    check_log("decay", decay)
    _check_erase(erase, q, k, write, None)
    check_no_gradient(q, k, v, decay, beta, erase, state.s, state.z)
    normalize = state.z is not None
    _check_state("state", state, (q.shape[0], heads, features, v.shape[3]), q, normalize, None)
    check_overwritable("state.s", state.s)
    check_overwritable("state.tokens", state.tokens)
    if state.z is not None:
        check_overwritable("state.z", state.z)
        check_apart("state.z", state.z, "state.s", state.s)
    call = Call(
        q,
        k,
        v,
        decay=decay,
        beta=beta,
        erase=erase,
        write=write,
        normalize=normalize,
        scale=features**-0.5 if scale is None else float(scale),
        qk_l2norm=qk_l2norm,
        s=state.s,
        z=state.z,
    )
    o = choose(call, backend).step_(call)
    state.tokens.add_(1)
    return o
