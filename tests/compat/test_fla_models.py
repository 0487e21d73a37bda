"""fla's own models on a CPU: every family forward, backward, cached, padded, packed and in bfloat16."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import sys

import pytest
import torch

from phistate.bench.families import Size
from phistate.bench.fla_families import FLA_FAMILIES, fla_model
from phistate.compat import install
from phistate.compat.fla.ops import call
from phistate.hf import accelerate
from phistate.ops.linear_attention import linear_attention

pytestmark = [
    pytest.mark.usefixtures("fla"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

SIZE = Size(layers=2, width=64, head=32, state=16, vocab=97)
families = pytest.mark.parametrize("name", FLA_FAMILIES)
# One new token at a time is all they take after a cache.
SINGLE = ("fla.mamba", "fla.mamba2", "fla.samba")


def random_weights(name: str, **changes):
    """A model in which every matrix matters: fla's own initialisation hardly lets a wrong layer show in the logits."""
    net = fla_model(name, SIZE, **changes)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for path, parameter in net.named_parameters():
            if parameter.ndim > 1 and not any(part in path for part in ("A_log", "dt_", "lora", "x_", "r_k")):
                parameter.normal_(std=0.5 * parameter.shape[-1] ** -0.5, generator=generator)
    return net


@functools.cache
def model(name: str):
    return random_weights(name)


