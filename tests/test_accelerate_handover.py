"""What a layer hands over to its functions belongs to one call: nothing outlives it, nothing reaches another."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import pickle
import threading
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import DynamicCache

from phistate.bench.families import family_config, random_model
from phistate.compat.swap import swap
from phistate.hf import accelerate
from phistate.hf.handover import Call, current
from tests.test_accelerate import PIECES, SIZE, assert_close, continued, logits, mixers, model, packed, tokens

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

# Layers that hand over their state and their packing, and layers that hand over the limits of their time step.
STATES = ["mamba", "falcon_mamba", "jamba", "zamba"]
LIMITS = ["mamba2", "bamba", "falcon_h1", "granitemoehybrid", "zamba2", "nemotron_h"]


def limited(name):
    return model(
        name, **({"time_step_min": 0.3} if name in ("zamba2", "nemotron_h") else {"time_step_limit": (0.3, 0.5)})
    )


def fresh(name):
    """A model of its own, for a test that changes it or lets it go."""
    return random_model(family_config(name, SIZE), lively=True)


def hidden(rows=2, length=30):
    return torch.randn(rows, length, SIZE.width, generator=torch.Generator().manual_seed(1))


def in_pieces(net, layer, x, *lengths):
    """A layer's answer for a sequence fed in pieces, its cache carried."""
    cache = DynamicCache(config=net.config)
    return torch.cat([layer(piece, cache=cache) for piece in x.split(lengths, 1)], 1)


def alone(layer, x):
    return torch.cat([layer(piece) for piece in x.split(PIECES, 1)], 1)


def interrupt(layer, error):
    """Lets the layer's next call end at its first projection, where everything is handed over and nothing taken."""

    def stop(*args):
        handle.remove()
        raise error

    handle = layer.in_proj.register_forward_pre_hook(stop)


class Interrupted(BaseException):
    """Like KeyboardInterrupt, no Exception; pytest would stop at that one if it escaped."""


ERRORS = [Interrupted, KeyboardInterrupt, GeneratorExit, RuntimeError]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("name", STATES)
@torch.no_grad()
def test_a_state_dies_with_its_call(name, error):
    net = model(name)
    layer, x = mixers(net), hidden()
    right = layer(x)
    with accelerate(net):
        cache = DynamicCache(config=net.config)
        layer(x, cache=cache)
        interrupt(layer, error)
        with pytest.raises(error):
            layer(x, cache=cache)
        assert_close(layer(x), right)
        # Other rows than the state that was handed over.
        assert_close(layer(x[:1]), right[:1])
        assert current() == Call()


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("name", STATES)
@torch.no_grad()
def test_a_packing_dies_with_its_call(name, error):
    net, other = model(name), model("mamba2")
    layer, x = mixers(net), hidden(1, sum(PIECES))
    right, others = layer(x), mixers(other)(x)
    with accelerate(net), accelerate(other):
        interrupt(layer, error)
        with pytest.raises(error):
            layer(x, **packed()[1])
        assert_close(mixers(other)(x), others)
        assert_close(layer(x), right)


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("name", LIMITS)
@torch.no_grad()
def test_limits_die_with_their_call(name, error):
    net, other, x = limited(name), model("mamba2"), hidden(length=6)
    layer = mixers(net)
    right = in_pieces(other, mixers(other), x, 5, 1)
    with accelerate(net), accelerate(other):
        cache = DynamicCache(config=net.config)
        layer(x[:, :5], cache=cache)
        interrupt(layer, error)
        with pytest.raises(error):
            layer(x[:, 5:], cache=cache)
        assert_close(in_pieces(other, mixers(other), x, 5, 1), right)


@pytest.mark.parametrize("name", STATES)
@torch.no_grad()
def test_a_call_inside_a_call_has_its_own(name):
    net = model(name)
    layer, x = mixers(net), hidden()
    right, short = layer(x), hidden(1, 7)
    inner = []

    def call_again(*args):
        handle.remove()
        inner.append(layer(short))
        inner.append(layer(short[:, :1]))

    with accelerate(net):
        cache = DynamicCache(config=net.config)
        first = layer(x[:, :20], cache=cache)
        handle = layer.in_proj.register_forward_pre_hook(call_again)
        second = layer(x[:, 20:], cache=cache)
    assert_close(torch.cat([first, second], 1), right)
    assert_close(inner[0], layer(short))
    assert_close(inner[1], layer(short[:, :1]))


