"""Mamba-1's scan: both paths against the recurrence in float64, and what each must hold whatever the call."""

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phistate import selective_scan, selective_scan_step_
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

NAMES = ("x", "delta", "A", "B", "C", "D", "z", "delta_bias", "initial_state")


def make(batch=2, T=9, D=5, N=3, groups=None, *, skip=True, gate=True, bias=True, warm=True, sequences=None):
    """Arguments in float64 whose state neither dies nor grows."""
    shape = (batch, T, N) if groups is None else (batch, T, groups, N)
    draw = {"dtype": torch.float64}
    return {
        "x": torch.randn(batch, T, D, **draw),
        "delta": torch.randn(batch, T, D, **draw),
        "A": -torch.rand(D, N, **draw) * 2 - 0.05,
        "B": torch.randn(shape, **draw),
        "C": torch.randn(shape, **draw),
        "D": torch.randn(D, **draw) if skip else None,
        "z": torch.randn(batch, T, D, **draw) if gate else None,
        "delta_bias": torch.randn(D, **draw) if bias else None,
        "initial_state": torch.randn(sequences or batch, D, N, **draw) if warm else None,
    }


def rounded(arguments, dtype):
    """The arguments in a type; the state stays in what the op keeps it in."""
    state = arguments["initial_state"]
    cast = to(arguments, dtype)
    cast["initial_state"] = state if state is None else state.to(torch.promote_types(dtype, torch.float32))
    return cast


def run(arguments, backend, **more):
    return selective_scan(**arguments, return_state=True, backend=backend, **more)


def time(arguments, part):
    return {n: t[:, part] if n in ("x", "delta", "B", "C", "z") and t is not None else t for n, t in arguments.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("softplus", [False, True])
def test_kernel_values_and_gradients(dtype, softplus, instruction_set):
    """Of every input, against float64 on the same rounded numbers; low precision errs at most twice what torch does."""
    for T, D, N, groups, full in ((70, 37, 16, None, True), (33, 40, 5, 2, False), (1, 3, 1, 1, True)):
        case = make(2, T, D, N, groups, skip=full, gate=full, bias=full, warm=full)
        case["delta"] = case["delta"].abs() * 0.3 if not softplus else case["delta"]
        if not softplus:
            case["delta_bias"] = None
        results = {}
        for name, kind, backend in (
            ("exact", torch.float64, "torch"),
            ("torch", dtype, "torch"),
            ("cpu", dtype, "cpu"),
        ):
            ins = differentiable(rounded(rounded(case, dtype), kind))
            y, h = run(ins, backend, delta_softplus=softplus)
            assert y.dtype == kind
            results[name] = {"y": y, "h": h, **grads_of(ins, y, h)}
        for name, want in results["exact"].items():
            budget = 2 * (results["torch"][name].double() - want).abs().max().item()
            assert_near(results["cpu"][name], want, dtype, f"{name} {T=} {D=} {N=} {groups=}", budget)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    T=st.sampled_from([0, 1, 2, 31, 32, 33, 64, 65, 100]),
    D=st.sampled_from([1, 4, 15, 16, 17, 48, 100]),
    N=st.sampled_from([1, 2, 3, 4, 6, 16, 17]),
    groups=st.sampled_from([None, 1, 2]),
    batch=st.integers(1, 3),
    softplus=st.booleans(),
    parts=st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans()),
    turned=st.tuples(*[st.booleans()] * 5),
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_shape_and_layout(backend, T, D, N, groups, batch, softplus, parts, turned):
    if groups is not None:
        D *= groups
    skip, gate, bias, warm = parts
    case = make(batch, T, D, N, groups, skip=skip, gate=gate, bias=bias, warm=warm)
    if not softplus:  # a negative step would let the state grow without bound
        case["delta"], case["delta_bias"] = case["delta"].abs(), None if not bias else case["delta_bias"].abs()
    want, want_h = run(case, "torch", delta_softplus=softplus)
    given = rounded(case, torch.float32)
    for name, turn in zip(("x", "delta", "B", "C", "z"), turned, strict=True):
        if turn and given[name] is not None:  # time is the dense dimension, as in transformers
            given[name] = given[name].movedim(1, -1).contiguous().movedim(-1, 1)
    y, h = run(given, backend, delta_softplus=softplus)
    size = max(1.0, want_h.abs().max().item() if want_h.numel() else 0.0)
    assert_near(y / size, want / size, torch.float32, "y")
    assert_near(h, want_h, torch.float32, "h")
    if backend == "cpu" and y.numel() and turned[0] and min(T, D) > 1:
        assert y.stride() == given["x"].stride()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cuts", [(1, 2, 3), (5,), (0, 40), (32, 64)], ids=str)
