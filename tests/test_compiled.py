"""Compiled code: one graph for every packing, whose offsets it takes as a tensor like any other."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import phistate
from phistate import State, causal_conv1d, linear_attention, mamba2_scan, selective_scan

T = 6
# Seven offsets: a dynamic trace takes sizes that happen to agree for one and the same.
SAME_COUNT = ([0, 3, 3, 4, 4, 5, T], [0, 0, 0, 0, 0, 0, T], [0, 1, 2, 3, 4, 5, T])
OTHER_COUNTS = ([0, 0, T], [0, 2, 2, 3, T])


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def assert_one_graph(call, inputs, *, dynamic):
    """``call(offsets, *inputs)`` gives what it gives without the compiler, whatever the offsets, from one graph."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, backend=counter, dynamic=dynamic)
    first = None
    for offsets in map(torch.tensor, (*SAME_COUNT, *OTHER_COUNTS) if dynamic else SAME_COUNT):
        want, got = call(offsets, *inputs), compiled(offsets, *inputs)
        first = counter.frame_count if first is None else first
        assert counter.frame_count == first
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        learned = [x for x in inputs if x is not None and x.requires_grad]
        if learned:
            losses = [sum(x.square().sum() for x in r if x.requires_grad) for r in (got, want)]
            for a, b in zip(*(torch.autograd.grad(loss, learned) for loss in losses), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def parts(result):
    o, state = result
    return tuple(x for x in (o, state.s, state.z, state.tokens) if x is not None)


def make_map(name, dtype):
    more = {"num_features": 16} if name == "favor+" else {}
    return phistate.feature_map(name, head_dim=8, **more).to(dtype)


# float64 is the reference's path, whose dynamic trace takes long: one test of it is enough. float32 is the kernels'.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
class TestOneGraph:
    def qkv(self, dtype, grad=False):
        return [x.detach().to(dtype).requires_grad_(grad) for x in torch.rand(3, 1, T, 2, 8)]

    @pytest.mark.parametrize("dynamic", [False, True])
    def test_of_features(self, dtype, dynamic):
        decay, mask = -torch.rand(1, T, 2, dtype=dtype), torch.rand(1, T) > 0.3

        def call(offsets, q, k, v, decay):
            more = {"decay": decay, "mask": mask, "normalize": True, "return_state": True}
            _, state = linear_attention(q, k, v, cu_seqlens=offsets, **more)
            return parts(linear_attention(q, k, v, cu_seqlens=offsets, **more, initial_state=state))

        assert_one_graph(call, [*self.qkv(dtype, grad=True), decay.requires_grad_()], dynamic=dynamic)

    @pytest.mark.parametrize("erases", [False, True])
    def test_of_the_delta_write(self, dtype, erases):
        def call(offsets, q, k, v, erase=None):
            options = {"write": "delta", "qk_l2norm": True, "return_state": True}
            return parts(linear_attention(q, k, v, erase=erase, cu_seqlens=offsets, **options))

        erase = [0.1 * torch.rand(1, T, 2, 8, dtype=dtype)] if erases else []
        tensors = [*self.qkv(dtype, grad=True), *(x.requires_grad_() for x in erase)]
        assert_one_graph(call, tensors, dynamic=dtype == torch.float32)

    @pytest.mark.parametrize(("name", "decayed"), [("elu", True), ("cosformer", False), ("favor+", False)])
    def test_of_a_map(self, dtype, name, decayed):
        phi = make_map(name, dtype)
        decay = -torch.rand(1, T, 2, dtype=dtype) if decayed else None
        mask = None if decayed else torch.rand(1, T) > 0.3

        def call(offsets, q, k, v):
            options = {"feature_map": phi, "normalize": True, "decay": decay, "mask": mask}
            return (linear_attention(q, k, v, cu_seqlens=offsets, **options),)

        assert_one_graph(call, self.qkv(dtype), dynamic=dtype == torch.float32)

    @pytest.mark.parametrize("decayed", [False, True])
    def test_of_an_exponential_map_that_learns(self, dtype, decayed):
        phi = make_map("favor+", dtype)
        decay = -torch.rand(1, T, 2, dtype=dtype) if decayed else None

        def call(offsets, q, k, v):
            return (linear_attention(q, k, v, feature_map=phi, decay=decay, normalize=True, cu_seqlens=offsets),)

        assert_one_graph(call, self.qkv(dtype, grad=True), dynamic=dtype == torch.float32 and not decayed)

    def test_of_a_map_not_causal(self, dtype):
        phi = make_map("favor+", dtype)

        def call(offsets, q, k, v):
            return (linear_attention(q, k, v, feature_map=phi, causal=False, cu_seqlens=offsets),)

        assert_one_graph(call, self.qkv(dtype), dynamic=dtype == torch.float32)

    def test_of_mamba2(self, dtype):
        x, dt, A = torch.randn(1, T, 4, 3, dtype=dtype), torch.rand(1, T, 4, dtype=dtype), -torch.rand(4, dtype=dtype)
        B, C = torch.randn(2, 1, T, 2, 5, dtype=dtype)

        def call(offsets, x, dt, A, B, C):
            return parts(mamba2_scan(x, dt, A, B, C, A, return_state=True, cu_seqlens=offsets))

        assert_one_graph(call, [x, dt, A, B, C], dynamic=dtype == torch.float32)

    def test_of_the_others(self, dtype):
        x, A, weight = torch.rand(1, T, 4, dtype=dtype), -torch.rand(4, 5, dtype=dtype), torch.rand(4, 3, dtype=dtype)
        B, C = torch.randn(2, 1, T, 5, dtype=dtype)
        mask = torch.rand(1, T) > 0.3

        def call(offsets, x, B, C):
            more = {"return_state": True, "cu_seqlens": offsets, "mask": mask}
            return *selective_scan(x, x, A, B, C, **more), *causal_conv1d(x, weight, **more)

        assert_one_graph(call, [x, B, C], dynamic=False)

    @pytest.mark.parametrize("bad", [[0, 3, T - 1], [0, T + 1, T], [1, 3, T]])
    def test_offsets_that_do_not_fit(self, dtype, bad):
        def call(offsets, q, k, v):
            return linear_attention(q, k, v, cu_seqlens=offsets)

        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        with pytest.raises(RuntimeError, match="cu_seqlens: takes offsets from 0 to T that never decrease"):
            compiled(torch.tensor(bad), *self.qkv(dtype))


def test_the_steps():
    q, k, v = torch.rand(3, 1, 1, 2, 4).unbind()
    x, dt, A, B = torch.rand(1, 4, 3), torch.rand(1, 4), -torch.rand(4), torch.rand(1, 2, 5)

    def calls(s, z, tokens, past, h, S):
        return (
            phistate.linear_attention_step_(State(s=s, z=z, tokens=tokens), q, k, v, decay=-dt[0, :2]),
            phistate.causal_conv1d_step_(past, dt, torch.ones(4, 3)),
            phistate.selective_scan_step_(h, dt, dt, A[:, None].expand(4, 5), B[:, 0], B[:, 1]),
            phistate.mamba2_step_(S, x, dt, A, B, B, A),
        )

    sizes = ((1, 2, 4, 4), (1, 2, 4), (1,), (1, 4, 2), (1, 4, 5), (1, 4, 3, 5))
    held = [torch.ones(n, dtype=torch.int64) if len(n) == 1 else torch.rand(n) for n in sizes]
    again = [t.clone() for t in held]
    with torch.no_grad():
        want = calls(*held)
        got = torch.compile(calls, fullgraph=True, backend="aot_eager")(*again)
    for a, b in zip((*got, *again), (*want, *held), strict=True):
        torch.testing.assert_close(a, b)
