"""fla's modules on a CPU: each adapter beside fla's own reference or torch's, values and gradients."""

import importlib

import pytest
import torch
import torch.nn.functional as F

from phistate.compat.fla import modules
from phistate.compat.fla.modules import activations, gated_norms, norms, rotary
from phistate.compat.functions import signature_of
from phistate.compat.mamba_ssm import gated
from tests.compat.agreement import agree

DTYPES = [torch.float32, torch.bfloat16]
both = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])


def original(module, name):
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


@pytest.mark.parametrize(
    "module,name,adapter", [(m, n, a) for m, names in modules.MODULES.items() for n, a in names.items()]
)
def test_signature(fla, module, name, adapter):
    assert signature_of(adapter) == signature_of(original(module, name))


def test_absent(fla):
    for module, names in modules.ABSENT.items():
        for name in names:
            assert getattr(importlib.import_module(module), name, None) is None


# Norms

HAVE = [(True, True), (True, False), (False, False)]


@both
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("has_weight,has_bias", HAVE)
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("groups", [1, 3])
def test_norms(fla, dtype, with_residual, has_weight, has_bias, rms, groups):
    ref = importlib.import_module("fla.modules.norm.layernorm")
    x, residual = torch.randn(2, 2, 5, 12) * 3 + 1
    weight, bias = torch.rand(2, 12) + 0.5
    residual = residual if with_residual else None
    weight, bias = weight if has_weight else None, bias if has_bias else None

    def reference(x, residual, weight, bias):
        weight = x.new_ones(12) if weight is None else weight
        return ref.group_norm_ref(x, weight, bias, groups, residual, 1e-3, rms, prenorm=True)

    def ours(x, residual, weight, bias):
        return norms.group_norm(x, weight, bias, residual, 1e-3, True, False, rms, groups)

    agree(ours, reference, x, residual, weight, bias, dtype=dtype)
    if groups == 1:

        def short(x, residual, weight, bias):
            if rms:
                return norms.rms_norm(x, weight, bias, residual, 1e-3, True)
            return norms.layer_norm(x, weight, bias, residual, 1e-3, True)

        agree(short, reference, x, residual, weight, bias, dtype=dtype)
        torch.testing.assert_close(
            norms.layer_norm(x, weight, bias, residual, is_rms_norm=rms),
            norms.group_norm(x, weight, bias, residual, is_rms_norm=rms),
        )


@both
@pytest.mark.parametrize("rms,groups", [(True, 1), (False, 1), (True, 2), (False, 2)])
def test_norm_linear(fla, dtype, rms, groups):
    ref = importlib.import_module("fla.modules.norm.layernorm")
    x, residual = torch.randn(2, 5, 8)
    weight, bias = torch.rand(2, 8) + 0.5
    projection, shift = torch.randn(3, 8), torch.randn(3)

    def reference(x, residual, weight, bias, projection, shift):
        y, kept = ref.group_norm_ref(x, weight, bias, groups, residual, 1e-5, rms, prenorm=True)
        return F.linear(y, projection, shift), kept

    def ours(x, residual, weight, bias, projection, shift):
        arguments = (x, weight, bias, projection, shift, residual, 1e-5, True)
        if groups > 1:
            return norms.group_norm_linear(*arguments, is_rms_norm=rms, num_groups=groups)
        return norms.rms_norm_linear(*arguments) if rms else norms.layer_norm_linear(*arguments)

    agree(ours, reference, x, residual, weight, bias, projection, shift, dtype=dtype)
    agree(
        lambda *t: ours(*t)[0],
        lambda *t: reference(*t)[0],
        *(x, None, weight, bias, projection, shift),
        dtype=dtype,
    )
    # Parameters of another type than the inputs, as mixed precision has them.
    y = norms.rms_norm_linear(x.bfloat16(), weight, None, projection, None)
    assert y.dtype == torch.bfloat16


