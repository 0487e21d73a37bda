"""mamba_ssm's layers: parameters and first values as published, answers by the oracles, cached = uncached."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from phistate.compat.functions import signature_of
from phistate.compat.mamba_ssm.inference import InferenceParams
from phistate.compat.mamba_ssm.mamba import Mamba
from phistate.compat.mamba_ssm.mamba2 import Mamba2
from phistate.compat.mamba_ssm.mamba2_simple import Mamba2Simple
from tests.compat import oracles
from tests.compat.oracles import same, same_gradients

STEPS = "dt_min=0.001, dt_max=0.1"
PUBLISHED = {
    Mamba: f"d_model, d_state=16, d_conv=4, expand=2, dt_rank='auto', {STEPS}, dt_init='random', dt_scale=1.0, "
    "dt_init_floor=0.0001, conv_bias=True, bias=False, use_fast_path=True, layer_idx=None, device=None, dtype=None",
    Mamba2: "d_model, d_state=128, d_conv=4, conv_init=None, expand=2, headdim=64, d_ssm=None, ngroups=1, "
    f"A_init_range=(1, 16), D_has_hdim=False, rmsnorm=True, norm_before_gate=False, {STEPS}, dt_init_floor=0.0001, "
    "dt_limit=(0.0, inf), bias=False, conv_bias=True, chunk_size=256, use_mem_eff_path=True, layer_idx=None, "
    "process_group=None, sequence_parallel=True, device=None, dtype=None",
    Mamba2Simple: "d_model, d_state=64, d_conv=4, conv_init=None, expand=2, headdim=128, ngroups=1, "
    f"A_init_range=(1, 16), {STEPS}, dt_init_floor=0.0001, dt_limit=(0.0, inf), learnable_init_states=False, "
    "activation='swish', bias=False, conv_bias=True, chunk_size=256, use_mem_eff_path=True, layer_idx=None, "
    "device=None, dtype=None",
}


@pytest.mark.parametrize("layer", PUBLISHED)
def test_signatures_are_those_of_the_package(layer):
    assert signature_of(layer) == PUBLISHED[layer]


def test_parameters_of_mamba():
    shapes = {name: tuple(t.shape) for name, t in Mamba(32, d_state=8, bias=True).state_dict().items()}
    assert shapes == {
        "A_log": (64, 8),
        "D": (64,),
        "in_proj.weight": (128, 32),
        "in_proj.bias": (128,),
        "conv1d.weight": (64, 1, 4),
        "conv1d.bias": (64,),
        "x_proj.weight": (18, 64),
        "dt_proj.weight": (64, 2),
        "dt_proj.bias": (64,),
        "out_proj.weight": (32, 64),
        "out_proj.bias": (32,),
    }
    assert not Mamba(32, conv_bias=False).conv1d.bias


def test_parameters_of_mamba2():
    layer = Mamba2(32, d_state=8, headdim=16, ngroups=2)
    shapes = {name: tuple(t.shape) for name, t in layer.state_dict().items()}
    assert shapes == {
        "dt_bias": (4,),
        "A_log": (4,),
        "D": (4,),
        "in_proj.weight": (2 * 64 + 2 * 2 * 8 + 4, 32),
        "conv1d.weight": (64 + 32, 1, 4),
        "conv1d.bias": (96,),
        "norm.weight": (64,),
        "out_proj.weight": (32, 64),
    }
    assert Mamba2(32, headdim=16, D_has_hdim=True).D.shape == (64,)
    assert "norm.weight" not in Mamba2(32, headdim=16, rmsnorm=False).state_dict()
    assert layer.norm.group_size == 32


def drawn_steps(count):
    dt = (torch.rand(count) * (math.log(0.1) - math.log(0.001)) + math.log(0.001)).exp().clamp(min=1e-4)
    return dt + torch.log(-torch.expm1(-dt))


def test_one_seed_gives_the_weights_the_package_draws():
    torch.manual_seed(3)
    layer = Mamba(16, d_state=4)
    torch.manual_seed(3)
    want = [nn.Linear(16, 64, bias=False), nn.Conv1d(32, 32, 4, groups=32, padding=3)]
    want += [nn.Linear(32, 9, bias=False), nn.Linear(1, 32)]
    nn.init.uniform_(want[3].weight, -1.0, 1.0)
    bias = drawn_steps(32)
    out = nn.Linear(32, 16, bias=False)
    for got, module in zip((layer.in_proj, layer.conv1d, layer.x_proj, layer.dt_proj), want, strict=True):
        assert torch.equal(got.weight, module.weight)
    assert torch.equal(layer.conv1d.bias, want[1].bias)
    assert torch.equal(layer.dt_proj.bias, bias)
    assert torch.equal(layer.out_proj.weight, out.weight)
    assert torch.equal(layer.A_log, torch.arange(1.0, 5.0).log().expand(32, -1))
    assert torch.equal(layer.D, torch.ones(32))
    assert layer.A_log._no_weight_decay
    assert layer.dt_proj.bias._no_reinit


def test_one_seed_gives_the_weights_the_package_draws_for_mamba2():
    torch.manual_seed(3)
    layer = Mamba2(16, d_state=4, headdim=8, conv_init=0.5, A_init_range=(2, 5))
    torch.manual_seed(3)
    in_proj, conv = nn.Linear(16, 64 + 8 + 4, bias=False), nn.Conv1d(40, 40, 4, groups=40, padding=3)
    nn.init.uniform_(conv.weight, -0.5, 0.5)
    steps = drawn_steps(4)
    rates = torch.empty(4).uniform_(2, 5).log()
    out = nn.Linear(32, 16, bias=False)
    for got, want in (
        (layer.in_proj.weight, in_proj.weight),
        (layer.conv1d.weight, conv.weight),
        (layer.dt_bias, steps),
        (layer.A_log, rates),
        (layer.out_proj.weight, out.weight),
    ):
        assert torch.equal(got, want)
    assert layer.dt_bias._no_weight_decay


def test_types_of_parameters():
    half = torch.bfloat16
    mamba, mamba2 = Mamba(16, dtype=half), Mamba2(16, headdim=8, dtype=half)
    assert (mamba.A_log.dtype, mamba.D.dtype, mamba.in_proj.weight.dtype) == (torch.float32, torch.float32, half)
    assert (mamba2.A_log.dtype, mamba2.D.dtype, mamba2.dt_bias.dtype) == (half, torch.float32, half)
    x = torch.randn(1, 5, 16, dtype=half)
    assert mamba(x).dtype == mamba2(x).dtype == half
    conv, scan = mamba2.allocate_inference_cache(2, 100)
    assert (conv.dtype, scan.dtype, conv.shape, scan.shape) == (half, half, (2, 288, 4), (2, 4, 8, 128))
    assert mamba.allocate_inference_cache(2, 100, torch.float32)[1].dtype == torch.float32


def mamba_oracle(layer, u):
    x, z = layer.in_proj(u).mT.chunk(2, 1)
    x = oracles.convolve(x, layer.conv1d.weight[:, 0], layer.conv1d.bias, "silu")
    made = layer.x_proj(x.mT)
    delta, B, C = made.split([layer.dt_rank, layer.d_state, layer.d_state], -1)
    delta = F.linear(delta, layer.dt_proj.weight).mT
    y, state = oracles.selective_scan(x, delta, -layer.A_log.exp(), B.mT, C.mT, layer.D, z, layer.dt_proj.bias, True)
    return layer.out_proj(y.mT), state


def mamba2_oracle(layer, u, seq_idx=None, before=None):
    mlp, each = layer.d_inner - layer.d_ssm, layer.ngroups * layer.d_state
    parts = [mlp, mlp, layer.d_ssm, layer.d_ssm + 2 * each, layer.nheads]
    gate, value, z, xBC, dt = layer.in_proj(u).split(parts, -1)
    xBC = oracles.convolve(xBC.mT, layer.conv1d.weight[:, 0], layer.conv1d.bias, "silu", seq_idx=seq_idx).mT
    x, B, C = xBC.split([layer.d_ssm, each, each], -1)
    heads, normed = (layer.nheads, layer.headdim), hasattr(layer, "norm")
    y, state = oracles.ssd(
        x.unflatten(-1, heads),
        dt,
        -layer.A_log.exp(),
        B.unflatten(-1, (layer.ngroups, -1)),
        C.unflatten(-1, (layer.ngroups, -1)),
        layer.D.view(heads) if layer.D.numel() > layer.nheads else layer.D,
        None if normed else z.unflatten(-1, heads),
        layer.dt_bias,
        before,
        seq_idx,
        True,
        layer.dt_limit,
    )
    y = y.flatten(-2)
    if normed:
        y = oracles.gated_norm(
            y, layer.norm.weight, None, z, 1e-5, layer.d_ssm // layer.ngroups, layer.norm.norm_before_gate
        )
    return layer.out_proj(torch.cat([F.silu(gate) * value, y], -1)), state


def varied(layer):
    """Parameters of no special value."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return layer.double()


