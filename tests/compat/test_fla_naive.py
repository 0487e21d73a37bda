"""fla's ops as phistate computes them, against the references in plain torch that fla carries itself."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from phistate.compat.fla.ops import OPS, additive, delta, diagonal, erase, gated, polynomial, rwkv
from phistate.compat.functions import signature_of
from tests.compat.fla_cases import B, H, K, T, V, inputs

pytestmark = pytest.mark.usefixtures("fla")

PLAIN = inputs(q=(B, T, H, K), k=(B, T, H, K), v=(B, T, H, V))
UNIT = {name: x if name == "v" else F.normalize(x, dim=-1) for name, x in PLAIN.items()}
HEAD = F.logsigmoid(inputs(g=(B, T, H))["g"])
CHANNEL = F.logsigmoid(inputs(g=(B, T, H, K))["g"])
BETA = inputs(beta=(B, T, H))["beta"].sigmoid()
GATES = {name: x.sigmoid() for name, x in inputs(b=(B, T, H, K), w=(B, T, H, V)).items()}
SLOTS = {"s": inputs(s=(B, T, H, 5))["s"], "g": F.logsigmoid(inputs(g=(B, T, H, 5))["g"])}
LOW_RANK = UNIT | {"a": -UNIT["k"], "b": UNIT["k"] * inputs(a=(B, T, H, K))["a"].sigmoid()}
CELL = {"x": inputs(x=(B, T, K))["x"], "g": F.logsigmoid(inputs(g=(B, T, K))["g"])}
STEPS = {"k": F.normalize(inputs(k=(B, 2 * T, H, K))["k"], dim=-1), "v": inputs(v=(B, 2 * T, H, V))["v"]}
STEPS |= {"q": PLAIN["q"], "g": HEAD, "beta": inputs(beta=(B, 2 * T, H))["beta"].sigmoid()}


def adapted(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Ours: o, then the states."""

    def run(**given: Tensor) -> list[Tensor]:
        o, state = function(**given, **options, output_final_state=True)
        return [o, *(state if isinstance(state, tuple | list) else [state])]

    return run


def naive(path: str, heads_first: bool = False, state: bool = True, **options: Any) -> Callable[..., Any]:
    """fla's reference of that path, called with ours' names where ``options`` maps one of its own to one of them."""
    module, _, name = f"fla.ops.{path}".rpartition(".")
    names = {ours: own for own, ours in options.items() if isinstance(ours, str)}
    fixed = {own: value for own, value in options.items() if not isinstance(value, str)}

    def run(**given: Tensor) -> list[Tensor]:
        function = getattr(importlib.import_module(module), name)
        turn = (lambda x: x.transpose(1, 2) if x.ndim > 2 else x) if heads_first else (lambda x: x)
        given = {names.get(own, own): turn(x) for own, x in given.items()}
        out = function(**given, **fixed, **({"output_final_state": True} if state else {}))
        o, last = out if isinstance(out, tuple) else (out, None)
        return [turn(o), *(last if isinstance(last, tuple) else [] if last is None else [last])]

    return run


