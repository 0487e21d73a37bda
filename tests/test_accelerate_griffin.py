"""RecurrentGemma's recurrent block: its convolution and the state the layer keeps of it, as transformers has them."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import DynamicCache

import phistate.hf.griffin as griffin
from phistate.hf import accelerate
from phistate.ops.backends import native
from tests.test_accelerate import SIZE, assert_close, logits, model, tokens

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def block_of(net):
    return net.model.layers[0].temporal_block


def forget(block):
    block.conv1d_state = block.rg_lru.recurrent_states = None


def run(block, x, *lengths, use_cache=True):
    """Outputs and the two states after each piece."""
    forget(block)
    told, start = [], 0
    for piece in x.split(lengths, 1):
        positions = torch.arange(start, start + piece.shape[1])[None]
        out, _ = block(piece, positions, None, use_cache=use_cache)
        told.append((out, block.conv1d_state, block.rg_lru.recurrent_states))
        start += piece.shape[1]
    forget(block)
    return told


# A prompt shorter than the filter, as long, one token, and several tokens after a cache.
@pytest.mark.parametrize("lengths", [(20,), (1, 1, 1, 1), (2, 1, 1), (3, 1), (12, 1, 1, 6, 1)])
@pytest.mark.parametrize("grad", [False, True])
def test_outputs_and_states(lengths, grad):
    net, x = model("recurrent_gemma"), torch.randn(2, sum(lengths), SIZE.width)
    with torch.set_grad_enabled(grad):
        theirs = run(block_of(net), x, *lengths)
        with accelerate(net):
            ours = run(block_of(net), x, *lengths)
    for got, want in zip(ours, theirs, strict=True):
        for a, b in zip(got, want, strict=True):
            assert a.shape == b.shape
            assert a.dtype == b.dtype
            assert_close(a, b)


@torch.no_grad()
def test_without_a_cache_each_call_starts_anew():
    net, x = model("recurrent_gemma"), torch.randn(2, 9, SIZE.width)
    theirs = run(block_of(net), x, 5, 4, use_cache=False)
    with accelerate(net):
        ours = run(block_of(net), x, 5, 4, use_cache=False)
    for (got, conv, recurrent), (want, none, state) in zip(ours, theirs, strict=True):
        assert_close(got, want)
        assert conv is none is None
        assert_close(recurrent, state)


@torch.no_grad()
def test_another_batch_starts_anew():
    net, block = model("recurrent_gemma"), block_of(model("recurrent_gemma"))
    x = torch.randn(3, 1, SIZE.width)

    def after_two_rows():
        run(block, x[:2], 1)
        block(x[:2], torch.tensor([[4]]), None)
        out, _ = block(x, torch.tensor([[5]]), None)
        kept = block.conv1d_state
        forget(block)
        return out, kept

    want = after_two_rows()
    with accelerate(net):
        got = after_two_rows()
    for a, b in zip(got, want, strict=True):
        assert_close(a, b)


@torch.no_grad()
def test_a_step_leaves_the_state_somebody_else_holds(monkeypatch):
    net, block, x = model("recurrent_gemma"), block_of(model("recurrent_gemma")), torch.randn(1, 2, SIZE.width)
    steps = []
    step = griffin.causal_conv1d_step_
    monkeypatch.setattr(griffin, "causal_conv1d_step_", lambda *args: steps.append(args[0]) or step(*args))
    with accelerate(net):
        (_, first, _), (_, second, _) = run(block, x, 1, 1)
    assert first is not second
    assert torch.equal(first[..., 1:], second[..., :-1])
    # None where there are no native kernels: then the step is transformers'.
    assert len(steps) == (2 if native.why_not() is None else 0)


@torch.no_grad()
def test_several_tokens_after_a_cache_stay_wrong():
    net, ids = model("recurrent_gemma"), tokens(1, 20)
    right = logits(net, ids)

    def pieces():
        cache = DynamicCache(config=net.config)
        return torch.cat([net(piece, cache=cache, use_cache=True).logits for piece in ids.split(10, 1)], 1)

    wrong = pieces()
    assert (wrong - right)[:, 10:].abs().max() > 0.003 * right.abs().max()
    with accelerate(net):
        assert_close(pieces(), wrong)
