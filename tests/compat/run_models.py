"""Runs transformers' Mamba models in a process of its own, with stand-ins or without, and writes their answers.

python -m tests.compat.run_models {plain|stand-ins} FILE FAMILY...
"""

import contextlib
import sys

import torch

import phistate.compat
from phistate.bench.families import Size, family_config, random_model
from phistate.hf import accelerate

SIZE = Size(layers=4, width=64, head=32, state=16, vocab=97)


def answers(name):
    """Gradients, logits, greedily decoded tokens with their logits, and logits of the accelerated model."""
    net = random_model(family_config(name, SIZE), lively=True)
    ids = torch.randint(3, SIZE.vocab, (2, 20), generator=torch.Generator().manual_seed(0))
    found = {}
    net.train()
    # Training, FalconMamba normalises Δ after its projection where there is a fused function, and before it elsewhere:
    # accelerate() has it train as it answers.
    with accelerate(net) if name == "falcon_mamba" else contextlib.nullcontext():
        net(ids, use_cache=False).logits.square().mean().backward()
    found |= {f"gradient of {name}": p.grad for name, p in net.named_parameters() if p.grad is not None}
    net.eval()
    with torch.no_grad():
        found["logits"] = net(ids, use_cache=False).logits
        how = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "attention_mask": torch.ones_like(ids)}
        out = net.generate(ids, return_dict_in_generate=True, output_logits=True, **how)
        found["tokens"], found["decoded"] = out.sequences, torch.stack(out.logits)
        with accelerate(net):
            found["accelerated logits"] = net(ids, use_cache=False).logits
    return found


def native(function):
    """What a function of transformers hands its calls to."""
    inside = [cell.cell_contents for cell in function.__closure__]
    return [found for found in inside if callable(found) and found.__module__.startswith("phistate")]


def main(how, file, *families):
    torch.set_num_threads(1)
    if how == "stand-ins":
        phistate.compat.install("mamba_ssm", "causal_conv1d")
    found = {name: answers(name) for name in families}
    from transformers.models.mamba import modeling_mamba as mamba
    from transformers.models.mamba2 import modeling_mamba2 as mamba2

    functions = [
        mamba.mamba_inner_fn,
        mamba.mamba_selective_scan,
        mamba.mamba_selective_state_update,
        mamba.causal_conv1d_fn,
        mamba.causal_conv1d_update,
        mamba2.mamba2_chunk_scan,
        mamba2.mamba2_selective_state_update,
        mamba2.mamba2_split_conv1d_scan_combined,
    ]
    expected = how == "stand-ins"
    assert all(bool(native(function)) == expected for function in functions)
    torch.save(found, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
