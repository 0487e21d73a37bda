"""The audit on a small random model, through its functions; and on the default one where it is there."""

import json
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from phistate.audit import models, timing
from phistate.audit.candidates import DEFAULT_MIXERS, accepted, parse
from phistate.audit.capture import Tap, find_layers, tapped
from phistate.audit.errors import BadInput
from phistate.audit.interventions import Price, Recording
from phistate.audit.metrics import candidate_figures, softmax_figures
from phistate.audit.models import LoadedModel
from phistate.audit.plan import CHEAPEST, CHEAPEST_MAP, counts, cumulative, measure, under
from phistate.audit.report import Report
from phistate.audit.run import audit
from phistate.audit.text import Text, read, split
from tests.audit.conftest import LENGTH, MIXERS

transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra 'models')")

# --- capture and interventions ---------------------------------------------------------------------------------------


def test_the_model_is_as_it_was(model: nn.Module, tokens: torch.Tensor) -> None:
    with torch.inference_mode():
        own = model(tokens, use_cache=False).logits
        implementation = model.config._attn_implementation
        recording = Recording(model, find_layers(model), tokens)
        recording.price({2: lambda q, k, v: torch.zeros(*q.shape[:3], v.shape[-1])})
        assert model.config._attn_implementation == implementation
        assert all("forward" not in layer.__dict__ for layer in model.model.layers)
        assert torch.equal(model(tokens, use_cache=False).logits, own)


