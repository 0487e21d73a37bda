"""What stands in for fla's modules where it cannot be imported: the same constructors, parameters and values."""

import importlib
import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from phistate.compat.fla import modules
from phistate.compat.fla.modules import blocks, conv, norm_layers, padding
from phistate.compat.fla.modules.layers import STAND_INS
from phistate.compat.functions import signature_of

NAMES = [(module, name) for module, names in STAND_INS.items() for name in names]
CONSTRUCTORS = {
    "GroupNorm": [{"num_groups": 2}, {"num_groups": 2, "is_rms_norm": True, "bias": True}],
    "LayerNorm": [{}, {"bias": True}, {"elementwise_affine": False}],
    "RMSNorm": [{}, {"bias": True}, {"elementwise_affine": False}],
    "FusedLayerNormGated": [{}, {"bias": True, "activation": "sigmoid"}, {"elementwise_affine": False}],
    "FusedRMSNormGated": [{}, {"activation": "sigmoid"}, {"elementwise_affine": False}],
    "FusedLayerNormSwishGate": [{}, {"bias": True}],
    "FusedRMSNormSwishGate": [{}],
}


@pytest.mark.parametrize("module,name", NAMES)
def test_signature(fla, module, name):
    ours, theirs = STAND_INS[module][name], getattr(importlib.import_module(module), name)
    if isinstance(ours, dict):
        assert set(ours) == set(theirs)
    else:
        assert signature_of(ours) == signature_of(theirs)
    if inspect.isclass(ours):
        assert signature_of(ours.forward) == signature_of(theirs.forward)


@pytest.fixture
def installed(fla, monkeypatch):
    """fla's own modules over our functions."""
    for path, names in modules.MODULES.items():
        module = importlib.import_module(path)
        for name, adapter in names.items():
            if "." not in name:
                monkeypatch.setattr(module, name, adapter)
    module = importlib.import_module("fla.modules.fused_cross_entropy.ops")
    monkeypatch.setattr(module.FusedCrossEntropyLoss, "forward", modules.losses.cross_entropy_module)
    for name in ("swiglu", "swiglu_linear", "powglu", "powglu_linear"):
        monkeypatch.setattr(importlib.import_module("fla.modules.mlp"), name, getattr(modules.activations, name))
    return importlib.import_module("fla.modules")


def beside(installed, name, *arguments, **options):
    """One of ours and one of theirs with the same parameters, not those they begin with."""
    ours = STAND_INS["fla.modules"][name](*arguments, **options)
    theirs = getattr(installed, name)(*arguments, **options)
    assert {k: v.shape for k, v in ours.state_dict().items()} == {k: v.shape for k, v in theirs.state_dict().items()}
    if "Norm" in name:
        for key, value in ours.state_dict().items():
            assert torch.equal(value, theirs.state_dict()[key])
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.copy_(torch.randn_like(parameter))
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def assert_same(ours, theirs):
    assert type(ours) is type(theirs)
    if isinstance(ours, tuple):
        for a, b in zip(ours, theirs, strict=True):
            assert_same(a, b)
    elif ours is not None:
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name,options", [(n, o) for n, many in CONSTRUCTORS.items() for o in many])
def test_norms(installed, name, options):
    options = dict(options)
    first = [options.pop("num_groups")] if "num_groups" in options else []
    ours, theirs = beside(installed, name, *first, 8, **options)
    x, g, residual = torch.randn(3, 2, 5, 8)
    inputs = (x, g) if "Gate" in name else (x,)
    assert_same(ours(*inputs), theirs(*inputs))
    assert_same(ours(*inputs, residual, True), theirs(*inputs, residual, True))
    assert_same(
        ours(*(t.bfloat16() for t in inputs), prenorm=True, residual_in_fp32=True),
        theirs(*(t.bfloat16() for t in inputs), prenorm=True, residual_in_fp32=True),
    )


