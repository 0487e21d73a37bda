"""The delta kernels where they differ from the op's common invariants: the triangular system, decays, few tokens."""

import pytest
import torch

from phistate import State, linear_attention
from phistate.ops.backends import native
from phistate.ops.backends.cpu import step_
from tests.conformance import assert_near, gradients, make_case, oracle

pytestmark = [
    pytest.mark.skipif(native.why_not() is not None, reason=f"no native library: {native.why_not()}"),
    pytest.mark.usefixtures("instruction_set"),
]


WRITES = ("delta", "erase")
"""By the key itself, and by an erase key."""


def attend(*, s=None, z=None, **arguments):
    initial = None if s is None else State(s=s, z=z, tokens=torch.zeros(s.shape[0], dtype=torch.int64))
    return linear_attention(**arguments, write="delta", initial_state=initial, backend="cpu", return_state=True)


@pytest.mark.parametrize("T", [3, 70])
@pytest.mark.parametrize("write", WRITES)
def test_no_decay_is_a_decay_of_zero(T, write):
    case = make_case("none", write, T=T, K=20, V=20).to(torch.float32)
    want, state = attend(**case.tensors, qk_l2norm=True)
    for shape in ((2,), (2, T, 2), (2, T, 2, 20)):
        got, after = attend(**{**case.tensors, "decay": torch.zeros(shape)}, qk_l2norm=True)
        assert_near(got, want, torch.float32)
        assert_near(after.s, state.s, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("decay", ["none", "vector"])
def test_keys_that_are_not_normalised_stay_finite(dtype, decay):
    # β|k|² ≈ 1.6: the recurrence is stable, while products of keys reach 64 and powers of their matrix overflow.
    case = make_case(decay, "delta", B=1, T=64, heads=(2, 2, 2), K=64, V=64).to(dtype)
    case.tensors["beta"] = torch.full_like(case.tensors["beta"], 0.025)
    options = {"qk_l2norm": False}
    want, want_state = linear_attention(
        **case.to(torch.float64).tensors, **options, write="delta", form="recurrent", return_state=True
    )
    got, state = attend(**case.tensors, **options)
    assert bool(torch.isfinite(got).all())
    assert_near(got, want, dtype)
    assert_near(state.s, want_state.s, torch.float32)


def test_growth_is_the_recurrence_own():
    # β|k|² = 2.5 makes each write overshoot: the state grows 1.5 times a token, by 1e11 in 64.
    k = torch.nn.functional.normalize(torch.randn(1, 1, 1, 16, dtype=torch.float64), dim=-1).expand(1, 64, 1, 16)
    tensors = {"q": k, "k": k, "v": torch.randn(1, 64, 1, 16, dtype=torch.float64)}
    beta = torch.full((1, 64, 1), 2.5, dtype=torch.float64)
    want, _ = linear_attention(**tensors, beta=beta, write="delta", form="recurrent", return_state=True)
    got, _ = attend(**{n: x.float() for n, x in tensors.items()}, beta=beta.float())
    error = (got.double() - want).norm(dim=-1) / want.norm(dim=-1)
    assert error.max() < 1e-4, error.max()


@pytest.mark.parametrize("decay", ["none", "scalar", "vector"])
@pytest.mark.parametrize("T", [1, 40])
@pytest.mark.parametrize("write", WRITES)
def test_more_value_heads_than_key_heads(decay, T, write):
    case = make_case(decay, write, heads=(2, 2, 6), T=T, K=20, V=10).to(torch.float32)
    tensors = {n: x if x is None else x.requires_grad_() for n, x in case.tensors.items()}
    o, state = attend(**tensors, qk_l2norm=True)
    spelled = {n: x.repeat_interleave(3, 2) if n in ("q", "k", "erase") else x for n, x in tensors.items()}
    want, want_state = attend(**spelled, qk_l2norm=True)
    assert_near(o, want, torch.float32)
    assert_near(state.s, want_state.s, torch.float32)
    inputs = [x for x in tensors.values() if x is not None]
    for got, expected in zip(gradients(o, state, inputs), gradients(want, want_state, inputs), strict=True):
        assert_near(got, expected, torch.float32)


@pytest.mark.parametrize("decay", ["scalar", "vector"])
@pytest.mark.parametrize("weak", [-3.0e-8, -1e-12])
@pytest.mark.parametrize("write", WRITES)
def test_rounding_never_makes_a_decay_grow(decay, weak, write):
    # A sum of −1e4 and tiny decays loses them; a difference of two such sums can come out positive.
    case = make_case(decay, write, B=1, T=64, K=20).to(torch.float32)
    case.tensors["decay"] = torch.full_like(case.tensors["decay"], weak)
    case.tensors["decay"][:, ::7] = -1e4
    want, want_state = oracle(case)
    got, state = attend(**case.tensors, qk_l2norm=True)
    assert_near(got, want, torch.float32)
    assert_near(state.s, want_state.s, torch.float32)


@pytest.mark.parametrize("decay", ["head", "scalar", "vector"])
@pytest.mark.parametrize("strong", [60.0, 1e4, 3e37])
@pytest.mark.parametrize("write", WRITES)
def test_strong_decay_forms_no_inverse(decay, strong, write):
    case = make_case(decay, write, B=1, T=64, K=20, strong=strong).to(torch.float32)
    wide = {n: x.double().requires_grad_() for n, x in case.tensors.items()}
    tensors = {n: x.requires_grad_() for n, x in case.tensors.items()}
    want, want_state = linear_attention(
        **wide, write="delta", qk_l2norm=True, form="recurrent", backend="torch", return_state=True
    )
    got, state = attend(**tensors, qk_l2norm=True)
    assert_near(got, want, torch.float32)
    wants = gradients(want, want_state, list(wide.values()))
    for name, a, b in zip(tensors, gradients(got, state, list(tensors.values())), wants, strict=True):
        assert_near(a, b, torch.float32, f"gradient of {name}")


@pytest.mark.parametrize("decay", ["head", "scalar", "vector"])
@pytest.mark.parametrize("write", WRITES)
def test_gradient_of_a_decay_that_passes_little(decay, write):
    # What passes is e⁻¹⁰ of what is there: a difference of running sums would leave only rounding.
    case = make_case(decay, write, B=1, T=40, K=16, V=16)
    case.tensors["decay"] = torch.full_like(case.tensors["decay"], -10.0)
    wide = {n: x.clone().requires_grad_() for n, x in case.tensors.items()}
    tensors = {n: x.float().requires_grad_() for n, x in case.tensors.items()}
    want = torch.autograd.grad(
        linear_attention(**wide, write="delta", qk_l2norm=True, backend="torch").square().sum(), wide["decay"]
    )[0]
    got = torch.autograd.grad(attend(**tensors, qk_l2norm=True)[0].square().sum(), tensors["decay"])[0]
    assert (got.double() - want).abs().max() < 2e-5 * want.abs().max()


@pytest.mark.parametrize(("decay", "normalize"), [("scalar", False), ("vector", True)])
@pytest.mark.parametrize("write", WRITES)
def test_gradients_across_kept_states(decay, normalize, write):
    case = make_case(decay, write, normalize, B=1, T=1100, heads=(1, 1, 2), K=5, V=3, strong=0.05)
    wide = {n: x.requires_grad_() for n, x in case.tensors.items()}
    tensors = {n: x.detach().float().requires_grad_() for n, x in case.tensors.items()}
    bounds = torch.tensor([0, 515, 516, 1100])
    options = {"write": "delta", "normalize": normalize, "qk_l2norm": True, "cu_seqlens": bounds, "return_state": True}
    want, want_state = linear_attention(**wide, **options, backend="torch")
    got, state = linear_attention(**tensors, **options, backend="cpu")
    wants = gradients(want, want_state, list(wide.values()))
    for name, a, b in zip(tensors, gradients(got, state, list(tensors.values())), wants, strict=True):
        assert_near(a, b, torch.float32, f"gradient of {name}")


@pytest.mark.parametrize("decay", ["none", "head", "scalar", "vector"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("V", [3, 64, 100])
@pytest.mark.parametrize("write", WRITES)
def test_steps_in_place_are_the_sequence(decay, normalize, V, write):
    case = make_case(decay, write, normalize, T=9, heads=(4, 2, 2), K=20, V=V).to(torch.float32)
    want, state = attend(**case.tensors, normalize=normalize, qk_l2norm=True)
    s = torch.zeros(2, 2, 20, V)
    z = torch.zeros(2, 2, 20) if normalize else None
    held = s.data_ptr()
    for t in range(9):
        tensors = case.time(slice(t, t + 1)).tensors
        q, k, v = (tensors.pop(n) for n in "qkv")
        o = step_(q, k, v, s, z, **tensors, scale=20**-0.5, write="delta", qk_l2norm=True)
        assert_near(o, want[:, t : t + 1], torch.float32, f"token {t}")
    assert s.data_ptr() == held
    assert_near(s, state.s, torch.float32)
    if z is not None:
        assert_near(z, state.z, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("decay", ["none", "scalar", "vector"])
@pytest.mark.parametrize("write", WRITES)
def test_half_precision_errs_at_most_twice_what_torch_does(dtype, decay, write):
    # Torch in float32 on the same half-precision inputs, its result rounded: the strictest reading of "plain torch".
    case = make_case(decay, write, B=1, T=200, heads=(2, 2, 2), K=64, V=64, strong=0.1).to(dtype)
    want, _ = oracle(case)
    plain = linear_attention(**case.tensors, write="delta", qk_l2norm=True, backend="torch")
    got, _ = attend(**case.tensors, qk_l2norm=True)
    assert (got.double() - want).norm() <= 2 * (plain.double() - want).norm()
    assert (got.double() - want).abs().max() <= 2 * (plain.double() - want).abs().max()


def test_columns_are_shared_out_where_states_are_few():
    case = make_case("scalar", "delta", True, B=1, T=70, heads=(1, 1, 1), K=20, V=150).to(torch.float32)
    want, state = attend(**case.tensors, normalize=True, qk_l2norm=True)
    torch.set_num_threads(2)  # the fixture one_thread puts it back
    got, after = attend(**case.tensors, normalize=True, qk_l2norm=True)
    assert_near(got, want, torch.float32)
    assert_near(after.s, state.s, torch.float32)
    assert_near(after.z, state.z, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("decay", ["none", "head", "scalar", "vector"])
@pytest.mark.parametrize("T", [1, 75])
def test_to_erase_by_the_key_is_the_delta_write_bit_by_bit(dtype, decay, T):
    case = make_case(decay, "delta", T=T, heads=(2, 2, 4), K=20, V=21, strong=0.1).to(dtype)
    case.tensors["k"] = torch.nn.functional.normalize(case.tensors["k"], dim=-1)
    want, want_state = attend(**case.tensors)
    got, state = attend(**case.tensors, erase=case.tensors["k"].clone())
    assert torch.equal(got, want)
    assert torch.equal(state.s, want_state.s)


@pytest.mark.parametrize("decay", ["none", "vector"])
@pytest.mark.parametrize("T", [1, 40])
def test_erase_keys_may_be_wide(decay, T):
    case = make_case(decay, "erase", T=T, heads=(4, 1, 2), K=20, V=21, strong=0.1)
    given = case.to(torch.bfloat16).with_(erase=case.tensors["erase"].float().requires_grad_()).tensors
    wide = {n: x if x is None else x.detach().double() for n, x in given.items()}
    wide["erase"].requires_grad_()
    got, state = attend(**given, qk_l2norm=True)
    want, want_state = linear_attention(**wide, write="delta", qk_l2norm=True, return_state=True)
    assert_near(state.s, want_state.s, torch.float32)
    (a,), (b,) = gradients(got, state, [given["erase"]]), gradients(want, want_state, [wide["erase"]])
    assert a.dtype == torch.float32
    assert_near(a, b, torch.bfloat16)


def test_erase_keys_of_any_strides():
    case = make_case("scalar", "erase", T=40, K=20, V=21, strong=0.1).to(torch.float32)
    erase = case.tensors["erase"]
    want, _ = attend(**case.tensors, qk_l2norm=True)
    for view in (
        erase.mT.contiguous().mT,
        torch.stack([erase, erase], -1)[..., 0],
        torch.stack([erase] * 2, 2)[:, :, 1],
    ):
        given = view.detach().requires_grad_()
        got, _ = attend(**{**case.tensors, "erase": given}, qk_l2norm=True)
        assert torch.equal(got, want)
        assert torch.autograd.grad(got.sum(), given)[0].shape == erase.shape
    row = erase[:1, :1]
    want, _ = attend(**{**case.tensors, "erase": row.expand_as(erase).contiguous()}, qk_l2norm=True)
    assert torch.equal(attend(**{**case.tensors, "erase": row.expand_as(erase)}, qk_l2norm=True)[0], want)
