"""Loads a model with code of its own, as trust_remote_code does, in a process of its own; with stand-ins it runs.

python -m tests.compat.run_remote {plain|stand-ins} DIRECTORY
"""

import sys

import torch
from transformers import AutoModelForCausalLM

import phistate.compat


def main(how, directory):
    if how == "stand-ins":
        phistate.compat.install("mamba_ssm", "causal_conv1d")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)
    ids = torch.randint(0, model.config.vocab_size, (2, 12))
    out = model(ids, labels=ids)
    out.loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in model.parameters())
    with torch.no_grad():
        states = model.empty(2)
        parts = [model(ids[:, :5], states=states).logits]
        parts += [model(ids[:, t : t + 1], states=states).logits for t in range(5, 12)]
    torch.testing.assert_close(torch.cat(parts, 1), out.logits.detach(), rtol=1e-4, atol=1e-5)
    print("cached = uncached")


if __name__ == "__main__":
    main(*sys.argv[1:])
