"""Log features streamed by the kernel, against the same call spelt out as a vector decay in float64."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phistate import linear_attention
from phistate.features import FavorPlus
from phistate.ops.backends import native
from tests.conformance import HEADS

pytestmark = pytest.mark.skipif(native.why_not() is not None, reason=f"no native library: {native.why_not()}")
ISAS = native.isas() if native.why_not() is None else []


@pytest.fixture(params=ISAS)
def instruction_set(request):
    native.force_isa(request.param)
    yield request.param
    native.force_isa(None)


def inputs(B, T, heads, D, V, size):
    Hq, Hk, Hv = heads
    return size * torch.randn(B, T, Hq, D), size * torch.randn(B, T, Hk, D), torch.randn(B, T, Hv, V)


def run(phi, q, k, v, **options):
    """The kernel takes over where no gradient is asked for."""
    with torch.no_grad():
        return linear_attention(q, k, v, feature_map=phi, return_state=True, **options)


def assert_agree(phi, q, k, v, size, **options):
    got, state = run(phi, q, k, v, backend="cpu", **options)
    if (warm := options.pop("initial_state", None)) is not None:
        options["initial_state"] = type(warm)(
            **{n: getattr(warm, n).double() for n in ("s", "z", "log_scale") if getattr(warm, n) is not None},
            tokens=warm.tokens,
            fingerprint=warm.fingerprint,
        )
    want, want_state = run(phi, q.double(), k.double(), v.double(), backend="torch", **options)
    # A float32 logarithm of this size has an error of its own, which the exponential makes relative.
    allowed = 1e-5 + 4 * torch.finfo(torch.float32).eps * (size * q.shape[-1]) ** 2
    scale = max(1.0, want.abs().max().item() if want.numel() else 1.0)
    assert bool(torch.isfinite(got).all())
    assert (got - want).abs().max().item() <= allowed * scale if want.numel() else True
    torch.testing.assert_close(state.log_scale.double(), want_state.log_scale, rtol=1e-5, atol=1e-4)
    assert state.tokens.tolist() == want_state.tokens.tolist()
    return got, state


@pytest.mark.usefixtures("instruction_set")
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    T=st.sampled_from([0, 1, 2, 31, 32, 33, 65, 100]),
    features=st.sampled_from([1, 5, 16, 37, 64]),
    V=st.sampled_from([1, 7, 16, 65]),
    heads=st.sampled_from(HEADS),
    size=st.sampled_from([0.1, 1.0, 5.0]),
    masked=st.booleans(),
    warm=st.booleans(),
    normalize=st.booleans(),
)
def test_any_shape(T, features, V, heads, size, masked, warm, normalize):
    size = size if normalize else min(size, 1.0)
    phi = FavorPlus(6, num_features=features, generator=torch.Generator().manual_seed(0))
    q, k, v = inputs(2, T, heads, 6, V, size)
    mask = torch.rand(2, T) > 0.3 if masked else None
    state = None
    if warm:
        _, state = run(phi, *inputs(2, 9, heads, 6, V, size), normalize=normalize, backend="cpu")
    assert_agree(phi, q, k, v, size, normalize=normalize, mask=mask, initial_state=state)


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("rising", [False, True])
def test_maxima_that_rise_far_inside_a_chunk(rising):
    """Features grow by hundreds of nats from token to token: no reference can serve the whole chunk."""
    phi = FavorPlus(6, num_features=20, generator=torch.Generator().manual_seed(0))
    q, k, v = inputs(1, 70, (2, 2, 2), 6, 5, 1.0)
    growth = torch.linspace(1, 40, 70)[:, None, None]
    k = k * (growth if rising else growth.flip(0))
    got, _ = assert_agree(phi, q, k, v, 40.0, normalize=True)
    cut, _ = run(phi, q[:, :17], k[:, :17], v[:, :17], normalize=True, backend="cpu")
    torch.testing.assert_close(got[:, :17], cut, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("instruction_set")
def test_a_huge_key_does_not_reach_back():
    phi = FavorPlus(6, num_features=20, generator=torch.Generator().manual_seed(0))
    q, k, v = inputs(1, 32, (2, 2, 2), 6, 5, 1.0)
    want, _ = run(phi, q, k, v, normalize=True, backend="cpu")
    k[:, 20] *= 1000
    got, _ = run(phi, q, k, v, normalize=True, backend="cpu")
    torch.testing.assert_close(got[:, :20], want[:, :20], rtol=1e-6, atol=1e-6)
    assert not torch.allclose(got[:, 20:], want[:, 20:], atol=1e-3)


@pytest.mark.usefixtures("instruction_set")
def test_packed_and_segments():
    phi = FavorPlus(6, num_features=20, generator=torch.Generator().manual_seed(0))
    q, k, v = inputs(1, 80, (4, 2, 2), 6, 5, 2.0)
    whole, _ = assert_agree(phi, q, k, v, 2.0, normalize=True, cu_seqlens=torch.tensor([0, 0, 33, 34, 80]))
    for a, b in ((0, 33), (33, 34), (34, 80)):
        state, pieces = None, []
        for t in range(a, b):
            o, state = run(phi, q[:, t : t + 1], k[:, t : t + 1], v[:, t : t + 1], normalize=True, initial_state=state)
            pieces.append(o)
        torch.testing.assert_close(torch.cat(pieces, 1), whole[:, a:b], rtol=1e-5, atol=1e-5)


def test_half_precision_values():
    phi = FavorPlus(6, num_features=20, generator=torch.Generator().manual_seed(0))
    q, k, v = inputs(1, 40, (2, 2, 2), 6, 5, 1.0)
    for dtype in (torch.bfloat16, torch.float16):
        got, state = run(phi, q.to(dtype), k.to(dtype), v.to(dtype), normalize=True, backend="cpu")
        want, _ = run(
            phi, q.to(dtype).double(), k.to(dtype).double(), v.to(dtype).double(), normalize=True, backend="torch"
        )
        assert got.dtype == dtype
        assert state.s.dtype == torch.float32
        assert (got.double() - want).abs().max() < 4 * torch.finfo(dtype).eps
