"""Derivatives beyond the kernels' own: second order, forward mode, torch.func. Right, or refused by name."""

import copy

import pytest
import torch
from torch.autograd import forward_ad

import phistate
from phistate import State, linear_attention
from phistate.compat.diagonal import diagonal_scan
from phistate.ops.backends import native
from tests.conformance import EVERY_MIXER, make_case

pytestmark = [
    pytest.mark.skipif(native.why_not() is not None, reason=f"no native library: {native.why_not()}"),
    # torch's own, from its first forward-mode derivative.
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
]


def attend(case, *tensors, backend="auto", **more):
    """o, s and z for the tensors of a case in its own order."""
    given = iter(tensors)
    arguments = {n: x if x is None else next(given) for n, x in case.tensors.items()}
    o, state = linear_attention(**arguments, **case.options, **more, backend=backend, return_state=True)
    return tuple(x for x in (o, state.s, state.z) if x is not None)


def selective(backend="auto"):
    """The scan with everything it takes, and tensors for it."""
    x, delta, z = torch.randn(1, 7, 4), torch.rand(1, 7, 4), torch.randn(1, 7, 4)
    A, D, bias = -torch.rand(4, 3), torch.randn(4), torch.rand(4)
    B, C = torch.randn(2, 1, 7, 2, 3).unbind()
    h = torch.randn(1, 4, 3)

    def run(x, delta, A, B, C, D, z, bias, h):
        return phistate.selective_scan(
            x, delta, A, B, C, D, z, bias, delta_softplus=True, initial_state=h, return_state=True, backend=backend
        )

    return run, (x, delta, A, B, C, D, z, bias, h)


def mamba2(backend="auto"):
    x, dt, z = torch.randn(1, 7, 4, 3), torch.rand(1, 7, 4), torch.randn(1, 7, 4, 3)
    A, D, bias = -torch.rand(4), torch.randn(4), torch.rand(4)
    B, C = torch.randn(2, 1, 7, 2, 5).unbind()

    def run(x, dt, A, B, C, D, z, bias):
        y, state = phistate.mamba2_scan(
            x, dt, A, B, C, D, z, bias, dt_softplus=True, return_state=True, backend=backend
        )
        return y, state.s

    return run, (x, dt, A, B, C, D, z, bias)


def convolution(backend="auto"):
    def run(x, weight, bias, past):
        return phistate.causal_conv1d(
            x, weight, bias, activation="silu", initial_state=past, return_state=True, backend=backend
        )

    return run, (torch.randn(1, 7, 4), torch.randn(4, 3), torch.randn(4), torch.randn(1, 4, 2))


def mapped(name, **options):
    def build(backend="auto"):
        phi = phistate.feature_map(name, head_dim=4, **options)
        maps = {torch.float32: phi, torch.float64: copy.deepcopy(phi).double()}

        def run(q, k, v):
            o, state = linear_attention(
                q, k, v, feature_map=maps[q.dtype], normalize=True, return_state=True, backend=backend
            )
            return o, state.s, state.z

        return run, torch.randn(3, 1, 7, 2, 4).unbind()

    return build


def mixer(decay, write, normalize):
    def build(backend="auto"):
        case = make_case(decay, write, normalize, B=1, T=7, heads=(4, 1, 2), K=3, V=2).to(torch.float32)
        given = [x for x in case.tensors.values() if x is not None]
        return lambda *tensors: attend(case, *tensors, backend=backend), given

    return build


OPERATORS = {
    "selective_scan": selective,
    "mamba2_scan": mamba2,
    "causal_conv1d": convolution,
    "elu": mapped("elu"),
    "relu": mapped("relu"),
    "favor+": mapped("favor+", num_features=12),
    **{parameter.id: mixer(*parameter.values) for parameter in EVERY_MIXER},
}

every_operator = pytest.mark.parametrize("build", list(OPERATORS.values()), ids=list(OPERATORS))


def wide(tensors):
    return [x.double() for x in tensors]


def loss(outputs):
    return sum((x.double().square() * torch.linspace(0.5, 1, x.numel()).view(x.shape)).sum() for x in outputs)


