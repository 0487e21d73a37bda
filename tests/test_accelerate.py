"""accelerate() on small random models of every family: the same answers as transformers, and right where it is not."""

from __future__ import annotations

import functools

import pytest
import torch

from phistate.bench.families import FAMILIES, Size, family_config, random_model
from phistate.hf import accelerate

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SIZE = Size(layers=4, width=64, head=32, state=16, vocab=97)
TOLERANCE = 1e-4

# RecurrentGemma's layers keep the state in themselves, where a caller can neither pass nor reorder it. MiniMax sizes
# the mask of its softmax layers by a layer that holds no keys: it is tested layer by layer.
CACHED = [name for name in FAMILIES if name not in ("recurrent_gemma", "minimax")]
# xLSTM's cache cannot be reordered, and transformers says so.
BEAMS = [name for name in FAMILIES if name != "xlstm"]
# The models that hand packed sequences on to their layers; Mamba, FalconMamba, Jamba, Mamba-2 and Inkling drop them
# without a word, and the attention of GLM-5-next, Granite and MiniMax sees across sequences: these are tested layer by
# layer. RecurrentGemma's and xLSTM's layers take none either.
PACKED_LAYERS = ["glm5_next", "granitemoehybrid", "minimax", "mamba", "falcon_mamba", "jamba", "mamba2", "inkling"]
PACKED = [name for name in FAMILIES if name not in (*PACKED_LAYERS, "recurrent_gemma", "xlstm")]
# Their layers are told of seq_idx and drop cu_seq_lens_q.
NUMBERED = ["inkling", "inkling2", "inkling2_loop"]

transformers.logging.set_verbosity_error()  # that a fallback is slow is known here

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


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
        assert report.replaced
        assert not report.left
        ours, cached = logits(net, ids), net(ids, use_cache=True).logits.detach()
    assert_close(ours, theirs)
    assert_close(cached[:, -1], theirs[:, -1])
    # The history shows in the logits: without that, no test here would notice a lost state.
    changed = ids.clone()
    changed[:, 56] = (ids[:, 56] + 1 - 3) % (SIZE.vocab - 3) + 3
    assert (logits(net, changed)[:, -1] - theirs[:, -1]).abs().max() > 5 * TOLERANCE * theirs.abs().max()


def generate(net, ids):
    how = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "attention_mask": torch.ones_like(ids)}
    out = net.generate(ids, return_dict_in_generate=True, output_logits=True, **how)
    return out.sequences, torch.stack(out.logits)


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_decode(name):
    net, ids = model(name), tokens(2, 5)
    sequences, scores = generate(net, ids)
    with accelerate(net, correct=False):
        ours, our_scores = generate(net, ids)
    assert torch.equal(ours, sequences)
    assert_close(our_scores, scores)
    with accelerate(net):
        _, our_scores = generate(net, ids)
    # The right value, computed without a cache.
    assert_close(our_scores[-1], logits(net, ours[:, :-1])[:, -1])


def beams(net, ids):
    """The best of four beams, its score, and the score the same tokens have without a cache."""
    how = {"num_beams": 4, "max_new_tokens": 10, "length_penalty": 0.0, "eos_token_id": None, "do_sample": False}
    how |= {"return_dict_in_generate": True, "output_scores": True, "attention_mask": torch.ones_like(ids)}
    out = net.generate(ids, **how)
    log_p = logits(net, out.sequences).log_softmax(-1)[0, ids.shape[1] - 1 : -1]
    right = log_p.gather(-1, out.sequences[0, ids.shape[1] :, None]).sum()
    return out.sequences, out.sequences_scores[0], right


@pytest.mark.parametrize("name", BEAMS)
def test_beam_search(name):
    net, ids = model(name), tokens(1, 5, seed=4)
    theirs, _, _ = beams(net, ids)
    with accelerate(net, correct=False):
        ours, _, _ = beams(net, ids)
    assert torch.equal(ours, theirs)
    if name != "recurrent_gemma":
        with accelerate(net):
            _, score, right = beams(net, ids)
        assert_close(score, right)


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
        allowed = TOLERANCE * max(grad.abs().max(), 1e-2 * scale)
        assert (ours[parameter] - grad).abs().max() <= allowed, parameter


PIECES = [5, 9, 6]


def packed(name=None):
    """The ways to say how PIECES are packed, of which the layers of a model may know fewer."""
    offsets = torch.tensor([0, 5, 14, 20], dtype=torch.int32)
    numbers = torch.repeat_interleave(torch.arange(3, dtype=torch.int32), torch.tensor(PIECES))[None]
    ways = [{"cu_seq_lens_q": offsets, "seq_idx": numbers}, {"seq_idx": numbers}, {"cu_seq_lens_q": offsets}]
    return ways[:2] if name in NUMBERED else ways


@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences(name):
    net, ids = model(name), tokens(1, sum(PIECES))
    positions = torch.cat([torch.arange(n) for n in PIECES])[None]
    alone = torch.cat([logits(net, piece) for piece in ids.split(PIECES, 1)], 1)
    with pytest.raises(ValueError, match="can't keep packed sequences apart"):
        logits(net, ids, position_ids=positions, **packed()[1])
    with accelerate(net):
        for given in packed(name):
            assert_close(logits(net, ids, position_ids=positions, **given), alone)


def mixers(net):
    """Its first layer that accelerate() changes."""
    return next(
        layer
        for layer in net.modules()
        if type(layer).__name__.endswith(("Mixer", "LinearAttention", "LightningAttention", "HybridMambaLayer"))
        or type(layer).__name__ == "InklingShortConvolution"
    )


@pytest.mark.parametrize("name", PACKED_LAYERS)
@torch.no_grad()
def test_packed_sequences_in_a_layer(name):
    net = model(name)
    layer = mixers(net)
    width = layer.conv1d.in_channels if name == "inkling" else SIZE.width
    hidden = torch.randn(1, sum(PIECES), width)
    between = (None, None) if name == "minimax" else ()

    def run(x, **given):
        out = layer(x, *between, **given)
        return out[0] if isinstance(out, tuple) else out

    alone = torch.cat([run(piece) for piece in hidden.split(PIECES, 1)], 1)
    with accelerate(net):
        for given in packed(name):
            assert_close(run(hidden, **given), alone)