@pytest.mark.parametrize(
    "name,first",
    [
        *(("LayerNormLinear", []), ("RMSNormLinear", []), ("GroupNormLinear", [2])),
        *(("FusedLayerNormSwishGateLinear", []), ("FusedRMSNormSwishGateLinear", [])),
    ],
)
def test_norm_linears(installed, name, first):
    ours, theirs = beside(installed, name, *first, 8)
    x, g, residual = torch.randn(3, 2, 5, 8)
    inputs = (x, g) if "Gate" in name else (x,)
    weight, bias = torch.randn(3, 8), torch.randn(3)
    assert_same(ours(*inputs, weight, bias, residual, True), theirs(*inputs, weight, bias, residual, True))
    with pytest.raises(ValueError, match="weight: got None"):
        ours(*inputs, None, None)


def test_l2norm(installed):
    x = torch.randn(2, 8)
    assert_same(norm_layers.L2Norm(1e-2, torch.bfloat16)(x), installed.L2Norm(1e-2, torch.bfloat16)(x))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["silu", None])
def test_short_convolution(installed, bias, activation):
    ours, theirs = beside(installed, "ShortConvolution", 6, 4, bias, activation)
    x, residual = torch.randn(2, 2, 7, 6)
    mask = torch.ones(2, 7)
    mask[0, :3] = 0
    assert_same(ours(x, output_final_state=True), theirs(x, output_final_state=True))
    assert_same(ours(x, residual, mask), theirs(x.clone(), residual, mask))
    cu = torch.tensor([0, 3, 7])
    cache = torch.randn(2, 6, 4)
    assert_same(ours(x[:1], None, None, cache, True, cu), theirs(x[:1], None, None, cache, True, cu))
    with torch.no_grad():
        kept = [cache.clone(), cache.clone()]
        step = x[:, :1]
        assert_same(
            ours(step, cache=kept[0], output_final_state=True), theirs(step, cache=kept[1], output_final_state=True)
        )
        assert_same(*kept)
        assert not torch.equal(kept[0], cache)
        row, each = step.mT.reshape(1, 2, 6), torch.arange(3)
        assert_same(ours(row, cu_seqlens=each), theirs(row, cu_seqlens=each))
        assert_same(ours.step(step, residual[:, :1], None, True), theirs.step(step, residual[:, :1], None, True))
    assert ours.state_size == theirs.state_size == 24
    before = x.clone()
    ours(x, mask=mask)
    assert torch.equal(x, before)
    with pytest.raises(ValueError, match="mask: got one beside cu_seqlens"):
        ours(x, mask=mask, cu_seqlens=cu)
    with pytest.raises(ValueError, match="activation: got 'relu'"):
        blocks.ShortConvolution(6, 4, activation="relu")
    with pytest.raises(TypeError, match="stride: got an argument"):
        blocks.ShortConvolution(6, 4, stride=2)


@pytest.mark.parametrize("scale_base", [None, 512])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_embedding(installed, scale_base, interleaved):
    ours, theirs = beside(installed, "RotaryEmbedding", 8, 1000.0, scale_base, interleaved)
    q, k = torch.randn(2, 2, 7, 3, 8)
    assert_same(ours(q, k), theirs(q, k))
    assert_same(ours(q, k, 3, max_seqlen=20), theirs(q, k, 3, max_seqlen=20))
    offsets = torch.tensor([-2, 5])
    assert_same(ours(q, k, offsets, max_seqlen=20), theirs(q, k, offsets, max_seqlen=20))
    cu = torch.tensor([0, 3, 7])
    assert_same(ours(q[:1], k[:1], cu_seqlens=cu), theirs(q[:1], k[:1], cu_seqlens=cu))
    with pytest.raises(ValueError, match="dim: got 3"):
        blocks.RotaryEmbedding(3)


def test_rotary_embedding_in_bfloat16_keeps_its_positions(installed):
    ours, theirs = blocks.RotaryEmbedding(8).bfloat16(), installed.RotaryEmbedding(8).bfloat16()
    q = torch.randn(1, 4, 1, 8).bfloat16()
    assert_same(ours(q, q, 1995), theirs(q, q, 1995))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_losses(installed, reduction):
    options = {"reduction": reduction, "label_smoothing": 0.1, "ignore_index": 2}
    x, weight = torch.randn(2, 3, 6), torch.randn(11, 6)
    target = torch.randint(0, 11, (2, 3))
    ours, theirs = beside(installed, "FusedLinearCrossEntropyLoss", **options)
    assert_same(ours(x, target, weight), theirs(x, target, weight))
    ours, theirs = beside(installed, "FusedCrossEntropyLoss", **options, return_z_loss=True, lse_square_scale=0.1)
    logits = F.linear(x, weight).flatten(0, 1)
    assert_same(ours(logits, target.flatten()), theirs(logits, target.flatten()))
    ours, theirs = beside(installed, "FusedKLDivLoss")
    assert_same(ours(x[0], x[1], weight, weight), theirs(x[0], x[1], weight, weight))
    with pytest.raises(ValueError, match="reduction: got 'median'"):
        blocks.FusedCrossEntropyLoss(reduction="median")


