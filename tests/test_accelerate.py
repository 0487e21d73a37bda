"""accelerate() on small random models of every family: the same answers as transformers, and right where it is not."""

from __future__ import annotations

import functools

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from phistate.bench.families import FAMILIES, Size, family_config, random_model
from phistate.hf import accelerate

SIZE = Size(layers=4, width=64, head=32, state=16, vocab=97)
TOLERANCE = 1e-4

MAMBA1 = ["mamba", "falcon_mamba", "jamba", "zamba"]
DELTA = ["qwen3_5", "qwen3_5_moe", "qwen3_next", "olmo_hybrid", "lara_mini", "kimi_linear", "bailing_hybrid"]
MAMBA2 = ["mamba2", "bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "zamba2"]
# Their layers keep the state in themselves, where a caller can neither pass nor reorder it.
OWN_STATE = ["recurrent_gemma"]
CACHED = [name for name in FAMILIES if name not in OWN_STATE]

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def quiet():
    import transformers

    transformers.logging.set_verbosity_error()


@functools.cache
def model(name: str, **changes):
    return random_model(family_config(name, SIZE, **changes), lively=True)


def tokens(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, SIZE.vocab, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(net, ids, **inputs):
    return net(ids, use_cache=False, **inputs).logits


def assert_close(ours, theirs):
    scale = theirs.abs().max()
    assert scale > 1e-3
    assert torch.isfinite(ours).all()
    assert (ours - theirs).abs().max() <= TOLERANCE * scale


@pytest.mark.parametrize("name", FAMILIES)
def test_prefill(name):
    net, ids = model(name), tokens(2, 70)
    theirs = logits(net, ids)
    with accelerate(net) as report:
        assert report.replaced and not report.left
        ours, cached = logits(net, ids), net(ids, use_cache=True).logits.detach()
    assert_close(ours, theirs)
    assert_close(cached[:, -1], theirs[:, -1])
    # The history shows in the logits: without that, no test here would notice a lost state.
    changed = ids.clone()
    changed[:, 50] = (ids[:, 50] + 1 - 3) % (SIZE.vocab - 3) + 3
    assert (logits(net, changed)[:, -1] - theirs[:, -1]).abs().max() > 10 * TOLERANCE * theirs.abs().max()


def generate(net, ids, **how):
    out = net.generate(
        ids, max_new_tokens=6, do_sample=False, return_dict_in_generate=True, output_logits=True, eos_token_id=None, **how
    )
    return out.sequences, torch.stack(out.logits)


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_decode(name):
    net, ids = model(name), tokens(2, 5)
    sequences, scores = generate(net, ids, attention_mask=torch.ones_like(ids))
    with accelerate(net, correct=False):
        ours, our_scores = generate(net, ids, attention_mask=torch.ones_like(ids))
    assert torch.equal(ours, sequences)
    assert_close(our_scores, scores)
    with accelerate(net):
        _, our_scores = generate(net, ids, attention_mask=torch.ones_like(ids))
    # The right value, computed without a cache.
    assert_close(our_scores[-1], logits(net, ours[:, :-1])[:, -1])


@pytest.mark.parametrize("name", FAMILIES)
def test_beam_search(name):
    net, ids = model(name), tokens(1, 5)
    theirs, _ = generate(net, ids, num_beams=3, attention_mask=torch.ones_like(ids))
    with accelerate(net, correct=False):
        ours, _ = generate(net, ids, num_beams=3, attention_mask=torch.ones_like(ids))
    assert torch.equal(ours, theirs)


def continued(net, ids, *lengths):
    """Logits of a sequence fed in pieces, the cache carried."""
    cache, pieces, start = None, [], 0
    for length in lengths:
        piece = ids[:, start : start + length]
        # Left to itself a hybrid whose first layer keeps no keys counts its positions from 0 again.
        positions = torch.arange(start, start + length).expand(len(ids), length)
        out = net(piece, cache=cache, use_cache=True, position_ids=positions)
        cache, start = out.cache, start + length
        pieces.append(out.logits.detach())
    return torch.cat(pieces, 1)


@pytest.mark.parametrize("name", CACHED)
@torch.no_grad()
def test_continues_from_a_cache(name):
    net, ids = model(name), tokens(2, 80)
    whole = logits(net, ids)
    with accelerate(net):
        assert_close(continued(net, ids, 6, 1, 1, 2, 70), whole)


@pytest.mark.parametrize("name", FAMILIES)
def test_left_padded_batch(name):
    net, ids = model(name), tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    theirs = logits(net, ids, attention_mask=mask)
    with accelerate(net):
        ours = logits(net, ids, attention_mask=mask)
    assert_close(ours[mask.bool()], theirs[mask.bool()])


def gradients(net, ids):
    net.zero_grad()
    out = net(ids, use_cache=False).logits
    out.square().mean().backward()
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients(name):
    net, ids = model(name).train(), tokens(2, 20)
    try:
        theirs = gradients(net, ids)
        with accelerate(net):
            ours = gradients(net, ids)
    finally:
        net.eval()
        net.zero_grad()
    assert ours.keys() == theirs.keys()
    scale = max(grad.abs().max() for grad in theirs.values())
    for parameter, grad in theirs.items():
        # A gradient that is itself a rounding error of the others cannot be held to its own size.
        allowed = TOLERANCE * max(grad.abs().max(), 1e-3 * scale)
        assert (ours[parameter] - grad).abs().max() <= allowed, parameter