MAMBA = {"plain": {}, "biases": {"bias": True, "conv_bias": False}, "constant": {"dt_init": "constant", "dt_rank": 3}}
MAMBA2 = {
    "plain": {},
    "groups": {"ngroups": 2, "norm_before_gate": True, "bias": True},
    "limits": {"dt_limit": (0.01, 0.5), "conv_bias": False},
    "mlp": {"d_ssm": 16, "D_has_hdim": True},
    "no norm": {"rmsnorm": False, "ngroups": 2, "D_has_hdim": True},
    "narrow": {"d_conv": 2},
}


def _layers():
    for name, options in MAMBA.items():
        yield pytest.param(Mamba, {"d_state": 4, **options}, mamba_oracle, id=f"mamba {name}")
    for name, options in MAMBA2.items():
        yield pytest.param(Mamba2, {"d_state": 4, "headdim": 8, **options}, mamba2_oracle, id=f"mamba2 {name}")


LAYERS = list(_layers())


@pytest.mark.parametrize("kind, options, oracle", LAYERS)
def test_answers_and_gradients(kind, options, oracle):
    layer = varied(kind(16, **options))
    u = torch.randn(2, 7, 16, dtype=torch.float64, requires_grad=True)
    got, want = layer(u), oracle(layer, u)[0]
    same(got, want)
    same_gradients([got], [want], {"u": u} | dict(layer.named_parameters()))