PAIRS = {
    "simple_gla": (additive.chunk_simple_gla, "simple_gla.naive.naive_recurrent_simple_gla", {}, PLAIN | {"g": HEAD}),
    "gla": (additive.fused_recurrent_gla, "gla.naive.naive_recurrent_gla", {}, PLAIN | {"gk": CHANNEL}),
    "linear_attn": (
        additive.fused_recurrent_linear_attn,
        "linear_attn.naive.naive_recurrent_linear_attn",
        {},
        PLAIN,
    ),
    "delta": (
        delta.chunk_delta_rule,
        "delta_rule.naive.delta_rule_recurrence",
        {"heads_first": True},
        UNIT | {"beta": BETA},
    ),
    "gated_delta": (
        delta.chunk_gated_delta_rule,
        "gated_delta_rule.naive.naive_recurrent_gated_delta_rule",
        {},
        UNIT | {"beta": BETA, "g": HEAD},
    ),
    "kda": (delta.chunk_kda, "kda.naive.naive_recurrent_kda", {}, UNIT | {"beta": BETA, "g": CHANNEL}),
    # fla's recurrent reference reads the decayed state; its kernels and this one read the state before.
    "comba": (
        erase.chunk_comba,
        "comba.naive.naive_chunk_comba",
        {},
        UNIT | {"p": 0.8 * UNIT["k"], "beta": BETA, "g": HEAD},
    ),
    "gdn2": (erase.chunk_gdn2, "gdn2.naive.naive_recurrent_gdn2", {}, UNIT | GATES | {"g": CHANNEL}),
    "gsa": (gated.chunk_gsa, "gsa.naive.naive_recurrent_gsa", {}, PLAIN | SLOTS),
    "gsa_no_gate": (gated.chunk_gsa, "gsa.naive.naive_recurrent_gsa", {}, PLAIN | {"s": SLOTS["s"]}),
    "hgrn": (diagonal.fused_recurrent_hgrn, "hgrn.naive.naive_recurrent_hgrn", {}, CELL),
    "rwkv6": (
        rwkv.chunk_rwkv6,
        "rwkv6.recurrent_naive.naive_recurrent_rwkv6",
        {"heads_first": True, "q": "r"},
        {"r": PLAIN["q"], "k": PLAIN["k"], "v": PLAIN["v"], "w": CHANNEL, "u": inputs(u=(H, K))["u"]},
    ),
    "dplr": (
        rwkv.chunk_dplr_delta_rule,
        "generalized_delta_rule.dplr.naive.dplr_recurrence",
        {"heads_first": True, "alpha": "a", "beta": "b"},
        LOW_RANK | {"gk": CHANNEL},
    ),
    "iplr": (
        rwkv.chunk_iplr_delta_rule,
        "generalized_delta_rule.iplr.naive.iplr_recurrence",
        {"heads_first": True, "alpha": "a", "beta": "b"},
        LOW_RANK,
    ),
}


def compare(mine: Callable[..., Any], theirs: Callable[..., Any], given: dict[str, Tensor]) -> None:
    """Values, final states and the gradient of every input."""
    results = []
    for function in (mine, theirs):
        leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
        outputs = function(**leaves)
        generator = torch.Generator().manual_seed(2)
        loss = sum((x * torch.randn(x.shape, generator=generator)).sum() for x in outputs)
        results.append([*outputs, *torch.autograd.grad(loss, list(leaves.values()))])
    assert len(results[0]) == len(results[1])
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4 * max(1.0, y.detach().abs().max().item()))


@pytest.mark.parametrize("name", PAIRS)
def test_ours_is_flas_own_reference(name: str):
    function, path, how, given = PAIRS[name]
    compare(adapted(function), naive(path, **how), given)


def test_gated_delta_product_is_flas_own_reference():
    theirs = naive("gated_delta_product.naive.naive_recurrent_gated_delta_product", num_householder=2, scale=K**-0.5)
    compare(adapted(delta.chunk_gated_delta_product, num_householder=2), theirs, STEPS)


def test_the_normalised_one_is_flas_own_reference():
    positive = {name: x if name == "v" else F.elu(x) + 1 for name, x in PLAIN.items()}
    theirs = naive("linear_attn.naive.naive_recurrent_linear_attn", normalize=True)
    compare(adapted(additive.chunk_linear_attn), theirs, positive)


def test_retention_is_flas_own_reference():
    theirs = naive("retention.naive.naive_retention", heads_first=True, state=False)
    compare(lambda **given: [additive.chunk_retention(**given)[0]], theirs, PLAIN)
    compare(lambda **given: [additive.parallel_retention(**given)[0]], theirs, PLAIN)


@pytest.mark.parametrize("name", ["based", "rebased"])
@pytest.mark.parametrize("normalised", [True, False])
def test_polynomials_are_flas_own_references(name: str, normalised: bool):
    theirs = naive(f"{name}.naive.naive_parallel_{name}", heads_first=True, state=False, use_norm=normalised)
    function = {"based": polynomial.parallel_based, "rebased": polynomial.parallel_rebased}[name]
    option = {"use_norm": normalised} if name == "based" else {"use_normalize": normalised, "eps": 1e-6}
    compare(lambda **given: [function(**given, **option)], theirs, PLAIN)


def test_rebased_gives_numerator_and_denominator():
    o, total = polynomial.parallel_rebased(**PLAIN, return_both=True)
    whole = polynomial.parallel_rebased(**PLAIN)
    torch.testing.assert_close((o / (total.unsqueeze(-1) + 1e-5)).transpose(1, 2), whole)


