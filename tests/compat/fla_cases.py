"""fla's ops beside references in plain torch: fla's own naive ones, or the recurrence as its kernels compute it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phistate.compat.fla.ops import additive, delta, diagonal, erase, gated, rwkv

B, T, H, K, V = 2, 37, 2, 8, 6


def inputs(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    """Normal draws of the given shapes, the same for the same names."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    decay: Tensor | None = None,
    decay_of_values: Tensor | None = None,
    beta: Tensor | None = None,
    erase: Tensor | None = None,
    delta: bool = False,
    read_first: bool = False,
    scale: float | None = None,
    s: Tensor | None = None,
    bonus: Tensor | None = None,
    erase_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """Token by token, with every choice fla's kernels make; heads of k repeated to those of v."""
    group = v.shape[2] // k.shape[2]
    q, k = q.repeat_interleave(max(v.shape[2] // q.shape[2], 1), 2), k.repeat_interleave(group, 2)
    erase = k if erase is None else erase.repeat_interleave(v.shape[2] // erase.shape[2], 2)
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    s = q.new_zeros(q.shape[0], v.shape[2], k.shape[-1], v.shape[-1]) if s is None else s
    out = []
    for t in range(q.shape[1]):
        before = s
        if decay is not None:
            d = decay if decay.ndim == 1 else decay[:, t]
            s = s * d.exp().view(*d.shape, *[1] * (4 - d.ndim - (decay.ndim == 1)))
        if decay_of_values is not None:
            s = s * decay_of_values[:, t].exp().unsqueeze(-2)
        new = v[:, t]
        if delta:
            new = new - torch.einsum("bhkv,bhk->bhv", before if erase_first else s, erase[:, t])
        if beta is not None:
            new = new * (beta[:, t].unsqueeze(-1) if beta.ndim == 3 else beta[:, t])
        write = k[:, t].unsqueeze(-1) * new.unsqueeze(-2)
        s = s + write
        read = s if not read_first else before + bonus.unsqueeze(-1) * write
        out.append(torch.einsum("bhkv,bhk->bhv", read, q[:, t]) * scale)
    return torch.stack(out, 1), s


@dataclass(frozen=True)
class Case:
    """One way to call an op.

    Args:
        adapter: ours, with fla's signature.
        given: its tensors by name, time along dimension 1 where they have T steps.
        reference: of the same names and an initial state (or None), o and the final state.
        options: further arguments.
        state: shapes of the state after the sequence's dimension; several for a tuple of states.
        micro: steps of k, v and beta for one of q.
        decays: names of log-decays among ``given``, none of which may be positive.
    """

    name: str
    adapter: Callable[..., Any]
    given: dict[str, Tensor]
    reference: Callable[..., tuple[Tensor, Any]]
    options: dict[str, Any]
    state: tuple[tuple[int, ...], ...]
    micro: int = 1
    decays: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name


def _decay(x: Tensor) -> Tensor:
    return F.logsigmoid(x)


def _qkv(heads: int = H, values: int | None = None, **more: tuple[int, ...]) -> dict[str, Tensor]:
    return inputs(q=(B, T, heads, K), k=(B, T, heads, K), v=(B, T, values or heads, V), **more)


def _with(given: dict[str, Tensor], **made: Tensor) -> dict[str, Tensor]:
    return given | made


def _plain(**how: Any) -> Callable[..., tuple[Tensor, Any]]:
    """A reference whose arguments are those of :func:`recurrence` under fla's names."""
    names = {"g": "decay", "gk": "decay", "w": "decay", "g_gamma": "decay", "gv": "decay_of_values", "p": "erase"}

    def reference(s: Any = None, **given: Any) -> tuple[Tensor, Any]:
        return recurrence(**{names.get(name, name): x for name, x in given.items()}, s=s, **how)

    return reference


def _l2(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def _unit(s: Any = None, *, q: Tensor, k: Tensor, **given: Any) -> tuple[Tensor, Any]:
    return _plain(delta=True)(s, q=_l2(q), k=_l2(k), **given)


def _normalised(s: Any = None, *, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Any]:
    s, z = (None, None) if s is None else (s[0], s[1].squeeze(1).unsqueeze(-1))
    o, s = recurrence(q, k, v, s=s)
    total, z = recurrence(q, k, torch.ones_like(v[..., :1]), s=z)
    return o / (total + 1e-10), (s, z.squeeze(-1).unsqueeze(1))


def _gsa(state: Any = None, /, *, q: Tensor, k: Tensor, v: Tensor, s: Tensor, g: Tensor) -> tuple[Tensor, Any]:
    hk, hv = (None, None) if state is None else state
    group = q.shape[2] // k.shape[2]
    k, v, s, g = (x.repeat_interleave(group, 2) for x in (k, v, s, g))
    hk, hv = (x if x is None else x.repeat_interleave(group, 1) for x in (hk, hv))
    scores, hk = recurrence(q, k, s, decay_of_values=g, s=hk)
    o, hv = recurrence(scores.softmax(-1), s, v, decay=g, scale=1.0, s=hv)
    return o, [hk[:, ::group], hv[:, ::group]]


def _lightnet(s: Any = None, *, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Any]:
    s, z = (None, None) if s is None else s
    z = torch.full_like(k[:, :1], -torch.inf) if z is None else z
    sums = torch.cat([z, torch.logaddexp(z, k.logcumsumexp(1))], 1)
    g = torch.where(sums[:, :-1] == -torch.inf, 0, sums[:, :-1] - sums[:, 1:])
    o, s = recurrence(q, (k - sums[:, 1:]).exp(), v, decay=g, s=s)
    return o, (s, sums[:, -1:])


def _rwkv6(s: Any = None, *, r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> tuple[Tensor, Any]:
    return recurrence(r, k, v, decay=w, bonus=u, read_first=True, s=s)


def _dplr(
    s: Any = None, *, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, gk: Tensor | None = None, scale: Any = None
) -> tuple[Tensor, Any]:
    s = q.new_zeros(q.shape[0], q.shape[2], k.shape[-1], v.shape[-1]) if s is None else s
    out = []
    for t in range(q.shape[1]):
        removed = torch.einsum("bhkv,bhk->bhv", s, a[:, t])
        kept = s if gk is None else s * gk[:, t].exp().unsqueeze(-1)
        s = kept + b[:, t].unsqueeze(-1) * removed.unsqueeze(-2) + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        out.append(torch.einsum("bhkv,bhk->bhv", s, q[:, t]) * (K**-0.5 if scale is None else scale))
    return torch.stack(out, 1), s


def _rwkv7(s: Any = None, *, r: Tensor, w: Tensor, **given: Tensor) -> tuple[Tensor, Any]:
    return _dplr(s, q=r, gk=w, scale=1.0, **given)


def _rwkv7_step(s: Any = None, *, r: Tensor, w: Tensor, kk: Tensor, a: Tensor, **given: Tensor) -> tuple[Tensor, Any]:
    return _dplr(s, q=r, gk=w, scale=1.0, a=-kk, b=kk * a, **given)


def _product(
    s: Any = None, *, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None = None, n: int = 3
) -> tuple[Tensor, Any]:
    reads = torch.zeros(q.shape[0], q.shape[1] * n, *q.shape[2:], dtype=q.dtype)
    reads[:, n - 1 :: n] = q
    decay = torch.zeros(*reads.shape[:3], dtype=q.dtype)
    if g is not None:
        decay[:, ::n] = g
    o, s = recurrence(reads, k, v, decay=decay, beta=beta, delta=True, s=s)
    return o[:, n - 1 :: n], s


def _gdn2(s: Any = None, *, q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, w: Tensor) -> tuple[Tensor, Any]:
    return recurrence(q, k, w * v, decay=g, erase=b * k, delta=True, s=s)


def _hgrn(s: Any = None, *, x: Tensor, g: Tensor) -> tuple[Tensor, Any]:
    h = torch.zeros_like(x[:, 0]) if s is None else s
    out = []
    for t in range(x.shape[1]):
        h = g[:, t].exp() * h + x[:, t]
        out.append(h)
    return torch.stack(out, 1), h


def _retained(s: Any = None, **given: Tensor) -> tuple[Tensor, Any]:
    gamma = (1 - 2.0 ** (-5 - torch.arange(H, dtype=torch.float64))).log().to(given["q"])
    return recurrence(decay=gamma, s=s, **given)


def _lightning(s: Any = None, **given: Tensor) -> tuple[Tensor, Any]:
    slopes = 8 / H * (1 - 1 / 4) * torch.arange(H, dtype=torch.float64)
    return recurrence(decay=-slopes.to(given["q"]), s=s, **given)


def _cases() -> list[Case]:
    one = ((H, K, V),)
    plain = _qkv()
    per_head, per_channel = _decay(inputs(g=(B, T, H))["g"]), _decay(inputs(g=(B, T, H, K))["g"])
    by_value = _decay(inputs(gv=(B, T, H, V))["gv"])
    beta = inputs(beta=(B, T, H))["beta"].sigmoid()
    grouped = _qkv(values=2 * H)
    more_heads = _decay(inputs(g=(B, T, 2 * H))["g"])
    grouped_beta = inputs(beta=(B, T, 2 * H))["beta"].sigmoid()
    units = {name: _l2(x) for name, x in _qkv().items() if name != "v"} | {"v": plain["v"]}
    found = [
        Case("linear_attn", additive.chunk_linear_attn, plain, _plain(), {"normalize": False}, one),
        Case("linear_attn_recurrent", additive.fused_recurrent_linear_attn, plain, _plain(), {}, one),
        Case(
            "linear_attn_normalised",
            additive.fused_chunk_linear_attn,
            {name: x if name == "v" else F.elu(x) + 1 for name, x in plain.items()},
            _normalised,
            {},
            ((H, K, V), (1, H, K)),
        ),
        Case("retention", additive.chunk_retention, plain, _retained, {}, one),
        Case("retention_recurrent", additive.fused_recurrent_retention, plain, _retained, {}, one),
        Case("lightning", additive.chunk_lightning_attn, plain, _lightning, {"layer_idx": 1, "num_layers": 4}, one),
    ]
    for adapter in (additive.chunk_simple_gla, additive.fused_chunk_simple_gla, additive.fused_recurrent_simple_gla):
        found.append(Case(adapter.__name__, adapter, _with(plain, g=per_head), _plain(), {}, one, decays=("g",)))
    gla = additive.fused_recurrent_gla
    found += [
        Case("chunk_gla", additive.chunk_gla, _with(plain, g=per_channel), _plain(), {}, one, decays=("g",)),
        Case("recurrent_gla", gla, _with(plain, gk=per_channel, gv=by_value), _plain(), {}, one, decays=("gk", "gv")),
        Case("recurrent_gla_of_values", gla, _with(plain, gv=by_value), _plain(), {}, one, decays=("gv",)),
        Case("delta", delta.chunk_delta_rule, _with(units, beta=beta), _plain(delta=True), {}, one),
        Case("delta_no_beta", delta.fused_recurrent_delta_rule, units, _plain(delta=True), {}, one),
        Case(
            "delta_beta_of_values",
            delta.fused_recurrent_delta_rule,
            _with(units, beta=inputs(beta=(B, T, H, V))["beta"].sigmoid()),
            _plain(delta=True),
            {},
            one,
        ),
        Case(
            "gated_delta",
            delta.chunk_gated_delta_rule,
            _with(grouped, g=more_heads, beta=grouped_beta),
            _unit,
            {"use_qk_l2norm_in_kernel": True, "scale": 0.5},
            ((2 * H, K, V),),
            decays=("g",),
        ),
        Case(
            "gated_delta_recurrent",
            delta.fused_recurrent_gated_delta_rule,
            _with(units, gk=per_channel, gv=by_value, beta=beta),
            _plain(delta=True),
            {},
            one,
            decays=("gk", "gv"),
        ),
        Case(
            "kda",
            delta.chunk_kda,
            _with(grouped, g=_decay(inputs(g=(B, T, 2 * H, K))["g"]), beta=grouped_beta),
            _unit,
            {"use_qk_l2norm_in_kernel": True},
            ((2 * H, K, V),),
            decays=("g",),
        ),
        Case(
            "kda_recurrent",
            delta.fused_recurrent_kda,
            _with(units, g=per_channel, beta=inputs(beta=(B, T, H, V))["beta"].sigmoid()),
            _plain(delta=True),
            {},
            one,
            decays=("g",),
        ),
        Case(
            "delta_product",
            delta.chunk_gated_delta_product,
            inputs(q=(B, T, H, K), v=(B, 3 * T, H, V), g=(B, T, H))
            | {"k": _l2(inputs(k=(B, 3 * T, H, K))["k"]), "beta": inputs(beta=(B, 3 * T, H))["beta"].sigmoid()}
            | {"g": per_head},
            _product,
            {"num_householder": 3},
            one,
            micro=3,
            decays=("g",),
        ),
        Case(
            "gsa",
            gated.chunk_gsa,
            inputs(q=(B, T, 2 * H, K), k=(B, T, H, K), v=(B, T, H, V), s=(B, T, H, 5))
            | {"g": _decay(inputs(g=(B, T, H, 5))["g"])},
            _gsa,
            {},
            ((H, K, 5), (H, 5, V)),
            decays=("g",),
        ),
        Case(
            "gsa_recurrent",
            gated.fused_recurrent_gsa,
            _with(plain, s=inputs(s=(B, T, H, 5))["s"], g=_decay(inputs(g=(B, T, H, 5))["g"])),
            _gsa,
            {},
            ((H, K, 5), (H, 5, V)),
            decays=("g",),
        ),
        Case("lightnet", gated.chunk_lightnet, plain, _lightnet, {}, ((H, K, V), (1, H, K))),
        Case("lightnet_recurrent", gated.fused_recurrent_lightnet, plain, _lightnet, {}, ((H, K, V), (1, H, K))),
        Case(
            "hgrn",
            diagonal.fused_recurrent_hgrn,
            inputs(x=(B, T, K)) | {"g": _decay(inputs(g=(B, T, K))["g"])},
            _hgrn,
            {},
            ((K,),),
            decays=("g",),
        ),
        Case(
            "chunk_hgrn",
            diagonal.chunk_hgrn,
            inputs(x=(B, T, K)) | {"g": _decay(inputs(g=(B, T, K))["g"])},
            _hgrn,
            {},
            ((K,),),
            decays=("g",),
        ),
    ]
    rwkv6 = inputs(r=(B, T, H, K), k=(B, T, H, K), v=(B, T, H, V), u=(H, K)) | {"w": per_channel}
    found += [
        Case(adapter.__name__, adapter, rwkv6, _rwkv6, {}, one, decays=("w",))
        for adapter in (rwkv.chunk_rwkv6, rwkv.fused_recurrent_rwkv6)
    ]
    unit = units["k"]
    low_rank = _with(units, a=-unit, b=unit * inputs(a=(B, T, H, K))["a"].sigmoid(), gk=per_channel)
    found += [
        Case(adapter.__name__, adapter, low_rank, _dplr, {}, one, decays=("gk",))
        for adapter in (rwkv.chunk_dplr_delta_rule, rwkv.fused_recurrent_dplr_delta_rule)
    ]
    identity = {name: x for name, x in low_rank.items() if name != "gk"}
    found += [
        Case(adapter.__name__, adapter, identity, _dplr, {}, one)
        for adapter in (rwkv.chunk_iplr_delta_rule, rwkv.fused_recurrent_iplr_delta_rule)
    ]
    seventh = {"r" if name == "q" else "w" if name == "gk" else name: x for name, x in low_rank.items()}
    found.append(Case("rwkv7", rwkv.chunk_rwkv7, seventh, _rwkv7, {}, one, decays=("w",)))
    step = {name: x for name, x in seventh.items() if name != "b"} | {
        "kk": unit,
        "a": inputs(a=(B, T, H, K))["a"].sigmoid(),
    }
    found.append(Case("rwkv7_step", rwkv.fused_mul_recurrent_rwkv7, step, _rwkv7_step, {}, one, decays=("w",)))
    comba = _with(units, p=unit * 0.8, g=per_head, beta=beta)
    found += [
        Case(adapter.__name__, adapter, comba, _plain(delta=True, erase_first=True), {}, one, decays=("g",))
        for adapter in (erase.chunk_comba, erase.fused_recurrent_comba)
    ]
    by_channel = comba | {"beta": inputs(beta=(B, T, H, V))["beta"].sigmoid()}
    reference = _plain(delta=True, erase_first=True)
    found.append(
        Case("comba_beta_of_values", erase.fused_recurrent_comba, by_channel, reference, {}, one, decays=("g",))
    )
    second = _with(
        units,
        g=per_channel,
        b=inputs(b=(B, T, H, K))["b"].sigmoid(),
        w=inputs(w=(B, T, H, V))["w"].sigmoid(),
    )
    found += [
        Case(adapter.__name__, adapter, second, _gdn2, {}, one, decays=("g",))
        for adapter in (erase.chunk_gdn2, erase.fused_recurrent_gdn2)
    ]
    return found


CASES = _cases()
