"""Runs transformers' delta-rule models where fla cannot be imported, with its stand-ins or without; writes answers.

python -m tests.compat.run_without_triton {plain|stand-ins} FILE FAMILY...
"""

import sys

import torch

import phistate.compat
from phistate.bench.families import Size, family_config, random_model

SIZE = Size(layers=4, width=64, head=32, state=16, vocab=97)


class NoTriton:
    """Importing fla fails, as it does without Triton, whether it is installed or not."""

    def find_spec(self, name, path=None, target=None):
        if name == "fla":
            raise ImportError("No module named 'triton'")


def answers(name):
    """Gradients, logits and greedily decoded tokens."""
    net = random_model(family_config(name, SIZE), lively=True)
    ids = torch.randint(3, SIZE.vocab, (2, 80), generator=torch.Generator().manual_seed(0))
    net(ids, use_cache=False).logits.square().mean().backward()
    found = {f"gradient of {path}": p.grad for path, p in net.named_parameters() if p.grad is not None}
    how = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        return found | {"logits": net(ids, use_cache=False).logits, "tokens": net.generate(ids, **how)}


def main(how, file, *families):
    torch.set_num_threads(1)
    sys.meta_path.insert(0, NoTriton())
    if how == "stand-ins":
        report = phistate.compat.install("fla")
        assert "No module named 'triton'" in report.replaced[0].what
        from fla.modules import FusedRMSNormGated, ShortConvolution
        from fla.ops import chunk_gla
        from fla.ops.kda import chunk_kda

        assert all(x.__module__.startswith("phistate.") for x in (FusedRMSNormGated, ShortConvolution, chunk_kda))
        q = torch.randn(1, 3, 2, 4)
        assert chunk_gla(q, q, q, -q.abs())[0].shape == q.shape
    torch.save({name: answers(name) for name in families}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
