"""A language model written for mamba_ssm, trained and decoded on a CPU: its own imports, phistate's kernels. A minute.

python examples/mamba_ssm_on_a_cpu.py
"""

import time

import torch
import torch.nn.functional as F

import phistate.compat

report = phistate.compat.install("mamba_ssm", "causal_conv1d")

# From here to the next comment nothing knows of phistate.
from mamba_ssm import Mamba, Mamba2  # noqa: E402
from mamba_ssm.ops.triton.layer_norm import RMSNorm  # noqa: E402
from mamba_ssm.utils.generation import InferenceParams  # noqa: E402


class LanguageModel(torch.nn.Module):
    """Layers of Mamba and Mamba2 in turn."""

    def __init__(self, vocab: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(vocab, width)
        torch.nn.init.normal_(self.embedding.weight, std=0.1)
        self.mixers = torch.nn.ModuleList(
            Mamba2(width, d_state=32, headdim=32, layer_idx=i) if i % 2 else Mamba(width, layer_idx=i)
            for i in range(layers)
        )
        self.norms = torch.nn.ModuleList(RMSNorm(width) for _ in range(layers))
        self.last_norm = RMSNorm(width)

    def forward(self, tokens: torch.Tensor, inference_params: InferenceParams | None = None) -> torch.Tensor:
        """Logits of the next token, ``[B,T] -> [B,T,vocab]``."""
        x = self.embedding(tokens)
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            x = x + mixer(norm(x), inference_params=inference_params)
        return F.linear(self.last_norm(x), self.embedding.weight)


# To learn: each sequence counts round a circle of numbers, by a step of its own.
torch.manual_seed(0)
VOCAB, LENGTH, DECODED = 13, 32, 12


def batch(rows: int) -> torch.Tensor:
    """Sequences that count."""
    first, step = torch.randint(VOCAB, (rows, 1)), torch.randint(1, 7, (rows, 1))
    return (first + step * torch.arange(LENGTH)) % VOCAB


model = LanguageModel(VOCAB, width=64, layers=2)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
begin = time.perf_counter()
for step in range(61):
    tokens = batch(16)
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step:3}  loss {loss.item():.3f}   {time.perf_counter() - begin:4.1f} s")

# Decode: the prompt at once, then token by token from the states in the cache.
model.eval()
tokens = batch(4)
prompt = tokens[:, : LENGTH - DECODED]
with torch.no_grad():
    cache = InferenceParams(max_seqlen=LENGTH, max_batch_size=4)
    logits = [model(prompt, inference_params=cache)[:, -1]]
    cache.seqlen_offset = prompt.shape[1]
    written = [logits[-1].argmax(-1)]
    for _ in range(DECODED - 1):
        logits.append(model(written[-1][:, None], inference_params=cache)[:, -1])
        cache.seqlen_offset += 1
        written.append(logits[-1].argmax(-1))
    continued = torch.stack(written, 1)
    whole = model(torch.cat([prompt, continued], 1))[:, prompt.shape[1] - 1 : -1]

cached = torch.stack(logits, 1)
error = ((cached - whole).abs().max() / whole.abs().max()).item()
right = (continued == tokens[:, LENGTH - DECODED :]).float().mean().item()
print(
    f"decoded with states = whole pass, to {error:.0e} of the largest logit; {right:.0%} of the tokens continue rightly"
)
assert error < 1e-4

print("what ran:")
for entry in report.replaced:
    if entry.where in ("mamba_ssm", "causal_conv1d"):
        print(f"  {entry.where:13} {entry.name:20} {entry.what}")
report.undo()
