"""Decays near zero over long sequences: what one rounding does must not be done a million times."""

import math

import pytest
import torch

from phistate import linear_attention, mamba2_scan, selective_scan
from phistate.ops.backends import native

pytestmark = [
    pytest.mark.skipif(native.why_not() is not None, reason=f"no native library: {native.why_not()}"),
    pytest.mark.usefixtures("instruction_set"),
]

ALLOWED = 3e-5
KINDS = ("head", "scalar", "vector")
LENGTHS = [(10**4, -1e-7), (10**5, -1e-6), (10**6, -1e-6)]


def decays(kind: str, value: float, T: int, K: int) -> torch.Tensor:
    shape = {"head": (1,), "scalar": (1, T, 1), "vector": (1, T, 1, K)}[kind]
    return torch.full(shape, value)


@pytest.mark.parametrize("T, value", LENGTHS)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_sum_that_hardly_forgets(kind, threads, T, value):
    """q = k = v = 1: the state is Σ_t exp(t d), and what v_0 moves of it exp((T − 1) d)."""
    torch.set_num_threads(threads)
    d = torch.tensor(value).double().item()
    one, v = torch.ones(1, T, 1, 1), torch.ones(1, T, 1, 1, requires_grad=True)
    decay = decays(kind, value, T, 1)
    o, state = linear_attention(one, one, v, decay=decay, scale=1.0, return_state=True, backend="cpu")
    (gradient,) = torch.autograd.grad(state.s.sum(), v)
    want = math.expm1(d * T) / math.expm1(d)
    assert state.s.item() == pytest.approx(want, rel=ALLOWED)
    assert o[0, -1].item() == pytest.approx(want, rel=ALLOWED)
    assert gradient[0, 0].item() == pytest.approx(math.exp(d * (T - 1)), rel=ALLOWED)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("erases", [False, True])
def test_a_binding_that_nothing_overwrites(kind, erases):
    """Delta writes along another key leave the first value exp((T − 1) d) of itself, forward and backward.

    With erase keys the other writes are small, and each erases by a whole key what it adds to.
    """
    T, value = 10**6, -1e-6
    k = torch.zeros(1, T, 1, 2)
    k[:, 0, :, 0] = k[:, 1:, :, 1] = 1.0
    v = torch.ones(1, T, 1, 1, requires_grad=True)
    erase = None
    if erases:
        k[:, 1:] *= 1e-3
        erase = torch.zeros_like(k)
        erase[..., 1] = 1.0
    beta = torch.ones(1, T, 1)
    decay = decays(kind, value, T, 2)
    options = {"write": "delta", "erase": erase, "scale": 1.0, "return_state": True, "backend": "cpu"}
    state = linear_attention(k, k, v, decay=decay, beta=beta, **options)[1]
    (gradient,) = torch.autograd.grad(state.s[0, 0, 0, 0], v)
    want = math.exp(torch.tensor(value).double().item() * (T - 1))
    assert state.s[0, 0, 0, 0].item() == pytest.approx(want, rel=ALLOWED)
    assert gradient[0, 0].item() == pytest.approx(want, rel=ALLOWED)


def test_mamba2_that_hardly_forgets():
    T = 10**6
    dt, A = torch.full((1, T, 1), 1e-3), torch.tensor([-1e-3])
    ones = torch.ones(1, T, 1, 1)
    _, state = mamba2_scan(ones, dt, A, ones, ones, return_state=True, backend="cpu")
    step = dt[0, 0, 0].item()
    d = step * A.double().item()
    assert state.s.item() == pytest.approx(step * math.expm1(d * T) / math.expm1(d), rel=ALLOWED)


@pytest.mark.parametrize("kind", ["scalar", "vector"])
@pytest.mark.parametrize("write", ["add", "delta", "erase"])
def test_a_reset_forgets_what_rounding_took(write, kind):
    T = 4096
    q, k, v = torch.randn(3, 1, T, 1, 4).unbind()
    k = k / k.norm(dim=-1, keepdim=True)
    beta = torch.rand(1, T, 1)
    decay = decays(kind, -1e-6, T, 4)
    decay[:, 2048] = float("-inf")
    tensors = {"q": q, "k": k, "v": v, "decay": decay, "beta": beta}
    if write == "erase":
        tensors["erase"] = 0.9 * k + 0.1 * q
    options = {"write": "add" if write == "add" else "delta", "return_state": True, "backend": "cpu"}
    o, state = linear_attention(**tensors, **options)
    part = slice(2048, T)
    want, alone = linear_attention(**{n: x[:, part] for n, x in tensors.items()}, **options)
    torch.testing.assert_close(o[:, part], want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state.s, alone.s, rtol=1e-5, atol=1e-5)


def test_a_scan_that_hardly_forgets():
    """Its state is a sum of float32 token by token, but no factor near 1 is rounded before it multiplies."""
    T = 10**5
    delta, A = torch.full((1, T, 1), 1e-3), torch.tensor([[-1e-3]])
    x, one = torch.full((1, T, 1), 1e3), torch.ones(1, T, 1)
    _, state = selective_scan(x, delta, A, one, one, return_state=True, backend="cpu")
    step = delta[0, 0, 0].double().item()
    d = step * A.double().item()
    assert state.item() == pytest.approx(step * 1e3 * math.expm1(d * T) / math.expm1(d), rel=1.5e-4)