def test_the_model_is_as_it_was_after_an_error(model: nn.Module, tokens: torch.Tensor, recording: Recording) -> None:
    def fail(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        recording.price({2: fail})
    assert model.config._attn_implementation != "phistate_audit"
    assert all("forward" not in layer.__dict__ for layer in model.model.layers)


def test_capture_is_after_rope_and_unrepeated(recording: Recording, model: nn.Module, tokens: torch.Tensor) -> None:
    inputs = recording.inputs[0]
    assert inputs.q.shape == (1, LENGTH, 4, 8)
    assert inputs.k.shape == inputs.v.shape == (1, LENGTH, 2, 8)
    assert inputs.plain
    assert inputs.scale == pytest.approx(8**-0.5)
    with torch.inference_mode():
        hidden = model.model.layers[0].input_layernorm(model.model.embed_tokens(tokens))
        raw = model.model.layers[0].self_attn.k_proj(hidden).view(1, LENGTH, 2, 8)
    torch.testing.assert_close(inputs.k.norm(dim=-1), raw.norm(dim=-1))  # turned, not stretched
    torch.testing.assert_close(inputs.k[:, 0], raw[:, 0])  # position 0 is not turned
    assert (inputs.k[:, 1:] - raw[:, 1:]).abs().max() > 0.1


def test_loss_is_the_models_own(recording: Recording, model: nn.Module, tokens: torch.Tensor) -> None:
    with torch.inference_mode():
        own = model(tokens, labels=tokens).loss
    assert recording.loss == pytest.approx(float(own), abs=1e-5)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_replay_equals_the_full_forward(
    model: nn.Module, tokens: torch.Tensor, recording: Recording, index: int
) -> None:
    mixing = parse("elu")[0].make(head_dim=8, scale=8**-0.5, length=LENGTH, seed=0, layer=index, sample=None)
    price = recording.price({index: mixing.attend})
    swap = {model.model.layers[index].self_attn: mixing.attend}
    with torch.inference_mode(), tapped(model, Tap(replaced=swap)):
        full = float(model(tokens, labels=tokens).loss)
    assert price.loss == pytest.approx(full, abs=1e-5)
    assert price.cost == pytest.approx(price.loss - recording.loss, abs=1e-9)
    assert abs(price.cost) > 1e-3  # else this test could not fail


def test_exact_softmax_costs_nothing(recording: Recording) -> None:
    window = parse(f"window:window={LENGTH}:sinks=0")[0]
    mixing = window.make(head_dim=8, scale=8**-0.5, length=LENGTH, seed=0, layer=0, sample=None)
    for replaced in ({0: mixing.attend}, dict.fromkeys(range(3), mixing.attend)):
        assert abs(recording.price(replaced).cost) < 1e-6
    figures, heads = candidate_figures(recording.inputs[0], mixing)
    assert figures["delta_p95"] == figures["kl_infinite"] == 0
    assert figures["top1"] == 1
    assert len(heads) == 4


def test_nothing_replaced_costs_nothing(recording: Recording) -> None:
    assert recording.price({}) == Price(0.0, 0.0, recording.loss)


@pytest.mark.parametrize("candidate", parse(DEFAULT_MIXERS), ids=lambda candidate: candidate.label)
def test_what_is_diagnosed_is_what_is_priced(recording: Recording, candidate) -> None:
    """The weights that `compare` looks at give the output that the op computes."""
    inputs = recording.inputs[1]
    mixing = candidate.make(head_dim=8, scale=inputs.scale, length=LENGTH, seed=3, layer=1, sample=None)
    exact = parse(f"window:window={LENGTH}")[0].make(
        head_dim=8, scale=inputs.scale, length=LENGTH, seed=0, layer=1, sample=None
    )
    o, o_hat = exact.attend(inputs.q, inputs.k, inputs.v), mixing.attend(inputs.q, inputs.k, inputs.v)
    error = ((o_hat - o).square().sum((1, 3)) / o.square().sum((1, 3))).sqrt()[0]
    _, heads = candidate_figures(inputs, mixing)
    torch.testing.assert_close(torch.tensor([head["output_error"] for head in heads]), error, rtol=1e-4, atol=1e-6)


def test_random_maps_are_drawn_from_seed_and_layer() -> None:
    favor = parse("favor+:num_features=8")[0]
    prints = [
        favor.make(head_dim=8, scale=1.0, length=4, seed=seed, layer=layer, sample=None).kernel.fingerprint
        for seed, layer in ((0, 0), (0, 0), (0, 1), (1, 0))
    ]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


def test_softmax_figures(recording: Recording) -> None:
    layer, heads = softmax_figures(recording.inputs[0])
    assert len(heads) == 4
    assert 0 < layer["entropy"] < torch.log(torch.tensor(float(LENGTH)))
    assert 1 < layer["effective_rank"] <= LENGTH


# --- models that are not taken ---------------------------------------------------------------------------------------


def test_layers_of_another_kind_are_left_out(tokens: torch.Tensor) -> None:
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, use_sliding_window=True, sliding_window=8, max_window_layers=2,
        layer_types=["full_attention", "full_attention", "sliding_attention"], max_position_embeddings=128,
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config).eval()
    text = Text("tokens", tokens, tokens.flip(1))
    report = audit(LoadedModel("qwen", model, None), text, parse("elu"), lengths=(16,), timing_budget=0.5)
    assert [layer.index for layer in report.layers] == [0, 1]
    assert report.left_out == [2]
    with pytest.raises(BadInput, match="--layers: got 2, which is no plain softmax layer; takes some of 0-1"):
        audit(LoadedModel("qwen", model, None), text, parse("elu"), layers=[2])
    with pytest.raises(BadInput, match="--layers: got 7, which is not there"):
        audit(LoadedModel("qwen", model, None), text, parse("elu"), layers=[7])


def test_an_encoder_is_refused() -> None:
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    with pytest.raises(BadInput, match="BertLMHeadModel, an encoder"):
        find_layers(transformers.BertLMHeadModel(config).eval())


def test_attention_outside_the_interface_is_refused() -> None:
    config = transformers.MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, state_size=4)
    with pytest.raises(BadInput, match="MambaForCausalLM, whose attention does not go through"):
        find_layers(transformers.MambaForCausalLM(config).eval())
    config = transformers.BloomConfig(vocab_size=64, hidden_size=16, n_layer=2, n_head=2)
    with pytest.raises(BadInput, match="BloomForCausalLM, whose attention does not go through"):
        find_layers(transformers.BloomForCausalLM(config).eval())