def test_segments_carry_on(backend, cuts):
    case = rounded(make(2, 75, 20, 4), torch.float32)
    want, want_h = run(case, backend, delta_softplus=True)
    pieces, h = [], case["initial_state"]
    for a, b in itertools.pairwise((0, *cuts, 75)):
        y, h = run({**time(case, slice(a, b)), "initial_state": h}, backend, delta_softplus=True)
        pieces.append(y)
    assert_near(torch.cat(pieces, 1), want, torch.float32, "y")
    assert_near(h, want_h, torch.float32, "h")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("turned", [False, True])
def test_padding_changes_nothing(backend, turned):
    kept_case = rounded(make(1, 60, 20, 4), torch.float32)
    masks = {
        "left": range(10),
        "right": range(60, 70),
        "middle": (3, 4, 30, 31, 32, 33, 40, 68, 69, 2),
        "all": range(70),
    }
    for name, padded in masks.items():
        mask = torch.ones(1, 70, dtype=torch.bool)
        mask[:, list(padded)] = False
        kept = mask[0].nonzero().squeeze(1)
        short = time(kept_case, slice(0, len(kept)))
        long = poison(short, kept, 70, ("x", "delta", "B", "C", "z"), turned)
        short, long = differentiable(short), differentiable(long)
        want, want_h = run(short, backend, delta_softplus=True)
        got, h = run(long, backend, delta_softplus=True, mask=mask)
        assert_near(got[:, kept], want, torch.float32, name)
        assert not got[:, list(padded)].any()
        assert_near(h, want_h, torch.float32, f"h, {name}")
        expected = grads_of(short, want, want_h)
        weights = torch.zeros_like(got)
        weights[:, kept] = weights_of(want).float()
        got_grads = torch.autograd.grad(
            (got * weights).sum() + h.square().sum(), [long[n] for n in NAMES], materialize_grads=True
        )
        for n, gradient in zip(NAMES, got_grads, strict=True):
            if n in ("x", "delta", "B", "C", "z"):
                assert not gradient[:, list(padded)].any(), f"{n}, {name}"
                gradient = gradient[:, kept]
            assert_near(gradient, expected[f"d{n}"], torch.float32, f"gradient of {n}, {name}")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("masked", [False, True])
