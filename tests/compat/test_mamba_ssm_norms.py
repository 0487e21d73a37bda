"""mamba_ssm's norms against what it says they compute."""

import pytest
import torch

from phistate.compat.mamba_ssm import gated, norms
from tests.compat import oracles
from tests.compat.oracles import leaves, same, same_gradients


@pytest.mark.parametrize("rms", [True, False])
@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize("before_gate", [True, False])
@pytest.mark.parametrize("gate", [True, False])
def test_gated_norms(rms, size, before_gate, gate):
    inputs = leaves(
        x=torch.randn(2, 3, 6).double(),
        weight=torch.randn(6).double(),
        bias=torch.randn(6).double(),
        z=torch.randn(2, 3, 6).double() if gate else None,
    )
    got = gated.layernorm_fn(**inputs, eps=1e-3, group_size=size, norm_before_gate=before_gate, is_rms_norm=rms)
    want = oracles.gated_norm(**inputs, eps=1e-3, size=size or 6, before_gate=before_gate, rms=rms)
    same(got, want)
    same_gradients([got], [want], inputs)
    if rms:
        same(gated.rmsnorm_fn(**inputs, eps=1e-3, group_size=size, norm_before_gate=before_gate), want)


@pytest.mark.parametrize("rms", [True, False])
def test_norms_of_a_sum(rms):
    inputs = leaves(
        x=torch.randn(2, 3, 6).double(),
        weight=torch.randn(6).double(),
        bias=torch.randn(6).double(),
        residual=torch.randn(2, 3, 6).double(),
        x1=torch.randn(2, 3, 6).double(),
        weight1=torch.randn(6).double(),
        bias1=torch.randn(6).double(),
    )
    function = norms.rms_norm_fn if rms else norms.layer_norm_fn
    got = function(**inputs, eps=1e-3, prenorm=True)
    total = inputs["x"] + inputs["x1"] + inputs["residual"]
    want = (
        oracles.norm(total, inputs["weight"], inputs["bias"], 1e-3, rms),
        oracles.norm(total, inputs["weight1"], inputs["bias1"], 1e-3, rms),
        total,
    )
    for a, b in zip(got, want, strict=True):
        same(a, b)
    same_gradients(got, want, inputs)


def test_what_a_norm_gives():
    x, ones = torch.randn(2, 3).bfloat16(), torch.ones(3)
    assert norms.rms_norm_fn(x, ones, None).dtype == torch.bfloat16
    y, total = norms.rms_norm_fn(x, ones, None, prenorm=True)
    assert (y.dtype, total.dtype) == (torch.bfloat16, torch.bfloat16)
    assert norms.rms_norm_fn(x, ones, None, prenorm=True, residual_in_fp32=True)[1].dtype == torch.float32
    assert norms.rms_norm_fn(x, ones, None, x.float(), prenorm=True)[1].dtype == torch.float32
    assert norms.rms_norm_fn(x, ones, None, return_dropout_mask=True)[1:] == (None, None)


def test_dropout_and_rowscale_in_a_norm():
    x, scale = torch.randn(50, 8).double(), torch.rand(50).double()
    y, total, mask, _ = norms.layer_norm_fn(
        x, torch.ones(8), None, rowscale=scale, dropout_p=0.25, prenorm=True, return_dropout_mask=True
    )
    same(total, x * scale[:, None] * mask / 0.75)
    same(y, oracles.norm(total, torch.ones(8), None, 1e-6, False))
    assert 0.65 < mask.double().mean() < 0.85
    masks = norms.layer_norm_fn(x, torch.ones(8), None, x1=x, dropout_p=0.25, return_dropout_mask=True)[1:]
    assert not torch.equal(*masks)


def test_norms_as_modules():
    plain, grouped, layer = norms.RMSNorm(6, dropout_p=0.5), gated.RMSNorm(6, group_size=3), gated.LayerNorm(6)
    x, z = torch.randn(2, 6), torch.randn(2, 6)
    ones = torch.ones(6)
    assert [name for name, _ in plain.named_parameters()] == ["weight"]
    assert list(layer.state_dict()) == ["weight", "bias"]
    assert plain.bias is None
    assert grouped.bias is None
    same(grouped(x, z), oracles.gated_norm(x, ones, None, z, 1e-5, 3, True), 1e-6)
    same(layer(x), oracles.norm(x, ones, torch.zeros(6), 1e-5, False), 1e-6)
    same(plain.eval()(x), oracles.norm(x, ones, None, 1e-5, True), 1e-6)
    assert (plain.train()(x) == 0).any()
    y, total = plain.eval()(x, z, prenorm=True)
    same(total, x + z)
    same(y, oracles.norm(x + z, ones, None, 1e-5, True), 1e-6)