def test_attention_with_more_than_softmax_is_refused() -> None:
    config = transformers.GptOssConfig(
        vocab_size=64, hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_local_experts=2, num_experts_per_tok=1, sliding_window=64,
        initializer_range=0.5,
    )  # fmt: skip
    with pytest.raises(BadInput, match="GptOssForCausalLM"):
        find_layers(transformers.GptOssForCausalLM(config).eval())


def test_a_map_that_does_not_fit_the_heads_is_refused(model: nn.Module, tokens: torch.Tensor) -> None:
    text = Text("tokens", tokens, tokens.flip(1))
    with pytest.raises(BadInput, match="--mixers: got 'hedgehog:query_heads=3', which does not fit layer 0: x: got"):
        audit(LoadedModel("tiny", model, None), text, parse("hedgehog:query_heads=3"))
    with pytest.raises(BadInput, match="makes 75582 features a head; takes at most 50000"):
        audit(LoadedModel("tiny", model, None), text, parse("taylor:order=11"))


# --- plans -----------------------------------------------------------------------------------------------------------


def prices(**columns: list[float]) -> dict[int, dict[str, Price]]:
    rows = zip(*columns.values(), strict=True)
    return {
        n: {label: Price(cost, 0.0, 1.0) for label, cost in zip(columns, row, strict=True)}
        for n, row in enumerate(rows)
    }


def test_counts() -> None:
    assert counts(1) == [1]
    assert counts(8) == [1, 2, 4, 8]
    assert counts(30) == [1, 2, 4, 8, 16, 30]


def test_plans_take_the_cheapest_layers() -> None:
    table = prices(window=[0.3, 0.1, 0.2], elu=[0.2, 0.4, 0.0], taylor=[0.5, 0.6, 0.1])
    plans = {(plan.name, len(plan.replaced)): plan for plan in cumulative(table, ["window"])}
    assert dict(plans["window", 2].replaced) == {1: "window", 2: "window"}
    assert dict(plans["elu", 1].replaced) == {2: "elu"}
    assert dict(plans[CHEAPEST, 2].replaced) == {2: "elu", 1: "window"}
    assert dict(plans[CHEAPEST_MAP, 3].replaced) == {2: "elu", 0: "elu", 1: "elu"}
    assert plans[CHEAPEST, 2].expected == pytest.approx(0.1)
    assert dict(under(table, ["window", "elu"], 0.15, "cheap").replaced) == {2: "elu", 1: "window"}
    assert not under(table, ["taylor"], 0.05, "cheap").replaced


def test_equal_plans_are_measured_once() -> None:
    table = prices(window=[0.3], elu=[0.2])
    asked = []

    def price(replaced):
        asked.append(dict(replaced))
        return Price(1.0, 0.0, 1.0)

    plans = cumulative(table, ["window"])
    assert len(measure(plans, price, lambda: None)) == len(plans) == 3
    assert asked == [{0: "window"}, {0: "elu"}]


# --- the report ------------------------------------------------------------------------------------------------------


