"""A Kimi-Linear-shaped model made fast by one line, the same answers before and after. Runs in a minute.

python examples/accelerate_hybrid.py
"""

import time

import torch
import transformers

from phistate.hf import accelerate

transformers.logging.set_verbosity_error()
torch.manual_seed(0)
config = transformers.KimiLinearConfig(
    vocab_size=4096,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=4,
    layer_types=["linear_attention"] * 3 + ["full_attention"],
    mlp_layer_types=["dense"] * 4,
    num_attention_heads=4,
    num_key_value_heads=4,
    linear_num_heads=4,
    kv_lora_rank=128,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
prompt = torch.randint(3, config.vocab_size, (1, 512))


def measure(what: str) -> torch.Tensor:
    """Time a prefill and 16 generated tokens; the prompt's logits."""
    with torch.no_grad():
        model(prompt[:, :32])  # warms up
        begin = time.perf_counter()
        logits = model(prompt).logits
        prefill = time.perf_counter() - begin
        begin = time.perf_counter()
        model.generate(prompt[:, :32], max_new_tokens=16, do_sample=False, eos_token_id=None)
        decode = time.perf_counter() - begin
    print(f"{what:12}  prefill {prompt.numel() / prefill:7.0f} tokens/s   generate {16 / decode:6.1f} tokens/s")
    return logits


before = measure("transformers")
with accelerate(model) as report:
    after = measure("accelerated")
    print(f"\n{report}\n")
print(f"largest difference of the logits: {(after - before).abs().max():.1e} of {before.abs().max():.1f}")