def test_the_residual_decides_what_is_handed_on():
    x, residual = torch.randn(2, 5, 8)
    weight = torch.ones(8)
    y, kept = norms.rms_norm(x.bfloat16(), weight, None, residual, prenorm=True, residual_in_fp32=True)
    assert (y.dtype, kept.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(kept, x.bfloat16() + residual)
    y, kept = norms.rms_norm(x.bfloat16(), weight, None, residual.bfloat16(), prenorm=True, residual_in_fp32=True)
    assert kept.dtype == torch.bfloat16
    y, kept = norms.rms_norm(x.bfloat16(), weight, None, prenorm=True, residual_in_fp32=True)
    assert kept.dtype == torch.float32
    assert torch.equal(kept, x.bfloat16().float())
    y, kept = gated_norms.rms_norm_gated(x.bfloat16(), x, weight, None, prenorm=True)
    assert kept.dtype == torch.bfloat16


def test_norms_refuse():
    x = torch.randn(5, 8)
    with pytest.raises(ValueError, match="x: got 8 channels; takes a multiple of the 3 groups"):
        norms.group_norm(x, None, None, num_groups=3)
    with pytest.raises(ValueError, match="residual: got shape"):
        norms.rms_norm(x, None, None, x[:4])
    with pytest.raises(ValueError, match="weight: got shape"):
        norms.rms_norm(x, torch.ones(4), None)
    with pytest.raises(ValueError, match="activation: got 'relu'"):
        gated_norms.rms_norm_gated(x, x, None, None, "relu")


@both
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("activation", ["swish", "silu", "sigmoid"])
@pytest.mark.parametrize("has_weight,has_bias", HAVE)
def test_gated_norms(fla, dtype, rms, activation, has_weight, has_bias):
    ref = importlib.import_module("fla.modules.norm.layernorm")
    x, g, residual = torch.randn(3, 4, 2, 8)
    weight, bias = torch.rand(2, 8) + 0.5
    weight, bias = weight if has_weight else None, bias if has_bias else None

    def reference(x, g, residual, weight, bias):
        weight = x.new_ones(8) if weight is None else weight
        normed = ref.rms_norm_ref if rms else ref.layer_norm_ref
        y, kept = normed(x, weight, bias, residual, 1e-6, True)
        return y * (g.sigmoid() if activation == "sigmoid" else F.silu(g)), kept

    def ours(x, g, residual, weight, bias):
        normed = gated_norms.rms_norm_gated if rms else gated_norms.layer_norm_gated
        return normed(x, g.view(8, 8), weight, bias, activation, residual, prenorm=True)

    agree(ours, reference, x, g, residual, weight, bias, dtype=dtype)
    agree(ours, reference, x, g, None, weight, bias, dtype=dtype)
    if activation == "swish" and has_weight:
        projection, shift = torch.randn(3, 8), torch.randn(3)

        def linear(x, g, residual, weight, bias, projection, shift):
            full = gated_norms.rms_norm_swish_gate_linear if rms else gated_norms.layer_norm_swish_gate_linear
            return full(x, g, weight, bias, projection, shift, residual, prenorm=True)

        def linear_reference(x, g, residual, weight, bias, projection, shift):
            y, kept = reference(x, g, residual, weight, bias)
            return F.linear(y, projection, shift), kept

        agree(linear, linear_reference, x, g, residual, weight, bias, projection, shift, dtype=dtype)


@both
@pytest.mark.parametrize("group_size", [None, 4])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("has_gate", [True, False])
def test_mamba2_norm(fla, dtype, group_size, before, has_gate):
    ref = importlib.import_module("fla.modules.norm.layernorm_gated")
    x, z = torch.randn(2, 3, 2, 8)
    weight, bias = torch.rand(2, 8) + 0.5
    z = z if has_gate else None

    def reference(x, z, weight, bias):
        return ref.rms_norm_ref(x, weight, bias, z, 1e-6, group_size, before, upcast=False)

    def ours(x, z, weight, bias):
        return gated.rmsnorm_fn(x, weight, bias, z, 1e-6, group_size, before)

    agree(ours, reference, x, z, weight, bias, dtype=dtype)

    def centred_reference(x, z, weight, bias):
        x = x if z is None or before else x * F.silu(z)
        groups = 1 if group_size is None else 2
        y = F.layer_norm(x.unflatten(-1, (groups, -1)), (8 // groups,), eps=1e-6).flatten(-2) * weight + bias
        return y if z is None or not before else y * F.silu(z)

    def centred(x, z, weight, bias):
        return gated.layernorm_fn(x, weight, bias, z, 1e-6, group_size, before)

    agree(centred, centred_reference, x, z, weight, bias, dtype=dtype)


@both
def test_l2norm(dtype):
    x = torch.randn(2, 3, 8)

    def reference(x):
        return x / (x.square().sum(-1, keepdim=True) + 1e-2).sqrt()

    agree(lambda x: norms.l2norm(x, 1e-2), reference, x, dtype=dtype)
    assert torch.equal(norms.l2norm(torch.zeros(2, 4)), torch.zeros(2, 4))
    assert norms.l2norm(x.to(dtype), output_dtype=torch.float16).dtype == torch.float16
    assert norms.l2norm(x.double()).dtype == torch.float64


# Activations

POINTWISE = {
    "sigmoid": torch.sigmoid,
    "elu_p1": lambda x: F.elu(x) + 1,
    "logsigmoid": F.logsigmoid,
    "swish": F.silu,
    "fast_gelu_impl": lambda x: F.gelu(x, approximate="tanh"),
    "sqrelu": lambda x: F.relu(x).square(),
}


@both
@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise(dtype, name):
    x = torch.cat([torch.randn(3, 8), torch.tensor([[-80.0, -20.0, -1e-3, 0.0, 1e-3, 1.0, 20.0, 80.0]])])
    agree(modules.MODULES["fla.modules.activations.ops"][name], POINTWISE[name], x, dtype=dtype)


def test_elu_p1_keeps_small_values():
    x = torch.tensor([-30.0])
    assert activations.elu_p1(x).item() == pytest.approx(x.double().exp().item(), rel=1e-6)


@both
def test_activations_of_two(dtype):
    x, y = torch.randn(2, 2, 3, 8)
    weight, bias = torch.randn(5, 8), torch.randn(5)

    def power(x, y, exponent=3.0):
        safe = x.clamp_min(1e-6)
        gate = torch.where(x > 0, safe ** (exponent / (safe.sqrt() + 1)) * x.sigmoid(), F.silu(x))
        return gate * y

    agree(activations.swiglu, lambda x, y: F.silu(x) * y, x, y, dtype=dtype)
    agree(activations.sigmoidglu, lambda x, y: x.sigmoid() * y, x, y, dtype=dtype)
    agree(activations.powglu, power, x, y, dtype=dtype)
    agree(lambda x, y: activations.powglu(x, y, 2.0), lambda x, y: power(x, y, 2.0), x, y, dtype=dtype)
    agree(activations.bias_gelu, lambda x, b: F.gelu(x + b, approximate="tanh"), x, y[0, 0], dtype=dtype)
    agree(lambda x: activations.logsigmoid(x, 16.0), lambda x: F.logsigmoid(x) / 16, x, dtype=dtype)
    for function, unit in (
        (activations.swiglu_linear, lambda x, y: F.silu(x) * y),
        (activations.sigmoidglu_linear, lambda x, y: x.sigmoid() * y),
        (activations.powglu_linear, power),
    ):
        agree(function, lambda x, y, w, b, unit=unit: F.linear(unit(x, y), w, b), x, y, weight, bias, dtype=dtype)
        agree(
            lambda x, y, w, function=function: function(x, y, w, None),
            lambda x, y, w, unit=unit: F.linear(unit(x, y), w),
            *(x, y, weight),
            dtype=dtype,
        )
    with pytest.raises(ValueError, match="y: got shape"):
        activations.swiglu(x, y[:1])


def test_powglu_at_zero_has_a_finite_gradient():
    x = torch.tensor([-1.0, 0.0, 1e-30]).requires_grad_()
    activations.powglu(x, torch.ones(3)).sum().backward()
    assert x.grad.isfinite().all()


# Rotary position embedding


def turn(ref, x, cos, sin, interleaved, positions):
    """fla's reference at given positions ``[B,T]``; 0 in the turned channels where a position is negative."""
    y = ref.rotary_embedding_ref(x, cos[positions.clamp_min(0)], sin[positions.clamp_min(0)], interleaved)
    pad = (positions < 0)[..., None, None] & (torch.arange(x.shape[-1]) < 2 * cos.shape[1])
    return y.masked_fill(pad, 0.0)


@both
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [8, 12])
@pytest.mark.parametrize("case", ["plain", "offset", "offsets", "packed", "packed offset", "packed offsets"])
def test_rotary(fla, dtype, interleaved, width, case):
    ref = importlib.import_module("fla.modules.rotary.ops")
    angles = torch.outer(torch.arange(20.0), torch.rand(4) + 0.1)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    batch, cu, start = 2, None, {"offset": 3, "packed offset": 3}.get(case, 0)
    step = torch.arange(7)
    positions = (step + start).expand(2, -1)
    if case == "offsets":
        start = torch.tensor([-3, 5], dtype=torch.int32)
        positions = step + start[:, None]
    if case.startswith("packed"):
        batch, cu = 1, torch.tensor([0, 4, 4, 7], dtype=torch.int32)
        if case == "packed offsets":
            start = torch.tensor([2, 9, -1])
        first = torch.as_tensor(start).expand(3)
        positions = torch.cat([torch.arange(4) + first[0], torch.arange(3) + first[2]])[None]
    x = torch.randn(batch, 7, 2, width)

    agree(
        lambda x: rotary.rotary_embedding(
            x, cos.to(x.dtype), sin.to(x.dtype), interleaved, seqlen_offsets=start, cu_seqlens=cu
        ),
        lambda x: turn(ref, x, cos.to(x.dtype), sin.to(x.dtype), interleaved, positions),
        x,
        dtype=dtype,
    )


def test_rotary_in_place():
    angles = torch.outer(torch.arange(20.0), torch.rand(4) + 0.1)
    x = torch.randn(2, 7, 2, 12)
    offsets = torch.tensor([-2, 3])
    y = rotary.rotary_embedding(x, angles.cos(), angles.sin(), seqlen_offsets=offsets)
    same = x.clone()
    assert rotary.rotary_embedding(same, angles.cos(), angles.sin(), inplace=True, seqlen_offsets=offsets) is same
    assert torch.equal(same[0, :2], x[0, :2])
    assert torch.equal(same[0, 2:], y[0, 2:])
    assert torch.equal(same[1], y[1])


def test_rotary_is_one_graph():
    angles = torch.outer(torch.arange(20.0), torch.rand(4))
    x = torch.randn(1, 7, 2, 8)
    compiled = torch.compile(rotary.rotary_embedding, fullgraph=True, backend="eager")
    for more in ({"seqlen_offsets": 3}, {"seqlen_offsets": torch.tensor([-2])}):
        wanted = rotary.rotary_embedding(x, angles.cos(), angles.sin(), **more)
        torch.testing.assert_close(compiled(x, angles.cos(), angles.sin(), **more), wanted)


def test_rotary_refuses():
    angles = torch.outer(torch.arange(5.0), torch.rand(4))
    x = torch.randn(1, 7, 2, 8)
    with pytest.raises(ValueError, match="cos: got 5 positions; takes at least 7"):
        rotary.rotary_embedding(x, angles.cos(), angles.sin())
    with pytest.raises(ValueError, match="cos: got 4 angles for heads of 6 channels"):
        rotary.rotary_embedding(x[:, :5, :, :6], angles.cos(), angles.sin())
    with pytest.raises(ValueError, match="sin: got shape"):
        rotary.rotary_embedding(x, angles.cos(), angles.sin()[:4])
    with pytest.raises(ValueError, match="seqlen_offsets: got shape"):
        rotary.rotary_embedding(x, angles.cos(), angles.sin(), seqlen_offsets=torch.zeros(2, dtype=torch.int64))


def test_rotary_module(fla):
    """fla's module keeps its tables; with ours in place it turns queries and keys, from the first token on or later."""
    ops = importlib.import_module("fla.modules.rotary.ops")
    rope = ops.RotaryEmbedding(8)
    q, k = torch.randn(2, 1, 9, 2, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "rotary_embedding", rotary.rotary_embedding)
        whole = rope(q, k)
        later = rope(q[:, 5:], k[:, 5:], seqlen_offset=5)
    torch.testing.assert_close(whole[0][:, 5:], later[0])
    torch.testing.assert_close(whole[1][:, 5:], later[1])