def near(got, want, what):
    assert got is not None, f"{what}: missing"
    size = max(want.abs().max().item(), 1e-2)
    error = (got.double() - want).abs().max().item()
    assert error < 5e-5 * size, f"{what}: error {error:.2e} at size {size:.2e}"


@every_operator
def test_second_derivatives(build):
    """A gradient penalty: the gradient of ‖gradient‖², with respect to everything that enters."""

    def penalty(run, tensors):
        tensors = [x.detach().requires_grad_() for x in tensors]
        first = torch.autograd.grad(loss(run(*tensors)), tensors, create_graph=True)
        return torch.autograd.grad(sum(g.double().square().sum() for g in first), tensors)

    run, tensors = build()
    for i, (got, want) in enumerate(zip(penalty(run, tensors), penalty(run, wide(tensors)), strict=True)):
        near(got, want, f"input {i}")


@every_operator
def test_one_input_made_from_another(build):
    """The gradient of one argument alone must not run through another that depends on it, at any order."""

    def penalty(run, tensors):
        t = torch.ones((), dtype=tensors[0].dtype, requires_grad=True)
        (first,) = torch.autograd.grad(loss(run(*(x * t for x in tensors))), t, create_graph=True)
        return torch.autograd.grad(first, t)[0]

    run, tensors = build()
    near(penalty(run, tensors), penalty(run, wide(tensors)), "d²/dt²")


@every_operator
def test_forward_mode(build):
    run, tensors = build()
    directions = [torch.randn_like(x) for x in tensors]
    want = torch.func.jvp(run, tuple(wide(tensors)), tuple(wide(directions)))[1]
    got = torch.func.jvp(run, tuple(tensors), tuple(directions))[1]
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        near(a, b, f"tangent {i}")
        assert b.any()
    with forward_ad.dual_level():
        dual = [forward_ad.make_dual(x, t) for x, t in zip(tensors, directions, strict=True)]
        for i, (o, b) in enumerate(zip(run(*dual), want, strict=True)):
            near(forward_ad.unpack_dual(o).tangent, b, f"tangent {i}")


@every_operator
def test_torch_func_grad(build):
    run, tensors = build()
    every = tuple(range(len(tensors)))
    got = torch.func.grad(lambda *x: loss(run(*x)), argnums=every)(*tensors)
    want = torch.func.grad(lambda *x: loss(run(*x)), argnums=every)(*wide(tensors))
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        near(a, b, f"gradient {i}")


@every_operator
def test_vmap_over_each_input(build):
    run, tensors = build()
    for i, x in enumerate(tensors):
        several = torch.stack([x, 0.5 * x, 0.25 * x])
        axes = tuple(0 if i == j else None for j in range(len(tensors)))
        got = torch.vmap(run, in_dims=axes)(*tensors[:i], several, *tensors[i + 1 :])
        for n in range(3):
            want = run(*wide(tensors[:i]), several[n].double(), *wide(tensors[i + 1 :]))
            for a, b in zip(got, want, strict=True):
                near(a[n], b, f"input {i}, row {n}")


def test_per_sample_gradients():
    """vmap of grad: what differential privacy and influence functions ask for."""
    run, tensors = OPERATORS["scalar-delta-plain"]()
    batch = [torch.stack([x, 0.5 * x]) for x in tensors]
    got = torch.vmap(torch.func.grad(lambda *x: loss(run(*x))))(*batch)
    for n in range(2):
        near(got[n], torch.func.grad(lambda *x: loss(run(*x)))(*wide([x[n] for x in batch])), f"sample {n}")


@pytest.mark.parametrize("transform", ["jvp", "grad", "vmap"])
@every_operator
def test_a_forced_backend_says_why_not(build, transform):
    run, tensors = build(backend="cpu")
    transforms = {
        "jvp": lambda: torch.func.jvp(run, tuple(tensors), tuple(tensors)),
        "grad": lambda: torch.func.grad(lambda *x: loss(run(*x)))(*tensors),
        "vmap": lambda: torch.vmap(run)(*(x.unsqueeze(0) for x in tensors)),
    }
    with pytest.raises(ValueError, match=r"backend: got 'cpu'.*torch\.func"):
        transforms[transform]()


