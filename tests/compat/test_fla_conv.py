"""fla's short convolution on a CPU: beside torch's own convolution, sequence by sequence, and its cache of W inputs."""

import importlib

import pytest
import torch
import torch.nn.functional as F

from phistate.compat.fla.modules import conv
from tests.compat.agreement import agree

both = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
D = 6


def filtered(x, weight, bias, state, activation):
    """One sequence ``[T,D]`` and its last W inputs, by torch's convolution."""
    width = weight.shape[1]
    past = x.new_zeros(D, width) if state is None else state
    series = torch.cat([past, x.T], 1)
    y = F.conv1d(series[:, 1:], weight[:, None], bias, groups=D).T if len(x) else x
    return F.silu(y) if activation else y, series[:, -width:]


def sequences(x, weight, bias, residual, state, activation, bounds=None):
    """Every sequence of a batch, or of its one row where there are ``bounds``."""
    rows = list(x) if bounds is None else x[0].split(bounds)
    parts = [filtered(row, weight, bias, None if state is None else state[n], activation) for n, row in enumerate(rows)]
    y = torch.stack([p[0] for p in parts]) if bounds is None else torch.cat([p[0] for p in parts])[None]
    return y if residual is None else y + residual, torch.stack([p[1] for p in parts])


@both
@pytest.mark.parametrize("width", [1, 2, 4, 8, 10])
@pytest.mark.parametrize("activation", [None, "silu", "swish"])
@pytest.mark.parametrize("length", [1, 2, 9])
def test_batch(dtype, width, activation, length):
    x, residual = torch.randn(2, 2, length, D)
    weight, bias, state = torch.randn(D, width), torch.randn(D), torch.randn(2, D, width)

    def ours(x, weight, bias, residual, state):
        return conv.causal_conv1d(x, weight, bias, residual, state, True, activation)

    def reference(x, weight, bias, residual, state):
        return sequences(x, weight, bias, residual, state, activation)

    agree(ours, reference, x, weight, bias, residual, state, dtype=dtype)
    agree(ours, reference, x, weight, None, None, None, dtype=dtype)


@both
@pytest.mark.parametrize("width", [1, 4, 9])
@pytest.mark.parametrize("bounds", [[3, 0, 9, 1, 2], [5], [0, 4, 0]])
def test_packed(dtype, width, bounds):
    x, residual = torch.randn(2, 1, sum(bounds), D)
    cu = F.pad(torch.tensor(bounds).cumsum(0), (1, 0)).int()
    weight, bias, state = torch.randn(D, width), torch.randn(D), torch.randn(len(bounds), D, width)

    def ours(x, weight, bias, residual, state, **more):
        return conv.causal_conv1d(x, weight, bias, residual, state, True, "silu", cu_seqlens=cu, **more)

    def reference(x, weight, bias, residual, state):
        return sequences(x, weight, bias, residual, state, True, bounds)

    agree(ours, reference, x, weight, bias, residual, state, dtype=dtype)
    agree(ours, reference, x, weight, bias, None, None, dtype=dtype)
    given = (x, weight, bias, residual, state)
    for a, b in zip(ours(*given), ours(*given, cu_seqlens_cpu=cu.long(), chunk_indices=cu), strict=True):
        assert torch.equal(a, b)


def test_no_token_at_all():
    state = torch.randn(2, D, 4)
    y, last = conv.causal_conv1d(torch.zeros(2, 0, D), torch.randn(D, 4), None, None, state, True)
    assert y.shape == (2, 0, D)
    assert torch.equal(last, state)
    cu = torch.zeros(3, dtype=torch.int64)
    _, last = conv.causal_conv1d(torch.zeros(1, 0, D), torch.randn(D, 4), None, None, state, True, cu_seqlens=cu)
    assert torch.equal(last, state)


def test_heads_are_filtered_as_one_row_of_channels():
    x, residual = torch.randn(2, 2, 5, 3, 2)
    weight = torch.randn(D, 4)
    y, last = conv.causal_conv1d(x, weight, residual=residual, output_final_state=True)
    flat, same = conv.causal_conv1d(x.flatten(2), weight, residual=residual.flatten(2), output_final_state=True)
    assert torch.equal(y.flatten(2), flat)
    assert torch.equal(last, same)


def test_numbered_sequences():
    x, weight = torch.randn(1, 7, D), torch.randn(D, 4)
    numbers = torch.tensor([[0, 0, 0, 1, 1, 2, 2]])
    y, _ = conv.causal_conv1d(x, weight, activation="silu", backend="mix", seq_idx=numbers)
    same, _ = conv.causal_conv1d(x, weight, activation="silu", cu_seqlens=torch.tensor([0, 3, 5, 7]))
    assert torch.equal(y, same)


def test_the_state_is_no_view_of_the_inputs():
    x = torch.randn(2, 9, D)
    _, last = conv.causal_conv1d(x, torch.randn(D, 4), output_final_state=True)
    before = x.clone()
    last.zero_()
    assert torch.equal(x, before)


