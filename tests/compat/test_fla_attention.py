"""flash_attn's functions, token shift, RWKV's and the delta rule's gates on a CPU, beside fla's references."""

import importlib

import pytest
import torch
import torch.nn.functional as F

from phistate.compat.fla.modules import attention, rwkv, token_shift
from phistate.compat.fla.ops import gates
from tests.compat.agreement import agree

both = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def softmax(q, k, v, scale=None, causal=False, window=(-1, -1)):
    """``[B,T,H,D]`` attention written out; a query that sees no key gives 0."""
    Tq, Tk = q.shape[1], k.shape[1]
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    logits = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    ahead = torch.arange(Tk) - torch.arange(Tk - Tq, Tk)[:, None]
    seen = torch.ones(Tq, Tk, dtype=torch.bool)
    if window[0] >= 0:
        seen &= ahead >= -window[0]
    if window[1] >= 0:
        seen &= ahead <= window[1]
    if causal:
        seen &= ahead <= 0
    weights = logits.masked_fill(~seen, -1e30).softmax(-1).masked_fill(~seen, 0.0)
    return torch.einsum("bhij,bjhd->bihd", weights, v)


@both
@pytest.mark.parametrize("lengths", [(9, 9), (1, 9), (4, 9), (9, 4)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [(-1, -1), (2, 0), (2, 3), (-1, 1), (1, -1), (0, 0)])
def test_flash_attention(dtype, lengths, causal, window):
    q = torch.randn(2, lengths[0], 4, 8)
    k, v = torch.randn(2, lengths[1], 2, 8), torch.randn(2, lengths[1], 2, 6)

    def ours(q, k, v):
        return attention.flash_attn_func(q, k, v, softmax_scale=0.3, causal=causal, window_size=window)

    agree(ours, lambda q, k, v: softmax(q, k, v, 0.3, causal, window), q, k, v, dtype=dtype)


def test_flash_attention_scale():
    q, k, v = torch.randn(3, 1, 5, 2, 8)
    torch.testing.assert_close(attention.flash_attn_func(q, k, v), softmax(q, k, v))


@both
@pytest.mark.parametrize("lengths", [([3, 0, 5, 1], [3, 0, 5, 1]), ([1, 1, 1], [4, 1, 7]), ([2, 2], [0, 3])])
@pytest.mark.parametrize("window", [(-1, -1), (1, 0)])
def test_flash_attention_packed(dtype, lengths, window):
    cu_q, cu_k = (F.pad(torch.tensor(n).cumsum(0), (1, 0)).int() for n in lengths)
    q = torch.randn(sum(lengths[0]), 4, 8)
    k, v = torch.randn(2, sum(lengths[1]), 2, 8)

    def ours(q, k, v):
        return attention.flash_attn_varlen_func(
            q, k, v, cu_q, cu_k, max(lengths[0]), max(lengths[1]), causal=True, window_size=window
        )

    def reference(q, k, v):
        parts = zip(q.split(lengths[0]), k.split(lengths[1]), v.split(lengths[1]), strict=True)
        return torch.cat([softmax(*(x[None] for x in p), causal=True, window=window)[0] for p in parts])

    agree(ours, reference, q, k, v, dtype=dtype)


def test_flash_attention_refuses():
    q = torch.randn(1, 5, 2, 8)
    for name, value in {"dropout_p": 0.1, "softcap": 2.0, "alibi_slopes": q, "return_attn_probs": True}.items():
        with pytest.raises(ValueError, match=f"{name}: got"):
            attention.flash_attn_func(q, q, q, **{name: value})
    cu = torch.tensor([0, 2, 5])
    with pytest.raises(ValueError, match="block_table: got one"):
        attention.flash_attn_varlen_func(q[0], q[0], q[0], cu, cu, 3, 3, block_table=cu)
    with pytest.raises(ValueError, match="cu_seqlens_k: got 1 sequences; takes 2"):
        attention.flash_attn_varlen_func(q[0], q[0], q[0], cu, torch.tensor([0, 5]), 3, 5)
    with pytest.raises(ValueError, match="cu_seqlens_q: got None"):
        attention.flash_attn_varlen_func(q[0], q[0], q[0], None, cu, 3, 3)


@both
@pytest.mark.parametrize("bounds", [None, [3, 0, 1, 2]])
@pytest.mark.parametrize("cached", [False, True])
def test_token_shift(fla, dtype, bounds, cached):
    ref = importlib.import_module("fla.modules.token_shift").token_shift_ref
    cu = None if bounds is None else F.pad(torch.tensor(bounds).cumsum(0), (1, 0)).int()
    x = torch.randn(1 if bounds else 2, 6, 4)
    cache = torch.randn(len(bounds) if bounds else 2, 4) if cached else None

    def ours(x, cache):
        return token_shift.token_shift(x, cu, cache, output_cache=True)

    def reference(x, cache):
        rows = list(x) if bounds is None else x[0].split(bounds)
        past = x.new_zeros(len(rows), 4) if cache is None else cache
        series = [torch.cat([p[None], row]) for p, row in zip(past, rows, strict=True)]
        deltas = [s[:-1] - s[1:] for s in series]
        delta = torch.stack(deltas) if bounds is None else torch.cat(deltas)[None]
        return delta, torch.stack([s[-1] for s in series])

    agree(ours, reference, x, cache, dtype=dtype)
    if not cached:
        torch.testing.assert_close(token_shift.token_shift(x, cu), ref(x, cu))


def test_token_shift_of_nothing():
    cache = torch.randn(2, 4)
    delta, last = token_shift.token_shift(torch.zeros(2, 0, 4), cache=cache, output_cache=True)
    assert delta.shape == (2, 0, 4)
    assert torch.equal(last, cache)
    with pytest.raises(ValueError, match="cache: got shape"):
        token_shift.token_shift(torch.zeros(2, 3, 4), cache=cache[:1])


@both
def test_rwkv7(fla, dtype):
    addcmul = importlib.import_module("fla.ops.rwkv7.fused_addcmul").torch_addcmul_rwkv7
    x, delta = torch.randn(2, 2, 5, 8)
    mixes = torch.randn(6, 1, 1, 8)
    agree(rwkv.fused_addcmul_rwkv7, addcmul, x, delta, *mixes, dtype=dtype)
    agree(rwkv.fused_addcmul_rwkv7, addcmul, x, delta, *mixes[:5], dtype=dtype)
    assert rwkv.fused_addcmul_rwkv7(x, delta, *mixes[:5])[5] is None

    agree(
        rwkv.fused_k_rwkv7,
        importlib.import_module("fla.ops.rwkv7.fused_k_update").k_update_ref,
        x,
        delta,
        mixes[0, 0, 0],
        dtype=dtype,
    )

    correction = importlib.import_module("fla.ops.rwkv7.gate_output_correction").gate_output_correction_ref
    r, k, v = torch.randn(3, 2, 5, 2, 4)
    agree(rwkv.gate_output_correction, correction, x, r, k, torch.randn(2, 4), v, delta, dtype=dtype)

    mixing = importlib.import_module("fla.ops.rwkv7.channel_mixing").channel_mixing_rwkv7_torch
    inputs = (torch.randn(2, 8), torch.randn(8), torch.randn(8, 16), torch.randn(16, 8))
    agree(rwkv.channel_mixing_rwkv7, mixing, x, *inputs, dtype=dtype)
    with pytest.raises(ValueError, match="x: got shape"):
        rwkv.channel_mixing_rwkv7(x[0], *inputs)


@both
def test_gates(dtype):
    g, A_log, bias = torch.randn(2, 5, 3), torch.randn(3), torch.randn(3)
    full = {torch.bfloat16: torch.float32, torch.float32: torch.float32, torch.float64: torch.float64}

    def decay(g, A_log, bias):
        g, A_log, bias = (None if t is None else t.to(full[t.dtype]) for t in (g, A_log, bias))
        return -A_log.exp() * F.softplus(g if bias is None else g + bias)

    def gated(g, A_log, bias):
        return gates.fused_gdn_gate(g, A_log, bias, full[g.dtype])

    agree(gated, decay, g, A_log, bias, dtype=dtype)
    agree(gated, decay, g, A_log, None, dtype=dtype)
    agree(lambda x: gates.fused_beta_sigmoid(x, 2.0), lambda x: 2 * x.to(full[x.dtype]).sigmoid(), g, dtype=dtype)

    g, bias = torch.randn(2, 5, 3, 4), torch.randn(12)

    def channels(g, A_log, bias):
        return gates.fused_kda_gate(g, A_log, bias, None, full[g.dtype])

    def channel_decay(g, A_log, bias):
        return decay(g, A_log[:, None], None if bias is None else bias.view(3, 4))

    agree(channels, channel_decay, g, A_log, bias, dtype=dtype)
    agree(channels, channel_decay, g, A_log, None, dtype=dtype)

    def bounded(g, A_log, bias):
        return gates.fused_kda_gate(g, A_log, bias, -5.0, full[g.dtype])

    def bounded_decay(g, A_log, bias):
        g, bias = g.to(full[g.dtype]), bias.to(full[g.dtype]).view(3, 4)
        rate = 1.0 if A_log is None else A_log.to(full[g.dtype]).exp()[:, None]
        return -5.0 * torch.sigmoid(rate * (g + bias))

    agree(bounded, bounded_decay, g, A_log, bias, dtype=dtype)
    agree(bounded, bounded_decay, g, None, bias, dtype=dtype)
    assert gates.fused_kda_gate(g, A_log).dtype == gates.fused_gdn_gate(g, torch.zeros(4)).dtype == torch.float32
    with pytest.raises(ValueError, match="A_log: got None"):
        gates.fused_kda_gate(g)