def test_compiled_forward_mode():
    """A transform inside compiled code is seen while it is traced."""
    run, tensors = OPERATORS["scalar-add-plain"]()

    def tangents(*x):
        return torch.func.jvp(run, x, x)[1]

    got = torch.compile(tangents, fullgraph=True, backend="aot_eager")(*tensors)
    for a, b in zip(got, tangents(*wide(tensors)), strict=True):
        near(a, b, "tangent")


def test_steps_lose_no_tangent():
    """A step in place records no gradient, in forward mode no more than in reverse."""
    x, weight = torch.randn(1, 4), torch.randn(4, 3)
    state = State(s=torch.zeros(1, 2, 3, 3), tokens=torch.zeros(1, dtype=torch.int64))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x)
        with pytest.raises(ValueError, match="gradient"):
            phistate.causal_conv1d_step_(torch.zeros(1, 4, 2), dual, weight)
        with pytest.raises(ValueError, match="gradient"):
            phistate.selective_scan_step_(torch.zeros(1, 4, 3), dual, x, -weight.abs(), weight[:1], weight[:1])
        with pytest.raises(ValueError, match="gradient"):
            phistate.mamba2_step_(
                torch.zeros(1, 1, 4, 3), dual.unsqueeze(1), x[:, :1], x[0, :1], weight[:1, None], weight[:1, None]
            )
        q = forward_ad.make_dual(torch.randn(1, 1, 2, 3), torch.randn(1, 1, 2, 3))
        with pytest.raises(ValueError, match="gradient"):
            phistate.linear_attention_step_(state, q, q, q)
        plain = torch.randn(1, 1, 2, 3)
        with pytest.raises(ValueError, match="gradient"):
            phistate.linear_attention_step_(state, plain, plain, plain, write="delta", erase=q)
    assert not state.s.any()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("write", ["delta", "erase"])
def test_second_derivatives_of_masked_and_packed(masked, packed, write):
    case = make_case("scalar", write, True, B=1, T=70, heads=(2, 2, 2), K=4, V=3, strong=0.1).to(torch.float32)
    more = {}
    if masked:
        more["mask"] = torch.arange(70)[None] % 4 != 2
    if packed:
        more["cu_seqlens"] = torch.tensor([0, 3, 3, 40, 70])

    def penalty(tensors):
        tensors = [x.detach().requires_grad_() for x in tensors]
        first = torch.autograd.grad(loss(attend(case, *tensors, **more)), tensors, create_graph=True)
        return torch.autograd.grad(sum(g.double().square().sum() for g in first), tensors)

    tensors = list(case.tensors.values())
    for i, (got, want) in enumerate(zip(penalty(tensors), penalty(wide(tensors)), strict=True)):
        near(got, want, f"input {i}")


def test_a_diagonal_recurrence():
    """RecurrentGemma's, whose derivatives are itself again; a reset (a = 0) is no exception."""

    def exact(a, x, h):
        rows = []
        for t in range(x.shape[1]):
            h = a[:, t] * h + x[:, t]
            rows.append(h)
        return torch.stack(rows, 1), h

    a, x, h = torch.rand(2, 9, 3), torch.randn(2, 9, 3), torch.randn(2, 3)
    a[:, 4] = 0.0
    a[:, 6] = 1.0
    given = (a, x, h)

    def penalty(run, tensors):
        tensors = [t.detach().requires_grad_() for t in tensors]
        first = torch.autograd.grad(loss(run(*tensors)), tensors, create_graph=True)
        return torch.autograd.grad(sum(g.double().square().sum() for g in first), tensors)

    for transform in (
        penalty,
        lambda run, t: torch.func.jvp(run, tuple(t), tuple(t))[1],
        lambda run, t: torch.func.grad(lambda *t: loss(run(*t)), argnums=(0, 1, 2))(*t),
        lambda run, t: torch.vmap(run)(*(s.unsqueeze(1) for s in t)),
    ):
        for got, want in zip(transform(diagonal_scan, given), transform(exact, wide(given)), strict=True):
            near(got, want, "derivative")