@pytest.mark.parametrize("kind, options, oracle", LAYERS)
@pytest.mark.parametrize("prompt", [1, 2, 5])
@pytest.mark.parametrize("grad", [True, False])
def test_decoding_from_a_cache_is_the_whole_pass(kind, options, oracle, prompt, grad):
    layer = varied(kind(16, layer_idx=7, **options))
    u = torch.randn(2, 8, 16, dtype=torch.float64)
    with torch.set_grad_enabled(grad):
        cache = InferenceParams(max_seqlen=8, max_batch_size=2)
        parts = [layer(u[:, :prompt], inference_params=cache)]
        same(cache.key_value_memory_dict[7][1], oracle(layer, u[:, :prompt])[1])
        for t in range(prompt, 8):
            cache.seqlen_offset = t
            parts.append(layer(u[:, t : t + 1], inference_params=cache))
        same(torch.cat(parts, 1), oracle(layer, u)[0])
        conv, state = layer.allocate_inference_cache(2, 8)
        outs = [layer.step(u[:, t : t + 1], conv, state)[0] for t in range(8)]
        same(torch.cat(outs, 1), oracle(layer, u)[0])
    same(state, oracle(layer, u)[1])
    same(cache.key_value_memory_dict[7][0], conv)
    assert not state.requires_grad


def test_a_cache_begins_again():
    layer = varied(Mamba(16, layer_idx=0))
    cache = InferenceParams(8, 1, lengths_per_sample=torch.ones(1, dtype=torch.int32))
    for u in torch.randn(2, 1, 5, 16, dtype=torch.float64):
        same(layer(u, inference_params=cache), layer(u))
        cache.reset(9, 1)
    assert (cache.max_seqlen, cache.seqlen_offset, cache.lengths_per_sample.item()) == (9, 0, 0)
    states = layer._get_states_from_cache(cache, 1, initialize_states=True)
    assert all((state == 0).all() for state in states)


@pytest.mark.parametrize("named", ["seq_idx", "cu_seqlens", "both"])
@pytest.mark.parametrize("cached", [True, False])
def test_packed_sequences_in_mamba2(named, cached):
    layer = varied(Mamba2(16, d_state=4, headdim=8, ngroups=2, layer_idx=0))
    u = torch.randn(1, 9, 16, dtype=torch.float64)
    packed = {
        # The last is shorter than the filter: of what stands before it nothing is in its window.
        "seq_idx": torch.tensor([[0, 0, 0, 0, 0, 0, 0, 1, 1]], dtype=torch.int32),
        "cu_seqlens": torch.tensor([0, 7, 9], dtype=torch.int32),
    }
    packed = packed if named == "both" else {named: packed[named]}
    cache = InferenceParams(9, 2) if cached else None
    sequences = [u[:, :7], u[:, 7:]]
    parts = [mamba2_oracle(layer, part) for part in sequences]
    same(layer(u, inference_params=cache, **packed), torch.cat([y for y, _ in parts], 1))
    if not cached:
        return
    if named == "seq_idx":  # one row, one state: its last sequence's
        sequences, parts = sequences[-1:], parts[-1:]
    same(cache.key_value_memory_dict[0][1], torch.cat([state for _, state in parts]))
    cache.seqlen_offset = 9
    more = torch.randn(len(sequences), 1, 16, dtype=torch.float64)
    got = layer(more, inference_params=cache)
    for row, part in enumerate(sequences):
        same(got[row], mamba2_oracle(layer, torch.cat([part, more[row : row + 1]], 1))[0][0, -1:])


