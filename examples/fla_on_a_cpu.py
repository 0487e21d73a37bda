"""A model of flash-linear-attention's, whose kernels need a GPU: built, trained for a few steps and run on a CPU.

    python examples/fla_on_a_cpu.py                 # gated delta rule and softmax, by turns
    python examples/fla_on_a_cpu.py --family kda    # gla, retnet, rwkv7, mamba2, …

Needs flash-linear-attention and a Triton that imports: pip install 'phistate[fla]'.
"""

import argparse
import time
import warnings

import torch
import transformers

import phistate.compat
import phistate.hf
from phistate.bench.families import Size
from phistate.bench.fla_families import FLA_FAMILIES, fla_model

# A phrase that goes round, and comes back to one of its tokens on another way each time.
PHRASE = torch.tensor([5, 9, 5, 12, 7, 9, 12, 5, 20, 7, 31, 9, 20, 12, 31, 7, 40])


def batch(rows: int, length: int) -> torch.Tensor:
    """The phrase, begun anywhere."""
    return PHRASE[(torch.randint(len(PHRASE), (rows, 1)) + torch.arange(length)) % len(PHRASE)]


def main() -> None:
    """Train, generate, and compare the generated tokens with what a forward without a cache says."""
    names = [name.removeprefix("fla.") for name in FLA_FAMILIES]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--family", choices=names, default="gated_deltanet_hybrid")
    parser.add_argument("--steps", type=int, default=60)
    family = f"fla.{parser.parse_args().family}"
    steps = parser.parse_args().steps
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", message="Triton is not supported")

    torch.manual_seed(0)
    model = fla_model(family, Size(layers=4, width=128, head=32, state=32, vocab=64))
    ids = batch(8, 68)
    try:
        model(ids)
    except Exception as error:
        print(f"without phistate: {type(error).__name__}: {str(error).splitlines()[0]}\n")

    report = phistate.hf.accelerate(model)
    print(report, "\n")
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    begin = time.perf_counter()
    for step in range(steps):
        ids = batch(8, 68)
        loss = model(ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == steps - 1:
            print(f"step {step:3}  loss {loss.item():.3f}  {time.perf_counter() - begin:5.1f} s")

    model.eval()
    known, new = 10, 60
    right = batch(1, known + new)
    prompt = right[:, :known]
    out = model.generate(
        prompt, max_new_tokens=new, do_sample=False, eos_token_id=None, attention_mask=torch.ones_like(prompt)
    )
    with torch.no_grad():
        whole = model(out[:, :-1]).logits[:, known - 1 :].argmax(-1)
    print(f"\n{new} tokens generated after {known}, each from the states before it:")
    print(f"{int((out[:, known:] == whole).sum())} are what one forward of all of them says,")
    print(f"{int((out == right)[:, known:].sum())} are the phrase's")


if __name__ == "__main__":
    main()