def test_packed_is_one_by_one(backend, masked):
    bounds = [0, 0, 7, 7, 8, 75, 75]
    case = differentiable(rounded(make(1, 75, 20, 4, 2, sequences=6), torch.float32))
    mask = torch.rand(1, 75) > 0.3 if masked else None
    got, h = run(case, backend, mask=mask, cu_seqlens=torch.tensor(bounds, dtype=torch.int32), delta_softplus=True)
    pieces, states = [], []
    for n, (a, b) in enumerate(itertools.pairwise(bounds)):
        part = {**time(case, slice(a, b)), "initial_state": case["initial_state"][n : n + 1]}
        y, last = run(part, backend, mask=None if mask is None else mask[:, a:b], delta_softplus=True)
        pieces.append(y)
        states.append(last)
    want, want_h = torch.cat(pieces, 1), torch.cat(states)
    assert_near(got, want, torch.float32, "y")
    assert_near(h, want_h, torch.float32, "h")
    expected = grads_of(case, want, want_h)
    for name, gradient in grads_of(case, got, h).items():
        assert_near(gradient, expected[name], torch.float32, name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_views_and_expanded_gradients(backend):
    case = rounded(make(2, 40, 24, 4, bias=False, warm=False), torch.float32)
    wide = torch.randn(2, 40, 24 * 3 + 8)
    x, delta, z, B, C = wide.split([24, 24, 24, 4, 4], -1)
    case = {**case, "x": x, "delta": delta.abs(), "z": z, "B": B, "C": C}
    dense = differentiable({n: t if t is None else t.contiguous() for n, t in case.items()})
    views = differentiable(case)
    for ins in (dense, views):
        ins["y"] = run(ins, backend)[0]
        ins["y"].sum().backward()
    assert torch.allclose(dense["y"], views["y"], atol=1e-6)
    for name in ("x", "delta", "B", "C", "z"):
        assert torch.allclose(dense[name].grad, views[name].grad, atol=1e-6), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_extreme_rates_stay_finite(backend):
    """Decays of exp(−1e4) and steps of 0 and 1e4: finite values and gradients, in agreement."""
    case = make(1, 40, 20, 3, bias=False)
    case["delta"] = torch.rand(1, 40, 20).double() ** 8 * 1e4
    case["delta"][:, ::5] = 0.0
    case["A"][:, 0] = -1e4
    case["A"][:, 1] = -1e-4
    want = differentiable(case)
    expected = grads_of(want, *run(want, "torch"))
    ins = differentiable(rounded(case, torch.float32))
    for name, gradient in grads_of(ins, *run(ins, backend)).items():
        assert bool(torch.isfinite(gradient).all()), name
        assert_near(gradient, expected[name], torch.float32, name, allowed=1e-4)


@pytest.mark.parametrize(
    ("dtype", "held"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)],
)
@pytest.mark.parametrize("groups", [None, 2])
def test_step_is_a_scan_of_one(dtype, held, groups, instruction_set):
    for D, N in ((40, 16), (6, 5), (34, 33)):
        case = rounded(make(3, 1, D, N, groups), dtype)
        state = case["initial_state"].to(held)
        want, want_h = run({**case, "initial_state": state.float()}, "torch", delta_softplus=True)
        one = {n: t[:, 0] if n in ("x", "delta", "B", "C", "z") else t for n, t in case.items() if n != "initial_state"}
        for layout in (lambda s: s.clone(), lambda s: s.mT.contiguous().mT):
            now = layout(state)
            y = selective_scan_step_(now, **one, delta_softplus=True, backend="cpu")
            assert y.dtype == dtype
            assert_near(y, want[:, 0].double(), dtype, "y")
            assert_near(now, want_h.double(), held, "state")
        shared = {**one, "A": one["A"][:, :1].expand(D, N)}
        want, want_h = run({**case, "A": shared["A"], "initial_state": state.float()}, "torch", delta_softplus=True)
        y = selective_scan_step_(state, **shared, delta_softplus=True)
        assert_near(y, want[:, 0].double(), dtype, "one rate a channel")
        assert_near(state, want_h.double(), held, "one rate a channel")


def test_step_in_the_reference():
    case = make(2, 1, 5, 3)
    want, want_h = run(case, "torch")
    state = case.pop("initial_state")
    one = {n: t[:, 0] if n in ("x", "delta", "B", "C", "z") else t for n, t in case.items()}
    assert torch.equal(selective_scan_step_(state, **one), want[:, 0])
    assert torch.equal(state, want_h)
    one["x"].requires_grad_()
    with pytest.raises(ValueError, match="state: got inputs that require a gradient"):
        selective_scan_step_(state, **one)


@pytest.mark.parametrize("full", [True, False])
def test_gradcheck_of_the_reference(full):
    case = differentiable(make(1, 4, 4, 2, 2, skip=full, gate=full, bias=full, warm=full))
    names = [n for n in NAMES if case[n] is not None]

    def call(*tensors):
        return run({**case, **dict(zip(names, tensors, strict=True))}, "torch", delta_softplus=True)

    assert torch.autograd.gradcheck(call, [case[n] for n in names])