@torch.no_grad()
def test_a_call_in_another_thread_has_its_own():
    net = model("mamba")
    layer, x = mixers(net), hidden()
    right, inner = layer(x), []

    def call_elsewhere(*args):
        handle.remove()
        thread = threading.Thread(target=lambda: inner.append(layer(x).detach()))
        thread.start()
        thread.join()

    with accelerate(net):
        cache = DynamicCache(config=net.config)
        layer(x[:, :20], cache=cache)
        handle = layer.in_proj.register_forward_pre_hook(call_elsewhere)
        second = layer(x[:, 20:], cache=cache)
    assert_close(second, right[:, 20:])
    assert_close(inner[0], right)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", STATES)
def test_a_recomputed_call_has_its_own(name, reentrant):
    """Recomputation ends a layer's call by an exception, once it has what the gradient needs."""
    net = model(name)
    layer, x = mixers(net), hidden(1, sum(PIECES)).requires_grad_()

    (want,) = torch.autograd.grad(alone(layer, x).square().sum(), x)
    with accelerate(net):
        y = checkpoint(functools.partial(layer, **packed()[0]), x, use_reentrant=reentrant)
        # Another call comes while the first waits for its recomputation.
        whole = layer(x.detach())
        y.square().sum().backward()
        assert current() == Call()
        assert_close(layer(x), whole)
    net.zero_grad()
    assert_close(x.grad, want)


@torch.no_grad()
def test_packing_holds_in_every_model_whose_functions_are_replaced():
    net, other = model("zamba"), fresh("zamba")
    x, layer = hidden(1, sum(PIECES)), mixers(other)
    want = alone(layer, x)
    with accelerate(net):
        for given in packed():
            assert_close(layer(x, **given), want)


# TorchDynamo runs a layer in one graph or in many; both have to say the same.


@pytest.fixture
def compiled():
    torch.compiler.reset()
    yield functools.partial(torch.compile, backend="eager")
    torch.compiler.reset()


@pytest.mark.parametrize("name, dynamic", [*((name, True) for name in STATES), ("jamba", None), ("jamba", False)])
@torch.no_grad()
def test_a_compiled_layer_goes_on_from_its_state(name, dynamic, compiled):
    net = model(name)
    layer, x = mixers(net), hidden()
    right, apart = layer(x), alone(layer, x[:1, : sum(PIECES)])
    with accelerate(net):
        run = compiled(layer, dynamic=dynamic, fullgraph=True)
        assert_close(in_pieces(net, run, x, 12, 10, 8), right)
        assert_close(run(x[:1, : sum(PIECES)], **packed()[2]), apart)
        assert_close(run(x), right)
        assert current() == Call()


@pytest.mark.parametrize("name, dynamic", [*((name, True) for name in LIMITS), ("bamba", None), ("bamba", False)])
@torch.no_grad()
def test_a_compiled_layer_keeps_its_limits(name, dynamic, compiled):
    net = limited(name)
    layer, x = mixers(net), hidden()
    right = layer(x)
    with accelerate(net):
        run = compiled(layer, dynamic=dynamic, fullgraph=True)
        assert_close(in_pieces(net, run, x, 27, 1, 1, 1), right)
        assert current() == Call()


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize(
    "name, dynamic, given", [("zamba", True, packed()[2]), ("mamba2", None, packed()[1]), ("bamba", True, packed()[2])]
)
@torch.no_grad()
def test_a_compiled_layer_keeps_sequences_apart(name, dynamic, given, fullgraph, compiled):
    net = model(name)
    layer, x = mixers(net), hidden(1, sum(PIECES))
    whole, apart = layer(x), alone(layer, x)
    with accelerate(net):
        run = compiled(layer, dynamic=dynamic, fullgraph=fullgraph)
        assert_close(run(x, **given), apart)
        assert_close(run(x), whole)


@torch.no_grad()
def test_a_compiled_model_goes_on_from_its_states(compiled):
    net, ids = model("jamba"), tokens(2, 30)
    right = logits(net, ids)
    with accelerate(net):
        assert_close(continued(compiled(net, dynamic=True), ids, 12, 18), right)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@torch.no_grad()
def test_a_compiled_layer_follows_what_is_accelerated(compiled):
    net, x = fresh("mamba"), hidden()
    layer = mixers(net)
    run = compiled(layer)
    right, wrong = layer(x), in_pieces(net, layer, x, 20, 10)
    assert (wrong - right).abs().max() > 1e-3 * right.abs().max()
    for _ in range(2):
        assert_close(in_pieces(net, run, x, 20, 10), wrong)
        with accelerate(net, correct=False):
            assert_close(in_pieces(net, run, x, 20, 10), wrong)
            with accelerate(net):
                assert_close(in_pieces(net, run, x, 20, 10), right)
            assert_close(in_pieces(net, run, x, 20, 10), wrong)


