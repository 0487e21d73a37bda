"""Softmax attention against the kernel smoother it is."""

import pytest
import torch
from torch import Tensor

from phistate import softmax_attention


def smoother(q, k, v, *, scale=None, causal=True, window=None, sinks=0, mask=None) -> Tensor:
    """The parallel twin: Nadaraya–Watson, o_i = Σ_j κ_ij v_j / Σ_j κ_ij with κ the exponential kernel, term by term."""
    groups = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    kernel = torch.exp((q.shape[-1] ** -0.5 if scale is None else scale) * torch.einsum("bihd,bjhd->bhij", q, k))
    i = torch.arange(k.shape[1] - q.shape[1], k.shape[1])[:, None]
    j = torch.arange(k.shape[1])
    if causal:
        kernel = kernel * (j <= i)
    if window is not None:
        kernel = kernel * ((i - j < window) | (j < sinks))
    if mask is not None:
        kernel = kernel * mask[:, None, None]
    total = kernel.sum(-1, keepdim=True)
    weights = torch.where(total > 0, kernel / total.clamp(min=torch.finfo(total.dtype).tiny), 0.0)
    return torch.einsum("bhij,bjhv->bihv", weights, v)


def inputs(Tq=30, Tk=30, heads=4, keys=2):
    shapes = ((2, Tq, heads, 8), (2, Tk, keys, 8), (2, Tk, keys, 5))
    return [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False},
        {"scale": 0.9},
        {"window": 1},
        {"window": 4},
        {"window": 7, "sinks": 3},
        {"window": 7, "sinks": 9},
        {"window": 14, "sinks": 40},
        {"window": 29},
        {"window": 100, "sinks": 2},
    ],
    ids=str,
)
def test_is_the_smoother(options, masked):
    tensors = inputs()
    mask = torch.rand(2, 30) > 0.4 if masked else None
    got, want = (attend(*tensors, mask=mask, **options) for attend in (softmax_attention, smoother))
    torch.testing.assert_close(got, want)
    for a, b in zip(*(torch.autograd.grad(o.cos().sum(), tensors) for o in (got, want)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("options", [{}, {"window": 4, "sinks": 2}, {"causal": False}], ids=str)
@pytest.mark.parametrize("Tq", [0, 1, 5])
def test_a_cached_continuation(options, Tq):
    tensors = inputs(Tq=Tq)
    torch.testing.assert_close(softmax_attention(*tensors, **options), smoother(*tensors, **options))


def test_a_row_that_sees_nothing_is_zero():
    q, k, v = inputs()
    mask = torch.zeros(2, 30, dtype=torch.bool)
    for options in ({}, {"window": 4}, {"window": 4, "sinks": 1}):
        assert not softmax_attention(q, k, v, mask=mask, **options).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window: got 0"),
        ({"sinks": 4}, "sinks: got 4 without a window"),
        ({"window": 3, "sinks": -1}, "sinks: got -1"),
        ({"window": 3, "causal": False}, "window: got one with causal=False"),
        ({"mask": torch.ones(2, 7, dtype=torch.bool)}, "mask: got shape"),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(ValueError, match=message):
        softmax_attention(*inputs(), **options)


def test_bad_shapes():
    q, k, v = inputs()
    with pytest.raises(ValueError, match="k: got 2 heads"):
        softmax_attention(q[:, :, :3], k, v)
    with pytest.raises(ValueError, match="v: got 1 heads"):
        softmax_attention(q, k, v[:, :, :1])
    with pytest.raises(ValueError, match="q: got length 30; takes at most"):
        softmax_attention(q, k[:, :10], v[:, :10])
