"""Generation of fla's models: what transformers hands them under a name that they do not know."""

from __future__ import annotations

import functools
from typing import Any

from phistate.compat.functions import Function, Hook


def _prepare_inputs(original: Function) -> Function:
    """transformers from 5.20 on calls the cache ``cache``; fla's models take ``past_key_values`` and drop the other.

    Every new token was then computed without a history, and nothing said so.
    """

    @functools.wraps(original)
    def prepare(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs: dict[str, Any] = original(self, *args, **kwargs)
        if inputs.get("cache") is not None:
            inputs["past_key_values"] = inputs.pop("cache")
        return inputs

    return prepare


CORRECTED: dict[str, dict[str, Hook]] = {
    "fla.models.generation_utils": {
        "FLAGenerationMixin.prepare_inputs_for_generation": Hook(
            "self, input_ids=None, past_key_values=None, attention_mask=None, inputs_embeds=None, use_cache=True, "
            "logits_to_keep=None, cache_position=None, next_sequence_length=None, is_first_iteration=False, **kwargs",
            "generate() hands the cache on to models that know it as past_key_values",
            _prepare_inputs,
            1,
            True,
        )
    }
}