@torch.no_grad()
def test_threads_share_a_compiled_layer(compiled):
    net, x, got = model("mamba"), hidden(), []
    layer = mixers(net)
    right = layer(x)
    with accelerate(net):
        run = compiled(layer, dynamic=True, fullgraph=True)

        def call():
            with torch.no_grad():
                got.append(in_pieces(net, run, x, 12, 18))

        for _ in range(12):
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()
    assert len(got) == 12
    for y in got:
        assert_close(y, right)


# What is set on a model and its classes lasts as long as somebody can undo it.


def corrected(net, x):
    layer = mixers(net)
    return torch.allclose(in_pieces(net, layer, x, 20, 10), layer(x), atol=1e-4)


@pytest.mark.parametrize("first", [False, True])
@torch.no_grad()
def test_corrections_are_undone_in_any_order(first):
    net, other, x = fresh("mamba"), fresh("mamba"), hidden()
    layer, forward = mixers(net), type(mixers(net)).forward
    reports = {correct: accelerate(net, correct=correct) for correct in (first, not first)}
    assert corrected(net, x)
    assert not corrected(other, x)
    reports[first].undo()
    assert corrected(net, x) != first
    reports[not first].undo()
    assert not corrected(net, x)
    assert type(layer).forward is forward
    assert vars(layer).keys() == vars(mixers(other)).keys()


@torch.no_grad()
def test_two_models_of_a_class_are_corrected_by_themselves():
    net, other, x = fresh("mamba"), fresh("mamba"), hidden()
    one, two = accelerate(net), accelerate(other, correct=False)
    assert corrected(net, x)
    assert not corrected(other, x)
    one.undo()
    assert not corrected(net, x)
    two.undo()


def shallow(layer):
    """As DataParallel copies a layer."""
    same = copy.copy(layer)
    same._modules = dict(layer._modules)
    return same


@pytest.mark.parametrize("twin", [shallow, copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
@pytest.mark.parametrize("name", ["mamba", "zamba"])
@torch.no_grad()
def test_a_copy_is_corrected_and_runs_its_own_weights(name, twin):
    net, x = fresh(name), hidden()
    with accelerate(net):
        layer = mixers(net)
        right, same = layer(x), twin(layer)
        same.in_proj = copy.deepcopy(layer.in_proj)
        assert_close(in_pieces(net, same, x, 20, 10), right)
        same.in_proj.weight.zero_()
        assert not torch.allclose(same(x), right)
        assert_close(layer(x), right)


@pytest.mark.parametrize("own", ["around it", "bound", "of a subclass"])
@torch.no_grad()
def test_a_forward_that_others_replaced(own):
    net, x = fresh("mamba"), hidden()
    layer = mixers(net)
    right, before = layer(x), layer.forward
    if own == "around it":
        layer.forward = lambda *args, **kwargs: before(*args, **kwargs)
    elif own == "bound":
        layer.forward = before
    else:

        class Mine(type(layer)):
            def forward(self, hidden_states, cache=None, attention_mask=None, **kwargs):
                return super().forward(hidden_states, cache, attention_mask, **kwargs)

        layer.__class__ = Mine
    theirs = layer.forward
    with accelerate(net):
        assert_close(in_pieces(net, layer, x, 20, 10), right)
    assert layer.forward == theirs
    assert not corrected(net, x)


def test_an_accelerate_that_fails_leaves_nothing():
    net = fresh("mamba2")
    layer = mixers(net)
    places = vars(type(layer)), inspect.unwrap(type(layer).forward).__globals__
    before = [dict(place) for place in places]
    del net.backbone.layers[-1].mixer.time_step_limit
    with pytest.raises(AttributeError, match="time_step_limit"):
        accelerate(net)
    assert [dict(place) for place in places] == before


def test_a_layer_that_is_never_undone_is_freed():
    layer = torch.nn.Linear(2, 2)
    swap(layer, "held", len)
    freed = weakref.ref(layer)
    del layer
    gc.collect()
    assert freed() is None


def test_threads_share_what_is_replaced():
    owner, threads = torch.nn.Linear(2, 2), []

    def swap_often():
        for _ in range(2000):
            swap(owner, "held", len)()

    for _ in range(8):
        threads.append(threading.Thread(target=swap_often))
        threads[-1].start()
    for thread in threads:
        thread.join()
    assert "held" not in vars(owner)