@pytest.mark.parametrize("act", ["swish", "powlu"])
@pytest.mark.parametrize("options", [{}, {"hidden_ratio": 3}, {"intermediate_size": 24}, {"fuse_swiglu": False}])
def test_gated_mlp(installed, act, options):
    ours, theirs = beside(installed, "GatedMLP", 8, hidden_act=act, **options)
    x = torch.randn(2, 5, 8)
    assert_same(ours(x, anything=1), theirs(x))
    assert ours.intermediate_size == theirs.intermediate_size


@pytest.mark.parametrize("q_len", [5, 1])
@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("several", [False, True])
def test_padding(fla, q_len, keepdim, several):
    theirs = importlib.import_module("fla.layers.utils")
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 0, 0, 1]])
    q, k, v = torch.randn(3, 3, 5, 2, 4)
    q = q[:, -q_len:]
    given = (q, q * 2) if several else q
    ours = padding.unpad_input(given, (k, v), mask, q_len, keepdim)
    wanted = theirs.unpad_input(given, (k, v), mask, q_len, keepdim)
    assert_same(ours[0], wanted[0])
    assert_same(ours[1], wanted[1])
    assert_same(ours[2], wanted[2])
    assert_same(ours[3], wanted[3])
    assert ours[4] == wanted[4]
    steps = ours[0][0] if several else ours[0]
    steps = steps.squeeze(0) if keepdim else steps
    assert_same(padding.pad_input(steps, ours[2], 3, q_len), theirs.pad_input(steps, wanted[2], 3, q_len))


def test_padding_helpers(fla):
    theirs, index = importlib.import_module("fla.layers.utils"), importlib.import_module("fla.ops.utils.index")
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    rows = torch.randn(6, 4, requires_grad=True)
    for a, b in zip(padding.get_unpad_data(mask), theirs.get_unpad_data(mask), strict=True):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))
    assert_same(padding.prepare_lens_from_mask(mask), index.prepare_lens_from_mask(mask))
    assert_same(padding.prepare_cu_seqlens_from_mask(mask), index.prepare_cu_seqlens_from_mask(mask))
    cu = torch.tensor([0, 2, 6])
    assert_same(padding.prepare_lens(cu), index.prepare_lens(cu))
    where = torch.tensor([4, 0, 5])
    taken = padding.index_first_axis(rows, where)
    assert_same(taken, theirs.index_first_axis(rows, where))
    back = padding.index_put_first_axis(taken, where, 6)
    assert_same(back, theirs.index_put_first_axis(taken, where, 6))
    back.sum().backward()
    assert torch.equal(rows.grad[:, 0], torch.tensor([1.0, 0, 0, 0, 1, 1]))
    function = object()
    assert padding.tensor_cache(function) is function
    with pytest.raises(ValueError, match="q_len: got 2; takes 1 or 3"):
        padding.unpad_input(torch.zeros(2, 2, 4), (torch.zeros(2, 3, 4),), mask, 2)


def test_modules_are_made_where_asked():
    """On the meta device, in another type: as a loader of checkpoints does it."""
    for name, make in STAND_INS["fla.modules"].items():
        if name.startswith(("Group", "Layer", "RMS", "FusedLayerNorm", "FusedRMSNorm", "Short")):
            first = {"Group": (2, 8), "Short": (8, 4)}.get(name[:5], (8,))
            made = make(*first, device=torch.device("meta"), dtype=torch.bfloat16)
            assert isinstance(made, nn.Module)
            assert all(p.is_meta and p.dtype == torch.bfloat16 for p in made.parameters())
    assert "silu" in conv.ACTIVATIONS
