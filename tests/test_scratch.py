"""Scratch memory: what stands in it before a call must not show, in any kernel, on any instruction set."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import phistate
from phistate import State, linear_attention
from phistate.ops.backends import native
from tests.conformance import DECAYS, HEADS, WRITES, make_case

pytestmark = [
    pytest.mark.skipif(native.why_not() is not None, reason=f"no native library: {native.why_not()}"),
    pytest.mark.usefixtures("instruction_set"),
]

many = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
LENGTHS = st.sampled_from([1, 2, 5, 31, 33, 65, 100, 600])


def assert_same_bits_in_any_scratch(run):
    """``run`` gives tensors; their bits must be the same in scratch of NaN and in what other calls left."""
    results = []
    for poisoned in (True, False):
        native.poison_scratch(poisoned)
        results.append([x.detach().clone() for x in run()])
    native.poison_scratch(True)
    for i, (poisoned, plain) in enumerate(zip(*results, strict=True)):
        assert torch.equal(poisoned.isnan(), plain.isnan()), f"result {i}"
        assert torch.equal(poisoned.nan_to_num(), plain.nan_to_num()), f"result {i}"
        assert not plain.isnan().any(), f"result {i}"


def with_gradients(results, tensors):
    """The results and the gradients of a sum over them."""
    wanted = [x for x in tensors if x is not None and x.requires_grad]
    results = [x for x in results if x is not None]
    loss = sum((x.float() * torch.linspace(-1, 1, x.numel()).view(x.shape)).sum() for x in results)
    return [*results, *torch.autograd.grad(loss, wanted)]


def learnable(tensors, dtype):
    return {n: x if x is None else x.to(dtype).requires_grad_() for n, x in tensors.items()}


@many
@given(
    T=LENGTHS,
    K=st.sampled_from([1, 3, 8, 16, 17, 24, 33]),
    V=st.sampled_from([1, 7, 16, 33, 65]),
    heads=st.sampled_from(HEADS),
    decay=st.sampled_from(DECAYS),
    write=st.sampled_from(WRITES),
    normalize=st.booleans(),
    masked=st.booleans(),
    packed=st.booleans(),
    started=st.booleans(),
    dtype=DTYPES,
)
def test_linear_attention(T, K, V, heads, decay, write, normalize, masked, packed, started, dtype):
    case = make_case(decay, write, normalize, B=1, T=T, heads=heads, K=K, V=V, strong=0.1)
    tensors = learnable(case.tensors, dtype)
    mask = torch.arange(T)[None] % 3 != 1 if masked else None
    cuts = [0, T // 3, T // 3, T] if packed else [0, T]
    sequences, Hs = len(cuts) - 1, max(heads[1:])
    state = None
    if started:
        z = torch.rand(sequences, Hs, K) if normalize else None
        state = State(s=torch.rand(sequences, Hs, K, V), z=z, tokens=torch.zeros(sequences, dtype=torch.int64))

    def run():
        o, end = linear_attention(
            **tensors,
            **case.options,
            mask=mask,
            cu_seqlens=torch.tensor(cuts) if packed else None,
            initial_state=state,
            return_state=True,
            backend="cpu",
        )
        return with_gradients([o, end.s, end.z], tensors.values())

    assert_same_bits_in_any_scratch(run)


@many
@given(
    T=LENGTHS,
    K=st.sampled_from([1, 8, 17, 33]),
    heads=st.sampled_from(HEADS),
    name=st.sampled_from(["elu", "relu", "favor+"]),
    normalize=st.booleans(),
    causal=st.booleans(),
    learns=st.booleans(),
)
def test_feature_maps(T, K, heads, name, normalize, causal, learns):
    phi = phistate.feature_map(name, head_dim=K, **({"num_features": 20} if name == "favor+" else {}))
    q, k, v = (torch.randn(1, T, h, n, requires_grad=learns) for h, n in zip(heads, (K, K, 9), strict=True))

    def run():
        o, end = linear_attention(
            q, k, v, feature_map=phi, normalize=normalize, causal=causal, return_state=True, backend="cpu"
        )
        results = [o, end.s, end.z, None if end.log_scale is None else end.log_scale.exp()]
        return with_gradients(results[:3], (q, k, v)) if learns else [x for x in results if x is not None]

    assert_same_bits_in_any_scratch(run)


@many
@given(
    T=LENGTHS,
    D=st.sampled_from([4, 12, 36]),
    N=st.sampled_from([1, 5, 16]),
    groups=st.sampled_from([1, 2]),
    masked=st.booleans(),
    packed=st.booleans(),
    whole=st.booleans(),
    dtype=DTYPES,
)
def test_selective_scan(T, D, N, groups, masked, packed, whole, dtype):
    tensors = learnable(
        {
            "x": torch.randn(1, T, D),
            "delta": torch.rand(1, T, D),
            "A": -torch.rand(D, N),
            "B": torch.randn(1, T, groups, N),
            "C": torch.randn(1, T, groups, N),
            "D": torch.randn(D) if whole else None,
            "z": torch.randn(1, T, D) if whole else None,
            "delta_bias": torch.rand(D) if whole else None,
        },
        dtype,
    )
    options = {
        "mask": torch.arange(T)[None] % 3 != 1 if masked else None,
        "cu_seqlens": torch.tensor([0, T // 3, T // 3, T]) if packed else None,
    }

    def run():
        y = phistate.selective_scan(**tensors, **options, delta_softplus=whole, return_state=True, backend="cpu")
        return with_gradients(y, tensors.values())

    assert_same_bits_in_any_scratch(run)


@many
@given(
    T=LENGTHS,
    C=st.sampled_from([1, 5, 16, 33]),
    width=st.sampled_from([2, 4, 8]),
    masked=st.booleans(),
    packed=st.booleans(),
    turned=st.booleans(),
    dtype=DTYPES,
)
def test_causal_conv1d(T, C, width, masked, packed, turned, dtype):
    x = torch.randn(1, T, C)
    x = x.mT.contiguous().mT if turned else x
    tensors = learnable({"x": x, "weight": torch.randn(C, width), "bias": torch.randn(C)}, dtype)
    options = {
        "mask": torch.arange(T)[None] % 3 != 1 if masked else None,
        "cu_seqlens": torch.tensor([0, T // 3, T // 3, T]) if packed else None,
        "activation": "silu",
    }

    def run():
        y = phistate.causal_conv1d(**tensors, **options, return_state=True, backend="cpu")
        return with_gradients(y, tensors.values())

    assert_same_bits_in_any_scratch(run)


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_step_of_linear_attention(write, decay, normalize, heads):
    case = make_case(decay, write, normalize, T=1, heads=heads, K=19, V=37).to(torch.float32)
    Hs = max(heads[1:])
    s, z = torch.rand(2, Hs, 19, 37), torch.rand(2, Hs, 19) if normalize else None

    def run():
        state = State(s=s, z=z, tokens=torch.zeros(2, dtype=torch.int64)).fork()
        options = {n: x for n, x in case.options.items() if n != "normalize"}
        o = phistate.linear_attention_step_(state, **case.tensors, **options, backend="cpu")
        return [x for x in (o, state.s, state.z) if x is not None]

    assert_same_bits_in_any_scratch(run)


@pytest.mark.parametrize("D", [3, 40])
def test_steps_of_scan_and_convolution(D):
    x, delta, A, h = torch.randn(2, D), torch.rand(2, D), -torch.rand(D, 5), torch.randn(2, D, 5)
    B, C, weight, past = torch.randn(2, 5), torch.randn(2, 5), torch.randn(D, 4), torch.randn(2, D, 3)

    def run():
        state, kept = h.clone(), past.clone()
        y = phistate.selective_scan_step_(state, x, delta, A, B, C, backend="cpu")
        return [y, state, phistate.causal_conv1d_step_(kept, x, weight, backend="cpu"), kept]

    assert_same_bits_in_any_scratch(run)


@pytest.mark.parametrize("K", [17, 24])
def test_a_call_that_met_a_nan_spoils_no_later_one(K):
    native.poison_scratch(False)
    bad = make_case("scalar", "delta", B=1, T=512, heads=(1, 1, 1), K=128, V=128).to(torch.float32)
    bad.tensors["v"][:, 5] = float("nan")
    good = make_case("scalar", "delta", B=1, T=100, heads=(1, 1, 1), K=K, V=16).to(torch.float32)
    for case, clean in ((bad, False), (good, True)):
        tensors = learnable(case.tensors, torch.float32)
        o = linear_attention(**tensors, **case.options, backend="cpu")
        grads = torch.autograd.grad(o.sum(), tensors.values())
        assert all(bool(x.isfinite().all()) for x in (o, *grads)) == clean


@pytest.mark.parametrize("size", [1, 100, 2**18, 2**21])
def test_poison_reaches_all_that_is_given_out(size):
    """A switch that does nothing would let every test here pass: the probe reads back what it was given."""
    found = torch.zeros(size)
    library = native.library()
    for poisoned in (True, False):
        native.poison_scratch(poisoned)
        library.phistate_probe_scratch(size, found.data_ptr())
        assert bool(found.isnan().all()) == poisoned
        found.zero_()
