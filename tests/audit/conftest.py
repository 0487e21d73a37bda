"""A small random model, its tokenizer and a text: what the audit's tests run on."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from phistate.audit.candidates import parse
from phistate.audit.capture import find_layers
from phistate.audit.interventions import Recording
from phistate.audit.models import LoadedModel
from phistate.audit.report import Report
from phistate.audit.run import audit
from phistate.audit.text import Text

WORDS = [f"w{n}" for n in range(62)]
LENGTH = 24
MIXERS = "uniform,window:window=4:sinks=1,elu,taylor:order=2,favor+:num_features=16,rff:num_features=16"


def tiny_llama(**settings: object) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **{
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 128,
            "initializer_range": 0.4,  # large enough that attention is far from uniform
            **settings,
        }
    )
    return transformers.LlamaForCausalLM(config).eval()


def save_tokenizer(folder: Path) -> None:
    import transformers
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer = Tokenizer(WordLevel({"[UNK]": 0, **{word: n + 1 for n, word in enumerate(WORDS)}}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)


@pytest.fixture(scope="module", autouse=True)
def one_thread_for_the_module() -> Iterator[None]:
    """Fixtures of the module come before the one thread that every test has."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_llama()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, model: nn.Module) -> Path:
    """A saved model with its tokenizer, and a text of 200 words beside it."""
    folder = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(folder)
    save_tokenizer(folder)
    generator = torch.Generator().manual_seed(1)
    picks = torch.randint(len(WORDS), (200,), generator=generator).tolist()
    (folder / "text.txt").write_text(" ".join(WORDS[n] for n in picks), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(64, (1, LENGTH), generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def recording(model: nn.Module, tokens: torch.Tensor) -> Recording:
    return Recording(model, find_layers(model), tokens)


@pytest.fixture(scope="module")
def report(model: nn.Module, tokens: torch.Tensor) -> Report:
    text = Text("tokens", tokens, tokens.flip(1))
    return audit(LoadedModel("tiny", model, None), text, parse(MIXERS), lengths=(16, 32), timing_budget=2.0)
