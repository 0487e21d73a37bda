"""accelerate() itself: what it finds, what it leaves and why, how it is undone; and transformers' known faults."""

from __future__ import annotations

import copy
import inspect
import sys
import types

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="transformers is not installed")

from phistate.compat.diagonal import diagonal_scan
from phistate.compat.packing import packing
from phistate.hf import accelerate
from tests.test_accelerate import SIZE, assert_close, continued, logits, mixers, model, tokens

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

# Families in which accelerate() replaces a layer's forward, not only the functions it calls.
REPLACED_LAYERS = ["minimax", "mamba", "falcon_mamba", "jamba", "zamba"]
REPLACED_LAYERS += ["mamba2", "bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "zamba2"]


def globals_of(name):
    return vars(sys.modules[f"transformers.models.{name}.modeling_{name}"])


def test_importing_does_not_import_transformers():
    import subprocess

    code = "import sys, phistate.hf; assert 'transformers' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_undone_as_a_context_by_hand_and_after_an_error():
    net = model("qwen3_5")
    before = dict(globals_of("qwen3_5"))
    with accelerate(net) as report:
        assert report.active
        assert globals_of("qwen3_5")["causal_conv1d_fn"] is not before["causal_conv1d_fn"]
    assert not report.active
    assert globals_of("qwen3_5") == before
    report = accelerate(net)
    report.undo()
    report.undo()
    with pytest.raises(RuntimeError, match="stop"), accelerate(net):
        raise RuntimeError("stop")
    assert globals_of("qwen3_5") == before


def test_two_models_share_a_module():
    layer = type(mixers(model("mamba")))
    forward = layer.forward
    first, second = accelerate(model("mamba")), accelerate(model("mamba"))
    original = globals_of("mamba")["mamba_selective_scan"].__wrapped__
    first.undo()
    assert globals_of("mamba")["mamba_selective_scan"] is not original
    assert layer.forward is not forward
    second.undo()
    assert globals_of("mamba")["mamba_selective_scan"] is original
    assert layer.forward is forward


def test_a_part_of_a_model_is_enough():
    with accelerate(model("mamba2").backbone.layers[0].mixer) as report:
        assert len(report.replaced) == 5


def test_report_prints_what_was_done():
    with accelerate(model("nemotron_h")) as report:
        text = str(report)
    assert text.startswith("NemotronHForCausalLM: 5 replaced, 0 left")
    assert "mamba2_chunk_scan                  mamba2_scan" in text
    assert "(0.001, inf) holds in the decode step too" in text


@pytest.mark.parametrize(
    "module, function, rates",
    [("qwen3_5", "torch_recurrent_gated_delta_rule", ()), ("kimi_linear", "recurrent_kimi_delta_attention", (8,))],
)
def test_a_delta_step_overwrites_the_state_it_gives_back(module, function, rates):
    net = model(module)
    q, k = torch.randn(2, 2, 1, 4, 8).unbind()
    v, g, beta = torch.randn(2, 1, 4, 6), -torch.rand(2, 1, 4, *rates), torch.rand(2, 1, 4)
    held = torch.randn(2, 4, 8, 6)
    want, after = inspect.unwrap(globals_of(module)[function])(q, k, v, g, beta, held, True)  # fla's wraps it
    with accelerate(net):
        step = globals_of(module)[function]
        for given, keep in ((q, False), (q.clone().requires_grad_(), True)):
            before = held.clone()
            got, state = step(given, k, v, g, beta, before, keep)
            assert_close(got, want)
            assert torch.equal(before, held), "a state that is not given back, or a gradient's, must stay"
            assert (state is None) != keep
        with torch.no_grad():
            got, state = step(q, k, v, g, beta, held, True)
    assert_close(got, want)
    assert_close(state, after)
    assert state is held


@pytest.mark.parametrize("name", REPLACED_LAYERS)
@pytest.mark.parametrize("length", [1, 5])
@torch.no_grad()
def test_a_cache_under_its_old_name(name, length):
    """Transformers' layers still take it, until 5.40."""
    net, hidden = model(name), torch.randn(2, length, SIZE.width)
    layer, between, old = mixers(net), (), "cache_params"
    if name == "minimax":
        between, old = (None, None), "past_key_values"

    def run(**given):
        out = layer(hidden, *between, **given)
        return out[0] if isinstance(out, tuple) else out

    with accelerate(net):
        cache = net(tokens(2, 6), use_cache=True).cache
        want, got = (run(**{word: copy.deepcopy(cache)}) for word in ("cache", old))
        assert torch.equal(got, want)
        assert not torch.allclose(run(), want)


class Imports(nn.Module):
    """A layer of somebody else's module, which imports a function and also holds it."""

    def __init__(self, function):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.held = function


def layer_in_a_module(**names):
    module = types.ModuleType("somebody_elses")
    vars(module).update(names)
    sys.modules[module.__name__] = module
    cls = type("Layer", (Imports,), {"__module__": module.__name__})
    return module, cls


def test_functions_held_elsewhere_are_found():
    model("qwen3_5")
    function = globals_of("qwen3_5")["torch_chunk_gated_delta_rule"]
    module, cls = layer_in_a_module(torch_chunk_gated_delta_rule=function)
    layer = cls(function)
    with accelerate(layer) as report:
        assert [entry.name for entry in report.replaced] == ["torch_chunk_gated_delta_rule", "held"]
        assert module.torch_chunk_gated_delta_rule is layer.held is not function
    assert module.torch_chunk_gated_delta_rule is layer.held is function


def test_what_is_not_known_is_left():
    def causal_conv1d_fn(x, weight):
        return x

    module, cls = layer_in_a_module(causal_conv1d_fn=causal_conv1d_fn, causal_conv1d_update=None)
    report = accelerate(cls(causal_conv1d_fn))
    assert not report.replaced
    assert not report.active
    assert module.causal_conv1d_fn is causal_conv1d_fn
    assert [entry.what[:22] for entry in report.left] == ["takes (x, weight); phi", "is no function but Non"]
    report = accelerate(nn.Linear(2, 2))
    assert "phistate knows" in report.left[0].what
    with pytest.raises(TypeError, match="model: got int; takes a torch.nn.Module"):
        accelerate(3)


def test_known_but_not_covered_says_why():
    from transformers import RwkvConfig, RwkvModel

    net = RwkvModel(RwkvConfig(hidden_size=16, num_hidden_layers=2, vocab_size=20, attention_hidden_size=16))
    report = accelerate(net)
    assert not report.replaced
    assert "a bonus of its own" in str(report)


def test_layers_on_another_device_are_left():
    with torch.device("meta"):
        net = copy.deepcopy(model("mamba")).to("meta")
    report = accelerate(net)
    assert not report.replaced
    assert "its layers are on meta" in report.left[0].what


def test_tensors_elsewhere_go_to_the_original():
    net = model("mamba")
    with accelerate(net):
        scan = globals_of("mamba")["mamba_selective_scan"]
        x = torch.empty(1, 8, 3, device="meta")
        out = scan(x, x, torch.empty(8, 4, device="meta"), *torch.empty(2, 1, 4, 3, device="meta").unbind())
    assert out.device.type == "meta"


def test_a_copy_runs_its_own_weights():
    net = model("mamba")
    with accelerate(net):
        twin = copy.deepcopy(net)
        with torch.no_grad():
            twin.backbone.layers[0].mixer.out_proj.weight.zero_()
        assert not torch.equal(logits(twin, tokens(1, 9)), logits(net, tokens(1, 9)))


# Where transformers is wrong. The right value is the one without a cache; each test says what ours gives.


@pytest.mark.parametrize("name", ["mamba", "falcon_mamba", "jamba", "zamba"])
@torch.no_grad()
def test_mamba1_restarts_after_a_cache(name):
    net, ids = model(name), tokens(1, 30)
    right = logits(net, ids)
    wrong = continued(net, ids, 20, 10)
    assert (wrong - right).abs().max() > 0.003 * right.abs().max()
    with accelerate(net):
        assert_close(continued(net, ids, 20, 10), right)
    with accelerate(net, correct=False):
        assert_close(continued(net, ids, 20, 10), wrong)


@pytest.mark.parametrize("name", ["mamba2", "bamba", "falcon_h1", "granitemoehybrid", "zamba2", "nemotron_h"])
@torch.no_grad()
def test_mamba2_forgets_its_time_step_limit_in_decode(name):
    limit = {"time_step_min": 0.3} if name in ("zamba2", "nemotron_h") else {"time_step_limit": (0.3, 0.5)}
    net, ids = model(name, **limit), tokens(1, 20)
    right = logits(net, ids)
    one_by_one = (12, *[1] * 8)
    wrong = continued(net, ids, *one_by_one)
    assert (wrong - right).abs().max() > 0.003 * right.abs().max()
    with accelerate(net):
        assert_close(continued(net, ids, *one_by_one), right)
    with accelerate(net, correct=False):
        assert_close(continued(net, ids, *one_by_one), wrong)


@torch.no_grad()
def test_minimax_states_follow_their_beams():
    from transformers.models.minimax.modeling_minimax import MiniMaxCache

    def reordered():
        cache = MiniMaxCache()
        cache.set_linear_cache(0, torch.arange(3.0).view(3, 1, 1, 1))
        cache.reorder_cache(torch.tensor([2, 0, 0]))
        return cache.get_linear_cache(0).flatten().tolist()

    assert reordered() == [0.0, 1.0, 2.0]
    with accelerate(model("minimax")):
        assert reordered() == [2.0, 0.0, 0.0]
    assert "reorder_cache" not in vars(MiniMaxCache)


@torch.no_grad()
def test_minimax_layer_goes_on_by_any_number_of_tokens():
    from transformers.models.minimax.modeling_minimax import MiniMaxCache

    net, hidden = model("minimax"), torch.randn(2, 40, 64)
    layer = net.model.layers[0].self_attn
    right = layer(hidden, None, None)[0]
    with accelerate(net):
        cache = MiniMaxCache()
        pieces = [layer(x, None, None, cache=cache)[0] for x in hidden.split([7, 1, 2, 30], 1)]
    assert_close(torch.cat(pieces, 1), right)


@torch.no_grad()
def test_minimax_padding_on_the_right_changes_no_state():
    from transformers.models.minimax.modeling_minimax import MiniMaxCache

    net, hidden = model("minimax"), torch.randn(1, 12, 64)
    layer = net.model.layers[0].self_attn
    mask = torch.ones(1, 12, dtype=torch.int64)
    mask[:, 8:] = 0
    _, right = layer(hidden[:, :8], None, None, cache=MiniMaxCache())
    _, wrong = layer(hidden, None, mask, cache=MiniMaxCache())
    assert not torch.allclose(wrong, right)
    with accelerate(net):
        _, ours = layer(hidden, None, mask, cache=MiniMaxCache())
    assert_close(ours, right)


def test_diagonal_scan_and_its_gradient():
    a = torch.rand(2, 9, 5)
    a[:, 3], a[:, 4], a[0, 5] = 0.0, 1.0, 1e-30
    a, x, h = (t.requires_grad_() for t in (a, torch.randn(2, 9, 5), torch.randn(2, 5)))
    y, last = diagonal_scan(a, x, h)
    state, plain = h, []
    for t in range(9):
        state = a[:, t] * state + x[:, t]
        plain.append(state)
    torch.testing.assert_close(y, torch.stack(plain, 1))
    torch.testing.assert_close(last, state)
    weight = torch.randn(2, 9, 5)
    ours = torch.autograd.grad((y * weight).sum() + last.square().sum(), (a, x, h))
    theirs = torch.autograd.grad((torch.stack(plain, 1) * weight).sum() + state.square().sum(), (a, x, h))
    torch.testing.assert_close(ours, theirs)


def test_packing_of_several_rows():
    numbers = torch.tensor([[0, 0, 1, 1], [2, 2, 2, 3]])
    pack = packing(torch.zeros(2, 4), seq_idx=numbers)
    assert pack.offsets.tolist() == [0, 2, 4, 7, 8]
    states = torch.tensor([5.0, 6.0])
    assert pack.enter(states).tolist() == [5.0, 0.0, 6.0, 0.0]
    assert pack.leave(torch.arange(4.0)).tolist() == [1.0, 3.0]
    x = torch.randn(2, 4, 3)
    assert torch.equal(pack.unfold(pack.fold(x)), x)
    with pytest.raises(ValueError, match="takes one row that holds the sequences"):
        packing(torch.zeros(2, 4), cu_seqlens=torch.tensor([0, 8]))
    with pytest.raises(ValueError, match=r"seq_idx: got shape \(2, 3\); takes \[B,T\] = \(2, 4\)"):
        packing(torch.zeros(2, 4), seq_idx=numbers[:, :3])
