"""The short convolution: both paths against float64, its state in every case."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phistate import causal_conv1d, causal_conv1d_step_
from phistate.ops.backends import native
from tests.scan_cases import (
    BACKENDS,
    assert_near,
    differentiable,
    grads_of,
    poison,
    to,
    weights_of,
)

NAMES = ("x", "weight", "bias", "initial_state")


def make(batch=2, T=9, C=5, W=4, *, bias=True, warm=True, sequences=None):
    draw = {"dtype": torch.float64}
    return {
        "x": torch.randn(batch, T, C, **draw),
        "weight": torch.randn(C, W, **draw),
        "bias": torch.randn(C, **draw) if bias else None,
        "initial_state": torch.randn(sequences or batch, C, W - 1, **draw) if warm else None,
    }


def run(arguments, backend, activation="silu", **more):
    return causal_conv1d(**arguments, activation=activation, return_state=True, backend=backend, **more)


def test_is_the_padded_convolution():
    c = make(warm=False)
    padded = F.pad(c["x"].mT, (3, 0))
    want = F.silu(F.conv1d(padded, c["weight"].unsqueeze(1), c["bias"], groups=5)).mT
    y, state = run(c, "torch")
    assert_near(y, want, torch.float64, "y")
    assert torch.equal(state, padded[..., -3:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("W", [2, 3, 4, 5, 6, 7, 8])
def test_kernel_values_and_gradients(dtype, W, instruction_set):
    """Of every input, in both memory orders; low precision errs at most twice what torch does."""
    for T, C, activation, turned in (
        (70, 37, "silu", False),
        (150, 20, "silu", True),
        (66, 3, None, False),
        (1, 65, None, True),
    ):
        case = to(to(make(2, T, C, W), dtype), torch.float64)
        results = {}
        for name, kind, backend in (
            ("exact", torch.float64, "torch"),
            ("torch", dtype, "torch"),
            ("cpu", dtype, "cpu"),
        ):
            ins = to(case, kind)
            if turned:
                ins["x"] = ins["x"].mT.contiguous().mT
            ins = differentiable(ins)
            y, state = run(ins, backend, activation)
            assert y.dtype == state.dtype == kind
            assert backend == "torch" or T == 1 or y.stride() == ins["x"].stride()
            results[name] = {"y": y, "state": state, **grads_of(ins, y, state)}
        for name, want in results["exact"].items():
            budget = 2 * (results["torch"][name].double() - want).abs().max().item()
            assert_near(results["cpu"][name], want, dtype, f"{name} {T=} {C=} {activation=}", budget)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    T=st.sampled_from([0, 1, 2, 3, 7, 15, 16, 17, 63, 64, 65, 129]),
    C=st.sampled_from([1, 4, 15, 16, 17, 48, 100]),
    W=st.integers(2, 8),
    batch=st.integers(1, 3),
    parts=st.tuples(st.booleans(), st.booleans()),
    turned=st.booleans(),
    activation=st.sampled_from([None, "silu"]),
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_shape_and_layout(backend, T, C, W, batch, parts, turned, activation):
    case = make(batch, T, C, W, bias=parts[0], warm=parts[1])
    want = differentiable(case)
    y, state = run(want, "torch", activation)
    expected = {"y": y, "state": state, **grads_of(want, y, state)}
    given = to(case, torch.float32)
    if turned:
        given["x"] = given["x"].mT.contiguous().mT
    given = differentiable(given)
    y, state = run(given, backend, activation)
    got = {"y": y, "state": state, **grads_of(given, y, state)}
    for name, value in expected.items():
        assert_near(got[name], value, torch.float32, name)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cuts", [(1, 2, 3, 5), (5,), (0, 70), (64, 65)], ids=str)
def test_segments_carry_on(backend, cuts):
    case = to(make(2, 75, 20), torch.float32)
    want, want_state = run(case, backend)
    pieces, state = [], case["initial_state"]
    for a, b in itertools.pairwise((0, *cuts, 75)):
        y, state = run({**case, "x": case["x"][:, a:b], "initial_state": state}, backend)
        pieces.append(y)
    assert_near(torch.cat(pieces, 1), want, torch.float32, "y")
    assert torch.equal(state, want_state)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("turned", [False, True])
def test_padding_is_not_there(backend, turned):
    masks = {
        "left": range(10),
        "right": range(60, 70),
        "middle": (3, 4, 30, 31, 32, 33, 40, 68, 69, 2),
        "all but two": range(1, 69),
        "all": range(70),
    }
    for name, padded in masks.items():
        mask = torch.ones(1, 70, dtype=torch.bool)
        mask[:, list(padded)] = False
        kept = mask[0].nonzero().squeeze(1)
        short = to(make(1, len(kept), 20), torch.float32)
        long = differentiable(poison(short, kept, 70, ("x",), turned))
        short = differentiable(short)
        want, want_state = run(short, backend)
        got, state = run(long, backend, mask=mask)
        assert_near(got[:, kept], want, torch.float32, name)
        assert not got[:, list(padded)].any()
        assert torch.equal(state, want_state), name
        expected = grads_of(short, want, want_state)
        weights = torch.zeros_like(got)
        weights[:, kept] = weights_of(want).float()
        grads = torch.autograd.grad(
            (got * weights).sum() + state.square().sum(), [long[n] for n in NAMES], materialize_grads=True
        )
        for n, gradient in zip(NAMES, grads, strict=True):
            if n == "x":
                assert not gradient[:, list(padded)].any(), name
                gradient = gradient[:, kept]
            assert_near(gradient, expected[f"d{n}"], torch.float32, f"gradient of {n}, {name}")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("turned", [False, True])
def test_packed_is_one_by_one(backend, masked, turned):
    bounds = [0, 0, 7, 7, 8, 75, 75]
    case = to(make(1, 75, 20, sequences=6), torch.float32)
    if turned:
        case["x"] = case["x"].mT.contiguous().mT
    case = differentiable(case)
    mask = torch.rand(1, 75) > 0.3 if masked else None
    got, state = run(case, backend, mask=mask, cu_seqlens=torch.tensor(bounds))
    pieces, states = [], []
    for n, (a, b) in enumerate(itertools.pairwise(bounds)):
        part = {**case, "x": case["x"][:, a:b], "initial_state": case["initial_state"][n : n + 1]}
        y, last = run(part, backend, mask=None if mask is None else mask[:, a:b])
        pieces.append(y)
        states.append(last)
    want, want_state = torch.cat(pieces, 1), torch.cat(states)
    assert_near(got, want, torch.float32, "y")
    assert torch.equal(state, want_state)
    expected = grads_of(case, want, want_state)
    for name, gradient in grads_of(case, got, state).items():
        assert_near(gradient, expected[name], torch.float32, name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_views_and_expanded_gradients(backend):
    wide = torch.randn(2, 40, 60)
    case = to(make(C=20, warm=False), torch.float32)
    results = []
    for x in (
        wide[..., 20:40],
        wide[..., 20:40].contiguous(),
        wide.mT.contiguous()[:, 20:40].mT,
        wide[:, :, 20:40].flip(0).flip(0),
    ):
        ins = differentiable({**case, "x": x})
        y = run(ins, backend)[0]
        y.sum().backward()
        results.append((y, ins["x"].grad, ins["weight"].grad, ins["bias"].grad))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.allclose(a, b, atol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "held"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)],
)
@pytest.mark.parametrize("W", [2, 4, 8])
@pytest.mark.parametrize("more", [0, 1, 2])
def test_step_is_a_convolution_of_one(dtype, held, W, more, instruction_set):
    case = to(make(3, 1, 37, W), dtype)
    want, want_state = run(case, "torch")
    older = torch.randn(3, 37, more, dtype=dtype)
    state = torch.cat([older, case["initial_state"]], -1).to(held)
    expected = torch.cat([state[..., 1 : more + 1], want_state[..., -more - W + 1 :].to(held)], -1)[
        ..., -(W - 1 + more) :
    ]
    y = causal_conv1d_step_(state, case["x"][:, 0], case["weight"], case["bias"], "silu")
    assert_near(y, want[:, 0].double(), dtype, "y")
    assert torch.equal(state, torch.cat([expected[..., : W - 2 + more], case["x"][:, 0, :, None].to(held)], -1))
    turned = state.mT.contiguous().mT
    a = causal_conv1d_step_(state, case["x"][:, 0], case["weight"], None, None)
    b = causal_conv1d_step_(turned, case["x"][:, 0], case["weight"], None, None, backend="torch")
    assert_near(a, b.double(), dtype, "y")
    assert torch.equal(state, turned)


def test_step_refuses_to_lose_a_gradient():
    case = make(2, 1)
    with pytest.raises(ValueError, match="state: got inputs that require a gradient"):
        causal_conv1d_step_(case["initial_state"], case["x"][:, 0], case["weight"].requires_grad_())


@pytest.mark.parametrize("full", [True, False])
def test_gradcheck_of_the_reference(full):
    case = differentiable(make(2, 5, 3, 3, bias=full, warm=full))
    names = [n for n in NAMES if case[n] is not None]
    mask = torch.tensor([[True, False, True, True, False], [False, True, True, True, True]]) if full else None

    def call(*tensors):
        return run({**case, **dict(zip(names, tensors, strict=True))}, "torch", mask=mask)

    assert torch.autograd.gradcheck(call, [case[n] for n in names])


@pytest.mark.skipif(native.why_not() is not None, reason=f"no native library: {native.why_not()}")
class TestOperator:
    @pytest.mark.parametrize("full", [True, False])
    @pytest.mark.parametrize("turned", [True, False])
    def test_opcheck(self, full, turned):
        c = to(make(1, 40, 20, bias=full, warm=full), torch.float32)
        if turned:
            c["x"] = c["x"].mT.contiguous().mT
        mask = torch.rand(1, 40) > 0.2
        arguments = (*differentiable(c).values(), mask, torch.tensor([0, 40]), True)
        torch.library.opcheck(torch.ops.phistate.causal_conv1d.default, arguments)

    def test_opcheck_of_the_step(self):
        c = to(make(2, 1), torch.float32)
        arguments = (c["initial_state"], c["x"][:, 0], c["weight"], c["bias"], True)
        torch.library.opcheck(torch.ops.phistate.causal_conv1d_step_.default, arguments)

    def test_compiles_whole(self):
        case = differentiable(to(make(1, 40, 20), torch.float32))
        mask, cu_seqlens = torch.rand(1, 40) > 0.2, torch.tensor([0, 40])

        def call(arguments):
            y, state = run(arguments, "auto", mask=mask, cu_seqlens=cu_seqlens)
            return y.sin(), state

        want = grads_of(case, *call(case))
        got = grads_of(case, *torch.compile(call, fullgraph=True, backend="aot_eager")(case))
        for name, gradient in want.items():
            assert_near(got[name], gradient, torch.float32, name)

    @pytest.mark.parametrize("turned", [True, False])
    def test_threads_agree(self, turned):
        case = to(make(1, 2100, 1100), torch.float32)
        if turned:
            case["x"] = case["x"].mT.contiguous().mT
        case = differentiable(case)
        y, state = run(case, "cpu")
        want = grads_of(case, y, state)
        torch.set_num_threads(2)
        again, state = run(case, "cpu")
        assert torch.equal(y, again)
        got = grads_of(case, again, state)
        for name, gradient in want.items():
            assert torch.equal(got[name], gradient), name
        assert_near(y, run(case, "torch")[0], torch.float32, "y")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 9)}, r"x: got shape \(2, 9\); takes \[B,T,C\]"),
        ({"weight": torch.zeros(5, 9).double()}, r"weight: got shape \(5, 9\); takes \[C,W\] with W from 2 to 8"),
        ({"weight": torch.zeros(5, 1).double()}, "weight: got shape"),
        ({"weight": torch.zeros(4, 4).double()}, "weight: got shape"),
        ({"bias": torch.zeros(4).double()}, "bias: got shape"),
        ({"activation": "gelu"}, "activation: got 'gelu'; takes 'silu' or None"),
        ({"initial_state": torch.zeros(2, 5, 3)}, "initial_state: got torch.float32; takes torch.float64"),
        ({"initial_state": torch.zeros(2, 5, 4).double()}, "initial_state: got shape"),
        ({"mask": torch.ones(2, 9)}, "mask: got torch.float32"),
        ({"cu_seqlens": torch.tensor([0, 9])}, "cu_seqlens: got it with batch 2"),
        ({"backend": "cpu"}, "backend: got 'cpu', which cannot run this call: .*float64"),
    ],
)
def test_what_is_refused(change, message):
    with pytest.raises((ValueError, TypeError), match=message):
        causal_conv1d(**{**make(), **change})