def test_report_holds_every_figure(report: Report) -> None:
    found = json.loads(json.dumps(report.to_json(), allow_nan=False))
    labels = MIXERS.split(",")
    assert found["mixers"] == labels
    assert [layer["layer"] for layer in found["layers"]] == [0, 1, 2]
    for layer in found["layers"]:
        assert layer["cheapest"] in labels
        assert len(layer["softmax"]["heads"]) == 4
        assert layer["candidates"]["window:window=4:sinks=1"]["kl"] is not None
        assert layer["candidates"]["window:window=4:sinks=1"]["kl_infinite"] > 0.5
        for label, figures in layer["candidates"].items():
            assert len(figures["heads"]) == 4
            assert set(figures["heads"][0]) == set(figures) - {"cost", "standard_error", "loss", "heads"}
            assert (figures["negative_share"] > 0) == label.startswith("rff")
    plans = {(plan["plan"], plan["count"]) for plan in found["plans"]}
    assert {(name, n) for name in (*labels, CHEAPEST, CHEAPEST_MAP) for n in (1, 2, 3)} <= plans
    assert [entry["mixer"] for entry in found["timing"]] == ["softmax", *labels]
    assert all(entry["seconds"] > 0 for way in found["timing"] for entry in way["lengths"])
    state = {way["mixer"]: way["lengths"][-1]["bytes"] for way in found["timing"]}
    assert state["softmax"] == 32 * 2 * 16 * 4
    assert state["window:window=4:sinks=1"] == 5 * 2 * 16 * 4
    assert state["elu"] == 2 * 8 * 9 * 4


def test_prices_in_the_report_are_the_models(report: Report, recording: Recording) -> None:
    mixing = parse("elu")[0].make(head_dim=8, scale=8**-0.5, length=LENGTH, seed=0, layer=1, sample=None)
    assert report.layers[1].candidates["elu"].price == recording.price({1: mixing.attend})
    assert report.loss_choose == recording.loss


def test_plans_are_measured_on_the_other_text(report: Report, model: nn.Module, tokens: torch.Tensor) -> None:
    other = Recording(model, find_layers(model), tokens.flip(1))
    assert report.loss_measure == other.loss != report.loss_choose
    mixing = parse("elu")[0].make(head_dim=8, scale=8**-0.5, length=LENGTH, seed=0, layer=0, sample=None)
    found = report.plan("elu", 3)
    assert found is not None
    assert found.price == other.price(dict.fromkeys(range(3), mixing.attend))


def test_verdict_follows_from_the_figures(report: Report) -> None:
    which, against, buys = report.verdict()
    cheap = report.plan("all under 0.01 nats")
    assert cheap is not None
    if cheap.plan.replaced:
        assert f"{len(cheap.plan.replaced)} of 3 layers" in which
        assert f"{cheap.price.cost:+.3f}" in which
    else:
        assert which.startswith("None of the 3 layers")
    base, best = report.plan("window:window=4:sinks=1", 1), report.plan(CHEAPEST_MAP, 1)
    assert base is not None
    assert best is not None
    assert f"{base.price.cost:+.3f}" in against
    assert f"{best.price.cost:+.3f}" in against
    assert "tokens" in buys


@pytest.mark.parametrize("mixers", ["uniform", "elu", "window", "elu,taylor"])
def test_verdict_stands_with_few_candidates(model: nn.Module, tokens: torch.Tensor, mixers: str) -> None:
    text = Text("tokens", tokens, tokens.flip(1))
    report = audit(LoadedModel("tiny", model, None), text, parse(mixers), layers=[1], lengths=(16,), timing_budget=0.1)
    assert len(report.verdict()) == 3


def test_crossover() -> None:
    assert timing.crossover({1: 1.0, 2: 2.0, 4: 4.0}, {1: 0.5, 2: 3.0, 4: 3.0}) == 4
    assert timing.crossover({1: 1.0, 2: 2.0}, {1: 2.0, 2: 2.0}) is None
    assert timing.crossover({1: 1.0, 2: None}, {1: 0.5, 2: None}) == 1


def test_timing_keeps_its_budget() -> None:
    shape = timing.Shape(heads=2, kv_heads=1, head_dim=8, value_dim=8, scale=1.0)
    found = timing.time_attention(parse("elu"), shape, lengths=(64, 2**22), budget=0.5)
    assert all(way.seconds[64] is not None for way in found)
    softmax, elu = found
    assert softmax.seconds[2**22] is None  # foreseen to take hours
    assert softmax.repeats[2**22] == 0
    assert elu.backend in {"torch", "cpu"}