def tokens(rows: int, length: int) -> torch.Tensor:
    return torch.randint(3, SIZE.vocab, (rows, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits(net, ids, **inputs):
    return net(ids, use_cache=False, **inputs).logits


def assert_close(ours, theirs, tolerance=1e-4):
    scale = theirs.abs().max()
    assert scale > 1e-3
    assert torch.isfinite(ours).all()
    assert (ours - theirs).abs().max() <= tolerance * scale


@families
def test_nothing_runs_without_and_everything_with(name):
    net, ids = model(name), tokens(2, 70)
    with pytest.raises(Exception, match=r"0 active drivers|Triton|triton|cuda"):
        logits(net, ids)
    with accelerate(net) as report:
        assert report.replaced
        assert not report.left
        first = logits(net, ids)
        changed = ids.clone()
        changed[:, 67] = (ids[:, 67] + 1 - 3) % (SIZE.vocab - 3) + 3
        # The history shows in the logits: without that, no test here would notice a lost state.
        assert (logits(net, changed)[:, -1] - first[:, -1]).abs().max() > 5e-4 * first.abs().max()
        assert torch.equal(logits(net, changed)[:, :67], first[:, :67])
    with pytest.raises(Exception, match=r"0 active drivers|Triton|triton|cuda"):
        logits(net, ids)


@families
def test_a_loss_has_every_gradient_and_both_losses_are_one(name):
    net, ids = random_weights(name), tokens(2, 70)
    net.train()
    results = []
    with accelerate(net):
        for fused in (False, True):
            if "fuse_linear_cross_entropy" in inspect.signature(type(net.config).__init__).parameters:
                net.config.fuse_linear_cross_entropy = fused
                net.criterion = None
            net.zero_grad()
            loss = net(ids, labels=ids, use_cache=False).loss
            loss.backward()
            grads = {path: p.grad for path, p in net.named_parameters()}
            assert all(g is not None and g.isfinite().all() for g in grads.values()), name
            results.append((loss, torch.stack([g.norm() for g in grads.values()])))
        expected = torch.nn.functional.cross_entropy(logits(net, ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    (loss, norms), (fused_loss, fused_norms) = results
    torch.testing.assert_close(loss, fused_loss)
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-5, atol=1e-5)
    assert_close(fused_norms, norms)


@families
def test_generation_is_the_argmax_of_whole_forwards(name):
    net, ids = model(name), tokens(2, 5)
    with accelerate(net):
        out = net.generate(
            ids, max_new_tokens=6, do_sample=False, eos_token_id=None, attention_mask=torch.ones_like(ids)
        )
        expected = logits(net, out[:, :-1])[:, 4:].argmax(-1)
    assert torch.equal(out[:, 5:], expected)


def test_generation_is_left_as_it_is_when_asked():
    """A cache that transformers names in its new way, fla drops: every token but the first is computed alone."""
    net, ids = model("fla.gla"), tokens(2, 5)
    how = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "attention_mask": torch.ones_like(ids)}
    with accelerate(net, correct=False) as report:
        assert not report.corrected
        wrong = net.generate(ids, **how)
    with accelerate(net) as report:
        assert [entry.what for entry in report.corrected]
        right = net.generate(ids, **how)
    assert torch.equal(wrong[:, :6], right[:, :6])
    assert not torch.equal(wrong, right)


def test_the_report_names_what_the_layers_call():
    net = model("fla.kda")
    with accelerate(net) as report:
        named = {entry.name: entry.what for entry in report.replaced if entry.where == "fla.layers.kda"}
    assert named["chunk_kda"] == "linear_attention(write='delta'), by fla's registry of backends"
    assert named["fused_recurrent_kda"] == "linear_attention(write='delta')"


def test_without_the_registry_everything_is_replaced(monkeypatch):
    net, ids = model("fla.kda"), tokens(2, 70)
    with accelerate(net):
        expected = logits(net, ids)
    monkeypatch.setenv("FLA_DISABLE_BACKEND_DISPATCH", "1")
    with accelerate(net) as report:
        named = {entry.name: entry.what for entry in report.replaced if entry.where == "fla.layers.kda"}
        assert named["chunk_kda"] == "linear_attention(write='delta')"
        assert torch.equal(logits(net, ids), expected)


def test_what_was_made_meanwhile_runs_as_long_as_anything_wants_it():
    """A module and a layer made under one report, then touched and let go by another."""
    import types

    whole, ids = install("fla"), tokens(2, 20)
    user = types.ModuleType("user_of_fla")
    exec("from fla.ops.gla import chunk_gla", vars(user))
    net = fla_model("fla.rwkv6", SIZE)  # its layers hold an activation each
    x = torch.randn(1, 3, 2, 16)
    sys.modules["user_of_fla"] = user
    try:
        with accelerate(model("fla.gla")), accelerate(net):
            expected = logits(net, ids)
        assert user.chunk_gla(x, x, x, -x.abs())[0].shape == x.shape
        assert torch.equal(logits(net, ids), expected)
        inner = accelerate(net)
        whole.undo()
        assert torch.equal(logits(net, ids), expected)
        inner.undo()
        for gone in (lambda: user.chunk_gla(x, x, x, -x.abs()), lambda: logits(net, ids)):
            with pytest.raises(RuntimeError, match="0 active drivers"):
                gone()
        with accelerate(net):
            assert user.chunk_gla(x, x, x, -x.abs())[0].shape == x.shape
            assert torch.equal(logits(net, ids), expected)
    finally:
        whole.undo()
        del sys.modules["user_of_fla"]


def test_install_after_accelerate_is_one_more_that_wants_it():
    from fla.ops.kda import chunk_kda

    x, beta = torch.zeros(1, 4, 2, 16), torch.zeros(1, 4, 2)
    first = accelerate(model("fla.gla"))
    with install("fla") as report:
        assert report.replaced
        first.undo()
        assert chunk_kda(x, x, x, x, beta)[0].shape == x.shape
    with pytest.raises(RuntimeError, match="0 active drivers"):
        chunk_kda(x, x, x, x, beta)


@pytest.mark.parametrize("name", ["fla.mamba", "fla.rwkv6", "fla.gla"])
def test_an_accelerated_model_can_be_saved_and_copied(name, tmp_path):
    net, ids = fla_model(name, SIZE), tokens(2, 20)
    with accelerate(net):
        expected = logits(net, ids)
        torch.save(net, tmp_path / "net.pt")
        loaded, copied = torch.load(tmp_path / "net.pt", weights_only=False), copy.deepcopy(net)
        assert torch.equal(logits(loaded, ids), expected)
        assert torch.equal(logits(copied, ids), expected)
    torch.save(net, tmp_path / "plain.pt")


@pytest.mark.parametrize("name", ["fla.gla", "fla.kda", "fla.mamba2"])
def test_a_model_compiles_to_one_graph(name, monkeypatch):
    """fla keeps the calls of its registry out of every graph."""
    monkeypatch.setenv("FLA_DISABLE_BACKEND_DISPATCH", "1")
    net, ids = model(name), tokens(2, 70)
    with accelerate(net):
        expected = logits(net, ids)
        torch._dynamo.reset()
        compiled = torch.compile(net, backend="eager", fullgraph=True)
        torch.testing.assert_close(logits(compiled, ids), expected)
        loss = net(ids, labels=ids, use_cache=False).loss
        torch.testing.assert_close(compiled(ids, labels=ids, use_cache=False).loss, loss)


def test_a_version_that_differs_is_told(monkeypatch):
    import fla

    monkeypatch.setattr(fla, "__version__", "9.9")
    monkeypatch.setattr("fla.ops.gla.chunk_gla", lambda q, k: None)
    monkeypatch.delattr("fla.ops.gsa.chunk_gsa")
    with pytest.warns(UserWarning, match=r"fla 9\.9 was never checked with phistate, which knows 0\.6\.0"):
        report = accelerate(model("fla.gla"))
    with report:
        left = {(entry.where, entry.name): entry.what for entry in report.left}
    assert left["fla.ops.gla", "chunk_gla"].startswith("takes (q, k); phistate knows (q, k, v, g, scale=None")
    assert left["fla.ops.gsa", "chunk_gsa"] == "is not in this version of fla"


def test_tensors_elsewhere_go_to_fla():
    from fla.ops.gla import chunk_gla
    from fla.ops.kda import chunk_kda

    x, beta = torch.zeros(1, 4, 2, 16, device="meta"), torch.zeros(1, 4, 2, device="meta")
    before = (chunk_gla, chunk_kda)
    with install("fla"):
        from fla.ops.gla import chunk_gla as replaced

        assert replaced is not chunk_gla
        for call in (lambda: replaced(x, x, x, x), lambda: chunk_kda(x, x, x, x, beta)):
            with pytest.raises(RuntimeError, match="0 active drivers"):
                call()
        cpu = torch.zeros(1, 4, 2, 16)
        assert chunk_kda(cpu, cpu, cpu, cpu, torch.zeros(1, 4, 2))[0].shape == cpu.shape
    import fla.ops.gla

    assert (fla.ops.gla.chunk_gla, chunk_kda) == before


@families
def test_beams_carry_their_states(name):
    net, ids = model(name), tokens(1, 5)
    with accelerate(net):
        how = {"num_beams": 4, "max_new_tokens": 10, "length_penalty": 0.0, "eos_token_id": None, "do_sample": False}
        out = net.generate(
            ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, output_scores=True, **how
        )
        log_p = logits(net, out.sequences).log_softmax(-1)[0, 4:-1]
    right = log_p.gather(-1, out.sequences[0, 5:, None]).sum()
    assert_close(out.sequences_scores[0], right)


@families
@pytest.mark.parametrize("pieces", [(40, *[1] * 12), (5, 2, 70, 1)])
def test_a_cache_changes_nothing(name, pieces):
    if name in SINGLE and any(piece > 1 for piece in pieces[1:]):
        pieces = (pieces[0], 1, 1)
    net, ids = model(name), tokens(2, sum(pieces))
    with accelerate(net), torch.no_grad():
        whole, cache, parts, start = logits(net, ids), None, [], 0
        for piece in pieces:
            out = net(ids[:, start : start + piece], past_key_values=cache, use_cache=True)
            cache, start = out.past_key_values, start + piece
            parts.append(out.logits)
    assert_close(torch.cat(parts, 1), whole)


@families
def test_a_row_padded_on_the_left_is_the_row(name):
    net, ids = model(name), tokens(2, 70)
    mask = torch.ones_like(ids)
    mask[1, :30] = 0
    with accelerate(net):
        ours = logits(net, ids * mask, attention_mask=mask)
        alone, other = logits(net, ids[1:, 30:]), logits(net, ids[:1])
    assert_close(ours[1:, 30:], alone)
    assert_close(ours[:1], other)


@pytest.mark.parametrize("name", SINGLE)
def test_training_heeds_the_mask_too(name):
    """Their fused call does not."""
    net, ids = random_weights(name).train(), tokens(2, 40)
    mask = torch.ones_like(ids)
    mask[1, :11] = 0
    with accelerate(net):
        assert_close(logits(net, ids * mask, attention_mask=mask)[1:, 11:], logits(net, ids[1:, 11:]))


# fla's Mamba layers take no packed sequences, and its linear-attention model does not hand them on to its layers.
@pytest.mark.parametrize("name", [name for name in FLA_FAMILIES if name not in (*SINGLE, "fla.linear_attn")])
def test_packed_sequences_are_those_one_by_one(name):
    net, ids = model(name), tokens(1, 90)
    bounds = [0, 13, 83, 90]
    with accelerate(net):
        ours = logits(net, ids, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
        for begin, end in itertools.pairwise(bounds):
            assert_close(ours[:, begin:end], logits(net, ids[:, begin:end]))


@families
def test_bfloat16_errs_at_most_twice_what_plain_torch_errs(name, monkeypatch):
    net, ids = random_weights(name).bfloat16(), tokens(2, 70)
    wide = random_weights(name).bfloat16().float()
    with accelerate(net), accelerate(wide):
        exact, ours = logits(wide, ids), logits(net, ids).float()
        monkeypatch.setattr(call, "linear_attention", functools.partial(linear_attention, backend="torch"))
        plain = logits(net, ids).float()
    assert (ours - exact).norm() <= 2 * (plain - exact).norm()


def test_every_layer_of_one_mode_is_that_of_the_other():
    for name in ("fla.gla", "fla.gated_deltanet", "fla.kda", "fla.retnet"):
        net, ids = model(name), tokens(2, 60)
        with accelerate(net):
            short = logits(net, ids)  # in eval mode 64 tokens and fewer go token by token
            net.train()
            assert_close(logits(net, ids), short)
            net.eval()


@pytest.mark.parametrize("mode", ["parallel", "chunk", "fused_chunk"])
@pytest.mark.parametrize("name", ["based", "rebased"])
def test_layers_that_no_model_has(name, mode):
    import fla.layers

    make = {"based": fla.layers.BasedLinearAttention, "rebased": fla.layers.ReBasedLinearAttention}[name]
    layer = make(64, num_heads=2, num_key_value_heads=2, feature_dim=8, mode=mode)
    x = torch.randn(2, 40, 64, requires_grad=True)
    with accelerate(layer) as report:
        assert report.replaced
        assert not report.left
        out = layer(x)
        out = out[0] if isinstance(out, tuple) else out
        out.sum().backward()
    assert torch.isfinite(x.grad).all()


def test_simple_gla_has_a_layer_only():
    from fla.layers.simple_gla import SimpleGatedLinearAttention

    layer = SimpleGatedLinearAttention(hidden_size=64, num_heads=2).eval()
    x = torch.randn(1, 100, 64)
    with accelerate(layer), torch.no_grad():
        whole = layer(x)[0]  # by chunks
        assert_close(layer(x[:, :60])[0], whole[:, :60])  # token by token


def test_what_is_left_is_said():
    import fla.layers

    mom = fla.layers.MomAttention(hidden_size=64, num_heads=2, head_dim=32, num_memories=2, topk=1)
    with accelerate(mom) as report:
        assert ["fla's own fault" in entry.what for entry in report.left] == [True]
    path = fla.layers.MesaNet(hidden_size=64, num_heads=2, head_dim=32)
    with accelerate(path) as report:
        assert [(entry.where, entry.name) for entry in report.left] == [
            ("fla.layers.mesa_net", "chunk_mesa_net"),
            ("fla.layers.mesa_net", "mesa_net_decoding_one_step"),
        ]
