"""Which text the model reads: a file's, or the English prose that every Python carries."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from phistate.audit.errors import BadInput
from phistate.audit.models import LoadedModel

DEFAULT_TEXT = "pydoc_data.topics"
"""The language reference that ``help()`` shows: half a million characters of prose about Python."""


@dataclass(frozen=True)
class Text:
    """Two stretches of one text: on the first layers are chosen, on the second plans are measured."""

    source: str
    choose: Tensor
    """``[1,T]`` token ids."""
    measure: Tensor
    """``[1,T]`` token ids."""


def read(path: Path | None, length: int) -> tuple[str, str]:
    """The text and what to call it.

    Raises:
        BadInput: a file that cannot be read as UTF-8, or has fewer bytes than 2 · ``length`` tokens could have.
    """
    if path is None:
        from pydoc_data.topics import topics

        # Long topics are chapters of prose, short ones little but grammar; ties go by name.
        order = sorted(topics, key=lambda name: (-len(topics[name]), name))
        return "\n\n".join(topics[name] for name in order), DEFAULT_TEXT
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise BadInput(f"--text: got {str(path)!r} ({reason}); takes a UTF-8 text file") from None
    if len(text.encode()) < 2 * length:  # no tokenizer makes more tokens than bytes, and this is known at once
        raise BadInput(_too_short(f"{len(text)} characters", str(path), length))
    return text, str(path)


def split(text: str, source: str, loaded: LoadedModel, length: int) -> Text:
    """The first ``2 · length`` tokens as a half to choose on and a half to measure on.

    Raises:
        BadInput: fewer tokens than that, naming both; a length beyond what the model takes.
    """
    needed = 2 * length
    longest = getattr(loaded.model.config, "max_position_embeddings", None)  # not every architecture has a limit
    if longest is not None and length > longest:
        raise BadInput(f"--length: got {length}; {loaded.name} takes at most {longest}")
    tokenizer = loaded.tokenizer
    # Tokenizing a whole book for two thousand tokens is slow; English needs some 4 characters for one.
    ids = tokenizer(text[: 16 * needed]).input_ids
    if len(ids) < needed:
        ids = tokenizer(text).input_ids
    if len(ids) < needed:
        raise BadInput(_too_short(f"{len(ids)} tokens", source, length))
    choose, measure = torch.tensor(ids[:needed]).view(2, 1, length)
    return Text(source, choose, measure)


def _too_short(got: str, source: str, length: int) -> str:
    return (
        f"--text: got {got} in {source!r} with --length {length}; takes at least {2 * length} tokens, "
        "half to choose layers on and half to measure on"
    )