# --- text and candidates ---------------------------------------------------------------------------------------------


def test_default_text_is_there_and_the_same_every_time() -> None:
    words, source = read(None, 8)
    assert source == "pydoc_data.topics"
    assert len(words) > 100_000
    assert words == read(None, 8)[0]


def test_text_is_cut_in_two(folder: Path) -> None:
    loaded = models.load(str(folder))
    words, source = read(folder / "text.txt", 50)
    text = split(words, source, loaded, 50)
    ids = loaded.tokenizer(words).input_ids
    assert text.choose.tolist() == [ids[:50]]
    assert text.measure.tolist() == [ids[50:100]]
    with pytest.raises(BadInput, match=r"got 200 tokens in .* with --length 101; takes at least 202"):
        split(words, source, loaded, 101)


@pytest.mark.parametrize("name", sorted(set(accepted()) - {"window"}))
def test_every_accepted_name_attends(recording: Recording, name: str) -> None:
    inputs = recording.inputs[1]
    sample = (inputs.q, inputs.k)
    mixing = parse(name)[0].make(head_dim=8, scale=inputs.scale, length=LENGTH, seed=0, layer=1, sample=sample)
    assert mixing.attend(inputs.q, inputs.k, inputs.v).isfinite().all()
    assert candidate_figures(inputs, mixing)[0]["output_error"] is not None


@pytest.mark.parametrize("text,message", [
    ("nope", "--mixers: got 'nope'; takes "),
    ("", "--mixers: got ''; takes "),
    ("elu,elu", "--mixers: got 'elu' twice"),
    ("elu:alpha=2", "--mixers: got 'elu:alpha=2'; alpha: got an unknown option"),
    ("taylor:order", "takes name:option=value"),
    ("taylor:order=-1", "--mixers: got 'taylor:order=-1'; order"),
    ("window:window=0", "window: got 0; takes an integer ≥ 1"),
    ("window:width=3", "width: got an unknown option of 'window'; takes window, sinks"),
    ("gla", "--mixers: got 'gla'; takes "),
    ("favor+:generator=3", "--seed fixes the draw"),
])  # fmt: skip
def test_bad_mixers_are_named(text: str, message: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_seed_fixes_everything_but_time(model: nn.Module, tokens: torch.Tensor, report: Report) -> None:
    text = Text("tokens", tokens, tokens.flip(1))
    again, other = (
        audit(LoadedModel("tiny", model, None), text, parse(MIXERS), seed=seed, lengths=(16, 32), timing_budget=0.5)
        for seed in (0, 1)
    )
    found = []
    for one in (report, again, other):
        values = one.to_json()
        values["verdict"] = one.verdict()[:2]
        found.append(
            {name: value for name, value in values.items() if name not in ("timing", "seconds", "seed", "machine")}
        )
    assert found[0] == found[1]
    assert found[0] != found[2]


# --- the default model -----------------------------------------------------------------------------------------------


@pytest.mark.skipif(
    not models.default_model_cached() and not os.environ.get("PHISTATE_TEST_SMOLLM2"),
    reason="SmolLM2's weights are not cached and PHISTATE_TEST_SMOLLM2 does not allow to fetch them (93 MB)",
)
def test_smollm2() -> None:
    loaded = models.load()
    words, source = read(None, 128)
    text = split(words, source, loaded, 128)
    report = audit(loaded, text, parse("uniform,window:window=32:sinks=4,elu"), layers=[0, 9, 29], lengths=(256,))
    assert report.all_layers == 30
    assert (report.shape.heads, report.shape.kv_heads, report.shape.head_dim) == (9, 3, 64)
    assert 2 < report.loss_measure < 5  # nats; a model that reads, not noise
    for layer in report.layers:
        window, uniform = (layer.candidates[label].price.cost for label in report.baselines[::-1])
        assert window < uniform
        assert abs(window) < 0.2