@both
@pytest.mark.parametrize("width", [1, 4, 9])
@pytest.mark.parametrize("layout", [(3, D), (3, 1, D), (1, 3, D), (3, 1, 2, D // 2)])
def test_update(dtype, width, layout):
    x, residual = torch.randn(2, *layout).to(dtype)
    weight, bias = torch.randn(D, width).to(dtype), torch.randn(D).to(dtype)
    for cached in (dtype, torch.float32):
        cache = torch.randn(3, D, width).to(dtype).to(cached)
        rows = (x.view(3, 1, D), weight, bias, residual.view(3, 1, D), cache.clone())
        wanted, last = conv.causal_conv1d(*rows, True, "silu")
        y, same = conv.causal_conv1d_update(x, cache, residual, weight, bias, "silu")
        assert same is cache
        assert torch.equal(cache.to(dtype), last)
        assert y.dtype == dtype
        assert y.shape == x.shape
        torch.testing.assert_close(y.view(3, 1, D), wanted)


@both
def test_update_is_differentiable_in_the_token(dtype):
    cache = torch.randn(3, D, 4).to(dtype)

    def ours(x, weight, bias, residual):
        return conv.causal_conv1d_update(x, cache.to(x.dtype, copy=True), residual, weight, bias, "silu")[0]

    def reference(x, weight, bias, residual):
        return sequences(x[:, None], weight, bias, None, cache.to(x.dtype), True)[0][:, 0] + residual

    agree(ours, reference, torch.randn(3, D), torch.randn(D, 4), torch.randn(D), torch.randn(3, D), dtype=dtype)


def test_update_moves_the_cache_where_a_gradient_is_recorded():
    cache, x = torch.randn(3, D, 4), torch.randn(3, D)
    wanted = torch.cat([cache[..., 1:], x[..., None]], -1)
    conv.causal_conv1d_update(x.requires_grad_(), cache, None, torch.randn(D, 4))
    assert torch.equal(cache, wanted)


def test_update_states():
    x, state = torch.randn(2, 3, D), torch.randn(2, D, 5)
    wanted = torch.cat([state, x.mT], -1)[..., -5:]
    assert torch.equal(conv.causal_conv1d_update_states(x, 5, state), wanted)
    packed = conv.causal_conv1d_update_states(x.view(6, D), 5, state, torch.tensor([0, 3, 6]))
    assert torch.equal(packed, wanted)


def test_mixed_types():
    """A model in bfloat16 whose filters are float32, and the other way round."""
    x, weight = torch.randn(2, 5, D), torch.randn(D, 4)
    y, _ = conv.causal_conv1d(x.bfloat16(), weight, torch.randn(D))
    assert y.dtype == torch.bfloat16
    y, _ = conv.causal_conv1d(x, weight.bfloat16(), torch.randn(D).bfloat16())
    torch.testing.assert_close(y - y, torch.zeros_like(x))
    y, last = conv.causal_conv1d(x, weight, initial_state=torch.randn(2, D, 4).bfloat16(), output_final_state=True)
    assert y.dtype == last.dtype == torch.float32


def test_refuses():
    x, weight = torch.randn(2, 5, D), torch.randn(D, 4)
    with pytest.raises(ValueError, match="weight: got None"):
        conv.causal_conv1d(x)
    with pytest.raises(ValueError, match="activation: got 'relu'"):
        conv.causal_conv1d(x, weight, activation="relu")
    with pytest.raises(ValueError, match="backend: got 'cudnn'"):
        conv.causal_conv1d(x, weight, backend="cudnn")
    with pytest.raises(ValueError, match="cp_context: got one"):
        conv.causal_conv1d(x, weight, cp_context=object())
    with pytest.raises(TypeError, match="head_first: got an argument"):
        conv.causal_conv1d(x, weight, head_first=True)
    with pytest.raises(ValueError, match=r"initial_state: got shape \(2, 6, 3\); takes \[N,D,W\] = \(2, 6, 4\)"):
        conv.causal_conv1d(x, weight, initial_state=torch.zeros(2, D, 3))
    with pytest.raises(ValueError, match="cache: got None"):
        conv.causal_conv1d_update(x[:, 0], None, None, weight)
    with pytest.raises(ValueError, match="cu_seqlens"):
        conv.causal_conv1d(x, weight, cu_seqlens=torch.tensor([0, 5]))


@pytest.fixture
def short(fla, monkeypatch):
    """fla's own module over our functions."""
    ops = importlib.import_module("fla.modules.causal_conv1d.ops")
    monkeypatch.setattr(ops, "causal_conv1d", conv.causal_conv1d)
    monkeypatch.setattr(ops, "causal_conv1d_update", conv.causal_conv1d_update)
    return ops.ShortConvolution


@pytest.mark.parametrize("bias", [False, True])
def test_flas_module_decodes_what_it_prefills(short, bias):
    module = short(D, 4, bias=bias)
    x, residual = torch.randn(2, 2, 9, D)
    whole, last = module(x, residual, output_final_state=True)
    with torch.no_grad():
        _, cache = module(x[:, :3], residual[:, :3], output_final_state=True)
        for t in range(3, 9):
            y, cache = module(x[:, t : t + 1], residual[:, t : t + 1], cache=cache, output_final_state=True)
            torch.testing.assert_close(y[:, 0], whole[:, t])
    torch.testing.assert_close(cache, last)


def test_flas_module_decodes_packed_sequences(short):
    module = short(D, 4)
    cache = torch.randn(3, D, 4)
    x, cu = torch.randn(1, 3, D), torch.arange(4)
    whole, last = module(x, cache=cache.clone(), output_final_state=True, cu_seqlens=cu)
    with torch.no_grad():
        y, moved = module(x, cache=cache, output_final_state=True, cu_seqlens=cu)
    torch.testing.assert_close(y, whole)
    torch.testing.assert_close(moved, last)