@pytest.mark.skipif(native.why_not() is not None, reason=f"no native library: {native.why_not()}")
class TestOperator:
    def arguments(self, keep, **more):
        c = rounded(make(1, 40, 20, 4, **more), torch.float32)
        mask, cu = torch.rand(1, 40) > 0.2, torch.tensor([0, 40])
        tensors = [c[n] for n in NAMES]
        return (*tensors, mask, cu, True, keep)

    @pytest.mark.parametrize("full", [True, False])
    def test_opcheck(self, full):
        arguments = list(self.arguments(True, skip=full, gate=full, bias=full, warm=full))
        for t in arguments[:9]:
            if t is not None:
                t.requires_grad_()
        torch.library.opcheck(torch.ops.phistate.selective_scan.default, tuple(arguments))

    def test_opcheck_of_the_step(self):
        c = rounded(make(2, 1, 20, 4), torch.float32)
        x, delta, B, C, z = (c[n][:, 0] for n in ("x", "delta", "B", "C", "z"))
        arguments = (c["initial_state"], x, delta, c["A"], B, C, c["D"], z, c["delta_bias"], True, 1, 0.0, 9.0)
        torch.library.opcheck(torch.ops.phistate.selective_scan_step_.default, arguments)

    def test_compiles_whole(self):
        case = differentiable(rounded(make(1, 40, 20, 4), torch.float32))
        mask, cu_seqlens = torch.rand(1, 40) > 0.2, torch.tensor([0, 40])

        def call(arguments):
            y, h = run(arguments, "auto", delta_softplus=True, mask=mask, cu_seqlens=cu_seqlens)
            return y.sin(), h

        want = grads_of(case, *call(case))
        got = grads_of(case, *torch.compile(call, fullgraph=True, backend="aot_eager")(case))
        for name, gradient in want.items():
            assert_near(got[name], gradient, torch.float32, name)

    def test_threads_agree(self):
        case = differentiable(rounded(make(1, 200, 300, 16), torch.float32))
        want = grads_of(case, *run(case, "cpu", delta_softplus=True))
        torch.set_num_threads(2)
        got = grads_of(case, *run(case, "cpu", delta_softplus=True))
        for name, gradient in want.items():
            assert_near(got[name], gradient, torch.float32, name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 9)}, r"x: got shape \(2, 9\); takes \[B,T,D\]"),
        ({"x": torch.zeros(2, 9, 5, dtype=torch.int64)}, "x: got torch.int64"),
        ({"delta": torch.zeros(2, 9, 4).double()}, r"delta: got shape \(2, 9, 4\); takes \(2, 9, 5\)"),
        ({"A": torch.zeros(4, 3).double()}, r"A: got shape \(4, 3\)"),
        ({"B": torch.zeros(2, 9, 2, 3).double()}, "B: got 2 groups; takes a count that divides D = 5"),
        ({"C": torch.zeros(2, 9, 4).double()}, "C: got shape"),
        ({"D": torch.zeros(4).double()}, "D: got shape"),
        ({"z": torch.zeros(2, 9, 5, dtype=torch.float16)}, "z: got torch.float16"),
        ({"delta_bias": torch.zeros(2, 5).double()}, "delta_bias: got shape"),
        ({"initial_state": torch.zeros(2, 5, 3)}, "initial_state: got torch.float32; takes torch.float64"),
        ({"initial_state": torch.zeros(1, 5, 3).double()}, "initial_state: got shape"),
        ({"initial_state": torch.zeros(2, 5, 3).half()}, "initial_state: got torch.float16; takes torch.float64$"),
        ({"mask": torch.ones(2, 8, dtype=torch.bool)}, "mask: got shape"),
        ({"cu_seqlens": torch.tensor([0, 9])}, "cu_seqlens: got it with batch 2"),
        ({"backend": "gpu"}, "backend: got 'gpu'"),
        ({"backend": "cpu"}, "backend: got 'cpu', which cannot run this call: .*float64"),
    ],
)
def test_what_is_refused(change, message):
    with pytest.raises((ValueError, TypeError), match=message):
        selective_scan(**{**make(), **change})