def test_mamba2_says_what_does_not_fit():
    with pytest.raises(ValueError, match="d_ssm: got 64; takes at most expand · d_model = 32"):
        Mamba2(16, headdim=8, d_ssm=64)
    with pytest.raises(ValueError, match="cu_seqlens: got it with batch 2; takes batch 1"):
        Mamba2(16, headdim=8)(torch.zeros(2, 4, 16), cu_seqlens=torch.tensor([0, 4]))
    with pytest.raises(ValueError, match="dt_rank: got 'full'; takes a number or 'auto'"):
        Mamba(16, dt_rank="full")


def test_rows_flattened_as_for_sequence_parallelism():
    layer = varied(Mamba2(16, d_state=4, headdim=8, layer_idx=0))
    u = torch.randn(2, 5, 16, dtype=torch.float64)
    same(layer(u.flatten(0, 1), seqlen=5), layer(u).flatten(0, 1))
    cache = InferenceParams(9, 2)
    layer(u.flatten(0, 1), seqlen=5, inference_params=cache)
    cache.seqlen_offset = 5
    again = InferenceParams(9, 2)
    layer(u, inference_params=again)
    again.seqlen_offset = 5
    same(
        layer(u[:, 0], seqlen=1, inference_params=cache),
        layer(u[:, :1], inference_params=again).flatten(0, 1),
    )


@pytest.mark.parametrize(
    "options", [{}, {"learnable_init_states": True, "ngroups": 2, "dt_limit": (0.01, 0.5)}], ids=str
)
def test_mamba2_simple(options):
    layer = varied(Mamba2Simple(16, d_state=4, headdim=8, **options))
    layer.d_ssm = layer.d_inner
    before = layer.init_states.expand(2, -1, -1, -1) if options else None
    u = torch.randn(2, 7, 16, dtype=torch.float64, requires_grad=True)
    numbers = torch.tensor([[0, 0, 0, 0, 1, 1, 1], [0] * 7], dtype=torch.int32)
    got, want = layer(u, seq_idx=numbers), mamba2_oracle(layer, u, numbers.long(), before)[0]
    same(got, want)
    same_gradients([got], [want], {"u": u} | dict(layer.named_parameters()))


def test_a_float32_layer_runs_the_kernels_to_the_same_answer():
    layer = Mamba(32, layer_idx=0)
    u = torch.randn(2, 40, 32)
    got = layer(u)
    same(got, mamba_oracle(layer.double(), u.double())[0], 1e-5)
    layer = Mamba2(32, d_state=16, headdim=16, layer_idx=0)
    got = layer(u)
    same(got, mamba2_oracle(layer.double(), u.double())[0], 1e-5)


def test_layers_under_autocast():
    u = torch.randn(2, 9, 32)
    for layer, oracle in ((Mamba(32), mamba_oracle), (Mamba2(32, d_state=16, headdim=16), mamba2_oracle)):
        with torch.autocast("cpu", torch.bfloat16):
            got = layer(u)
            got.sum().backward()
        assert got.dtype == torch.bfloat16
        assert all(p.grad.isfinite().all() for p in layer.parameters())
        same(got, oracle(layer.double(), u.double())[0], 5e-2)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Mamba(16, dt_init="zero"), "dt_init: got 'zero'; takes 'random' or 'constant'"),
        (lambda: Mamba2(16, headdim=7), "headdim: got 7; takes a divisor of the 32 channels"),
        (lambda: Mamba2(16, headdim=8, ngroups=3), "ngroups: got 3; takes a divisor of the 4 heads"),
        (lambda: Mamba2(16, headdim=8, A_init_range=(0, 1)), "A_init_range: got"),
        (lambda: Mamba2(16, headdim=8, process_group=1), "process_group: got 1; takes None"),
        (lambda: Mamba(16)(torch.zeros(1, 2, 16), InferenceParams(2, 1)), "layer_idx: got None"),
        (lambda: Mamba(16).step(torch.zeros(1, 2, 16), None, None), "hidden_states: got 2 tokens after a cache"),
        (lambda: Mamba(16)(torch.zeros(2, 16)), "hidden_states: got shape"),
        (lambda: Mamba2(16, headdim=8)(torch.zeros(2, 16)), "u: got shape"),
    ],
)
def test_one_error_names_what_does_not_fit(make, message):
    with pytest.raises(ValueError, match=message):
        make()
