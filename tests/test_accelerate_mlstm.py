"""xLSTM's mLSTM: against transformers' own functions in float64, its states, its gradients, its precision."""

from __future__ import annotations

import functools

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from transformers.models.xlstm import modeling_xlstm

from phistate.bench.families import Size, family_config, random_model
from phistate.hf import accelerate
from phistate.hf.mlstm import mlstm
from phistate.ops.backends import native
from tests.test_accelerate import assert_close, continued, generate, logits, model, tokens

if modeling_xlstm.external_xlstm:
    pytest.skip("the package xlstm stands in for transformers' own layers", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

EPS = 1e-6


def inputs(length, gates=15.0, seed=0, batch=2, heads=2, K=6, V=10):
    """q, k, v and both gates, uniform over ±``gates`` as the model caps them at 15; and states to begin with."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(batch, heads, *shape, generator=g, dtype=torch.float64)

    qkv = draw(length, K), draw(length, K), draw(length, V)
    i, f = (2 * torch.rand(2, batch, heads, length, generator=g, dtype=torch.float64) - 1) * gates
    return (*qkv, i, f), (draw(K, V), draw(K), 3 * draw(1))


def cast(tensors, dtype):
    return tuple(x.to(dtype) for x in tensors)


def recurrent(args, states=None, dtype_state=torch.float64):
    return modeling_xlstm.mlstm_recurrent_sequence_native(
        *args, *(states or ()), return_last_states=True, eps=EPS, dtype_state=dtype_state
    )


def assert_same(ours, theirs):
    (h, states), (want, after) = ours, theirs
    for got, right in zip((h, *states), (want, *after), strict=True):
        assert got.shape == right.shape
        torch.testing.assert_close(got, right, rtol=1e-10, atol=1e-10 * right.abs().max().item())


@pytest.mark.parametrize("gates", [1.0, 15.0, 60.0])
@pytest.mark.parametrize("length", [1, 2, 63, 64, 130])
def test_is_the_recurrence(length, gates):
    args, states = inputs(length, gates)
    assert_same(mlstm(*args, states, EPS), recurrent(args, states))
    assert_same(mlstm(*args, None, EPS), recurrent(args))


def test_is_the_chunkwise_function():
    args, states = inputs(128)
    theirs = modeling_xlstm.mlstm_chunkwise_native_autograd(*args, *states, return_last_states=True, eps=EPS)
    assert_same(mlstm(*args, states, EPS), theirs)


def test_any_split_goes_on_from_its_states():
    args, states = inputs(70)
    whole = mlstm(*args, states, EPS)
    pieces = []
    for piece in zip(*(x.split([1, 30, 1, 1, 37], 2) for x in args), strict=True):
        h, states = mlstm(*piece, states, EPS)
        pieces.append(h)
    assert_same((torch.cat(pieces, 2), states), whole)


@pytest.mark.parametrize("given", [True, False], ids=["states", "none"])
@pytest.mark.parametrize("gates", [1.0, 15.0])
def test_gradients_are_those_of_the_recurrence(given, gates):
    """Those of eps too, the only place where the choice of units shows: it is large here."""
    args, states = inputs(33, gates)
    leaves = [x.requires_grad_() for x in (*args, *(states if given else ()))]
    weights = [torch.randn_like(x) for x in (args[2], *states)]

    def loss(h, after):
        return sum((w * x).sum() for w, x in zip(weights, (h, *after), strict=True))

    eps = 0.3
    ours = torch.autograd.grad(loss(*mlstm(*args, states if given else None, eps)), leaves)
    theirs = modeling_xlstm.mlstm_recurrent_sequence_native(
        *args, *(states if given else ()), return_last_states=True, eps=eps, dtype_state=torch.float64
    )
    theirs = torch.autograd.grad(loss(*theirs), leaves)
    for got, want in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10 * want.abs().max().item())


def test_gradcheck():
    args, states = inputs(4, 2.0, batch=1, heads=1, K=2, V=2)
    leaves = [x.requires_grad_() for x in (*args, *states)]

    def flat(*x):
        h, after = mlstm(*x[:5], x[5:], 0.1)
        return h, *after

    assert torch.autograd.gradcheck(flat, leaves)
    assert torch.autograd.gradgradcheck(flat, leaves)


@pytest.mark.parametrize("forget", [-15.0, -5.0, 3.0])
def test_a_long_sequence_keeps_its_digits(forget):
    """A float32 sum of 1500 forget gates has none left for the difference of two steps."""
    args, states = inputs(1500, batch=1, heads=1, K=4, V=4)
    args[4].fill_(forget)
    right, after = recurrent(args, states)
    single = cast(args, torch.float32), cast(states, torch.float32)
    ours, ours_after = mlstm(*single[0], single[1], EPS)
    theirs, _ = recurrent(*single, dtype_state=torch.float32)

    def error(h):
        # The median row: one whose denominator nearly cancels tells nothing of the gates.
        return ((h - right).abs().amax(-1) / right.abs().amax(-1)).median()

    assert error(ours) <= min(error(theirs), 1e-6)
    for got, want in zip(ours_after, after, strict=True):
        assert (got - want).abs().max() <= 1e-5 * want.abs().max()


def test_bfloat16_is_no_worse_than_theirs():
    args, states = inputs(64)
    low, states = cast(args, torch.bfloat16), cast(states, torch.float32)
    right, _ = recurrent(cast(low, torch.float64), cast(states, torch.float64))
    theirs, _ = recurrent(low, states, dtype_state=torch.float32)
    ours, after = mlstm(*low, states, EPS)
    assert ours.dtype == torch.bfloat16
    assert {x.dtype for x in after} == {torch.float32}
    assert (ours - right).square().mean() <= 4 * (theirs - right).square().mean()


def backend_of(net):
    return net.backbone.blocks[0].mlstm_layer.mlstm_backend


@torch.no_grad()
def test_a_step_overwrites_the_states_it_gives_back():
    args, states = (cast(x, torch.float32) for x in inputs(1))
    named = dict(zip(("query", "key", "value", "igate", "fgate"), args, strict=True))

    def run(c, n, m):
        return backend_of(model("xlstm"))(**named, c_initial=c, n_initial=n, m_initial=m)

    want, after = run(*states)
    before = cast(states, torch.float64)
    with accelerate(model("xlstm")):
        with torch.enable_grad():
            run(*states)
        assert all(torch.equal(x, y) for x, y in zip(states, before, strict=True))
        h, held = run(*states)
        # A cache in bfloat16 keeps its own tensors.
        low = cast(before, torch.bfloat16)
        _, other = run(*low)
    assert_close(h, want)
    for got, right in zip(held, after, strict=True):
        assert_close(got, right)
    assert other[0].dtype == torch.float32
    assert torch.equal(low[0], before[0].bfloat16())
    if native.why_not() is None:
        assert held[0] is states[0]
        assert held[1] is states[1]


@torch.no_grad()
def test_without_native_kernels_a_step_is_left(monkeypatch):
    args, states = (cast(x, torch.float32) for x in inputs(1))
    run = functools.partial(backend_of(model("xlstm")), *args)
    want, after = run(*states)
    monkeypatch.setattr("phistate.hf.mlstm.native.why_not", lambda: "not built")
    with accelerate(model("xlstm")):
        got, held = run(*states)
    assert torch.equal(got, want)
    assert all(torch.equal(x, y) for x, y in zip(held, after, strict=True))
    assert held[0] is not states[0]


@torch.no_grad()
def test_modes_of_the_backend():
    args, _ = (cast(x, torch.float32) for x in inputs(70))
    whole = [x[:, :, :64].contiguous() for x in args]
    backend = backend_of(model("xlstm"))
    want, after = backend(*whole, mode="train", return_last_states=True)
    longer, _ = backend(*args)
    with accelerate(model("xlstm")):
        h, held = backend(*whole, mode="train")
        assert_close(h, want)
        for got, right in zip(held, after, strict=True):
            assert_close(got, right)
        assert_close(backend(*whole, mode="train", return_last_states=False), want)
        # Transformers takes 70 tokens in no training mode together with their states.
        assert_close(backend(*args, mode="train_with_padding")[0], longer)
        assert_close(backend(*args, mode="inference", return_last_states=False)[0], longer)
        with pytest.raises(ValueError, match="Received empty sequence"):
            backend(*(x[:, :, :0] for x in args))
        with pytest.raises(ValueError, match="Unknown mode"):
            backend(*args, mode="other")
        # Of three states two may be missing.
        assert_close(backend(*args, m_initial=torch.zeros(2, 2, 1))[0], longer)


@torch.no_grad()
def test_a_model_with_narrow_keys():
    """Keys half as wide as values, as published."""
    wide = Size(layers=3, width=128, head=32, vocab=97)
    net, ids = random_model(family_config("xlstm", wide), lively=True), tokens(2, 75)
    right, (sequences, scores) = logits(net, ids), generate(net, ids[:, :9])
    lengths = []
    with accelerate(net) as report:
        assert [entry.name for entry in report.replaced] == ["forward"]
        assert not report.left
        assert_close(logits(net, ids), right)
        assert_close(continued(net, ids, 6, 1, 1, 2, 65), right)
        handle = net.backbone.blocks[0].register_forward_pre_hook(lambda _, given: lengths.append(given[0].shape[1]))
        ours, our_scores = generate(net, ids[:, :9])
        handle.remove()
    assert lengths == [9, 1, 1, 1, 1, 1]
    assert torch.equal(ours, sequences)
    assert_close(our_scores, scores)


@pytest.mark.parametrize("dynamic", [None, True, False])
@torch.no_grad()
def test_a_compiled_layer(dynamic):
    net, x = model("xlstm"), torch.randn(2, 30, 64)
    layer = net.backbone.blocks[0].mlstm_layer
    right, _ = layer(x)
    with accelerate(net):
        torch.compiler.reset()
        run = torch.compile(layer, backend="eager", fullgraph=True, dynamic=dynamic)
        first, state = run(x[:, :28])
        pieces = [first]
        for piece in x[:, 28:].split(1, 1):
            out, state = run(piece, tuple(part.contiguous() for part in state))
            pieces.append(out)
        torch.compiler.reset()
    assert_close(torch.cat(pieces, 1), right)


# Where transformers is wrong, and what is left as it is.


@torch.no_grad()
def test_inference_in_pieces_without_a_cache_rounds_its_states():
    net, ids = model("xlstm", max_inference_chunksize=16), tokens(1, 40)
    right = logits(model("xlstm"), ids)
    wrong = logits(net, ids)
    assert (wrong - right).abs().max() > 1e-3 * right.abs().max()
    with accelerate(net):
        ours = logits(net, ids)
        assert (ours - right).abs().max() > 1e-3 * right.abs().max()
        assert_close(net(ids, use_cache=True).logits, right)


@torch.no_grad()
def test_a_cache_of_other_widths_than_its_layers():
    config = family_config("xlstm", Size(layers=1, width=64, head=32, vocab=97))
    config.qk_dim_factor = 0.5
    net, ids = random_model(config), tokens(1, 20)
    with accelerate(net):
        assert logits(net, ids).isfinite().all()
    with pytest.raises((RuntimeError, ValueError)):
        net(ids, use_cache=True)


def test_padding_training_fails_without_us():
    net, ids = model("xlstm", mode="train_with_padding"), tokens(1, 20)
    with pytest.raises(ValueError, match="return_last_states=True is not supported"):
        net(ids, use_cache=False)
    with accelerate(net):
        assert_close(logits(net, ids), logits(model("xlstm"), ids))


def test_a_gate_of_minus_infinity_writes_nothing():
    q, k, v = torch.randn(3, 1, 2, 6, 4).unbind()
    igate, fgate = torch.randn(2, 1, 2, 6).unbind()
    igate[..., 3] = -torch.inf
    igate = igate.requires_grad_()
    h, states = mlstm(q, k, v, igate, fgate, None, eps=1e-6)
    changed = v.clone()
    changed[:, :, 3] = 9.0
    assert torch.equal(h, mlstm(q, k, changed, igate, fgate, None, eps=1e-6)[0])
    h.sum().backward()
    assert all(x.isfinite().all() for x in (h, *states, igate.grad))