def test_weights_are_given_when_asked_for():
    given = PLAIN | {"g": HEAD}
    o, weights = additive.parallel_simple_gla(**given, output_attentions=True)
    heads_first = {name: x.transpose(1, 2) for name, x in given.items()}
    theirs = importlib.import_module("fla.ops.simple_gla.naive").naive_parallel_simple_gla(**given)
    torch.testing.assert_close(weights, theirs[1].to(weights), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(o, (weights @ heads_first["v"]).transpose(1, 2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "path, gate", [("kda.gate.naive_kda_gate", None), ("kda.gate.naive_kda_lowerbound_gate", -3.0)]
)
def test_a_gate_per_channel_is_made_in_the_kernel(path: str, gate: float | None):
    raw = inputs(g=(B, T, H, K), A_log=(H,), dt_bias=(H * K,))
    theirs = naive(path, state=False, **({} if gate is None else {"lower_bound": gate}))

    def made(g: Tensor, A_log: Tensor, dt_bias: Tensor) -> list[Tensor]:
        decay = theirs(g=g, A_log=A_log, dt_bias=dt_bias)[0]
        return adapted(delta.chunk_kda)(**UNIT, beta=BETA, g=decay)

    def kept(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda **given: adapted(function, use_gate_in_kernel=True, lower_bound=gate)(**UNIT, beta=BETA, **given)

    compare(kept(delta.chunk_kda), made, raw)
    compare(kept(delta.fused_recurrent_kda), made, raw)


def test_a_gate_per_head_is_made_in_the_kernel():
    raw = inputs(g=(B, T, H), A_log=(H,), dt_bias=(H,))
    theirs = naive("gated_delta_rule.gate.naive_gdn_gate", state=False)

    def made(g: Tensor, A_log: Tensor, dt_bias: Tensor) -> list[Tensor]:
        decay = theirs(g=g, A_log=A_log, dt_bias=dt_bias)[0]
        return adapted(delta.chunk_gated_delta_rule)(**UNIT, beta=BETA, g=decay)

    for function in (delta.chunk_gated_delta_rule, delta.fused_recurrent_gated_delta_rule):
        ours = adapted(function, use_gate_in_kernel=True)
        compare(lambda ours=ours, **given: ours(**UNIT, beta=BETA, **given), made, raw)


@pytest.mark.parametrize("function", [delta.chunk_gated_delta_rule, delta.fused_recurrent_kda, delta.chunk_kda])
def test_the_strength_is_made_in_the_kernel(function: Callable[..., Any]):
    raw = inputs(beta=(B, T, H))["beta"]
    g = HEAD if function is delta.chunk_gated_delta_rule else CHANNEL
    for negative, factor in ((False, 1), (True, 2)):
        options = {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": negative}
        o, _ = function(**UNIT, g=g, beta=raw, **options)
        expected, _ = function(**UNIT, g=g, beta=raw.sigmoid() * factor)
        torch.testing.assert_close(o, expected)
    with pytest.raises(ValueError, match="allow_neg_eigval"):
        function(**UNIT, g=g, beta=raw, allow_neg_eigval=True)


def test_no_strength_is_one_before_its_sigmoid():
    given = UNIT | {"g": HEAD}
    ones = torch.ones(B, T, H)
    for options in ({}, {"use_beta_sigmoid_in_kernel": True}):
        o, _ = delta.fused_recurrent_gated_delta_rule(**given, **options)
        torch.testing.assert_close(o, delta.fused_recurrent_gated_delta_rule(**given, beta=ones, **options)[0])
    with pytest.raises(ValueError, match="allow_neg_eigval"):
        delta.fused_recurrent_gated_delta_rule(**given, allow_neg_eigval=True)


def test_mixed_dtypes_are_promoted_and_the_output_has_flas():
    mixed = UNIT | {"v": UNIT["v"].half()}
    assert delta.chunk_gated_delta_rule(**mixed, g=HEAD, beta=BETA)[0].dtype == torch.float32
    assert delta.fused_recurrent_gated_delta_rule(**mixed, g=HEAD, beta=BETA)[0].dtype == torch.float16


def test_what_only_flas_kernels_serve_is_refused_by_name():
    with pytest.raises(ValueError, match="cp_context: got"):
        delta.chunk_kda(**UNIT, g=CHANNEL, beta=BETA, cp_context=object())
    with pytest.raises(ValueError, match="return_intermediate_states: got True"):
        delta.chunk_kda(**UNIT, g=CHANNEL, beta=BETA, return_intermediate_states=True)


def test_every_adapter_has_flas_own_signature():
    different = {}
    for places in OPS.values():
        for module, adapters in places.items():
            for adapter in adapters:
                theirs = getattr(importlib.import_module(module), adapter.__name__)
                if signature_of(theirs) != signature_of(adapter):
                    different[f"{module}.{adapter.__name__}"] = signature_of(theirs)
    assert not different
