"""The native kernels: the op's invariants on every instruction set, and what only kernels can get wrong."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from phistate import State, feature_map, linear_attention
from phistate.features.pointwise import Elu
from phistate.ops.backends import native
from phistate.ops.backends.cpu import step_
from tests.conformance import EVERY_MIXER, INPUTS, WRITES, Conformance, assert_near, gradients, make_case, oracle
from tests.conftest import ISAS

pytestmark = pytest.mark.skipif(native.why_not() is not None, reason=f"no native library: {native.why_not()}")


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.usefixtures("instruction_set")
class TestCpuBackend(Conformance):
    def attend(self, form, **arguments):
        return linear_attention(**arguments, form=form, backend="cpu", return_state=True)

    def variants(self):
        return [("auto", torch.float32), ("auto", torch.bfloat16), ("auto", torch.float16)]


@pytest.mark.parametrize("width", [1, 3, 4, 9, 16, 37])
@pytest.mark.parametrize("write", ["add", "delta"])
def test_every_number_a_float16_can_be_is_read(instruction_set, width, write):
    """Also the smallest, below 2^-14: whole vectors and the tails of rows."""
    numbers = torch.arange(1, 0x7C00, dtype=torch.int16).view(torch.float16)
    v = numbers[: numbers.numel() // width * width].view(1, -1, 1, width)[:, ::5]
    q = torch.ones(1, v.shape[1], 1, 1, dtype=torch.float16)
    decay = torch.full((1, v.shape[1], 1), -1e4)  # each step stands alone: what is read is what was written
    o = linear_attention(q, q, v, decay=decay, write=write, scale=1.0, backend="cpu")
    assert torch.equal(o, v)


def test_exp(instruction_set):
    x = torch.cat([torch.linspace(-120, 95, 100_003), torch.tensor([-torch.inf, -1e4, -3e38, 0.0, 1e4, torch.nan])])
    y = torch.empty_like(x)
    native.library().phistate_probe_exp(x.numel(), x.data_ptr(), y.data_ptr())
    assert y[-6:-3].tolist() == [0.0, 0.0, 0.0]
    assert y[-3] == 1.0
    assert y[-2] == torch.inf
    assert y[-1].isnan()
    normal = (x > -87) & (x < 88)
    want = x[normal].double().exp()
    assert ((y[normal].double() - want) / want).abs().max() < 2**-23


@pytest.mark.parametrize("m", [1, 5, 6, 8, 31])
@pytest.mark.parametrize("n", [1, 16, 33, 130])
@pytest.mark.parametrize("pairs", [False, True])
def test_product(instruction_set, m, n, pairs):
    a, b, c = torch.randn(m, 37), torch.randn(37, n), torch.empty(m, n)
    status = native.library().phistate_probe_product(m, n, 37, a.data_ptr(), b.data_ptr(), c.data_ptr(), pairs)
    if pairs and "bf16" not in instruction_set:
        assert status != 0
        return
    if pairs:
        a, b = a.bfloat16().float(), b.bfloat16().float()
    torch.testing.assert_close(c, a @ b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("decay", "write", "normalize"), EVERY_MIXER)
@pytest.mark.parametrize("T, K, V", [(33, 3, 64), (65, 17, 129), (31, 65, 63)])
def test_gradients_of_odd_shapes(instruction_set, decay, write, normalize, T, K, V):
    """Sizes one beside those that fill vectors, strips and chunks: where a kernel would write past an end."""
    case = make_case(decay, write, normalize, B=1, T=T, heads=(2, 1, 1), K=K, V=V, strong=0.1)
    given, wide = case.to(torch.float32), case.to(torch.float32).to(torch.float64)
    names = [n for n in INPUTS if case.tensors.get(n) is not None]
    for c in (given, wide):
        for n in names:
            c.tensors[n] = c.tensors[n].requires_grad_()
    got, state = linear_attention(**given.tensors, **given.options, backend="cpu", return_state=True)
    want, want_state = linear_attention(**wide.tensors, **wide.options, form="chunked", return_state=True)
    assert_near(got, want, torch.float32, "o")
    grads = gradients(got, state, [given.tensors[n] for n in names])
    wants = gradients(want, want_state, [wide.tensors[n] for n in names])
    for name, a, b in zip(names, grads, wants, strict=True):
        assert_near(a, b, torch.float32, f"gradient of {name}")


@pytest.mark.parametrize("decay", ["none", "head", "scalar", "vector"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_past_a_segment(decay, normalize, packed):
    """Backward starts again from states kept every 512 tokens."""
    case = make_case(decay, "add", normalize, B=1 if packed else 2, T=1100, heads=(4, 2, 1), K=9, V=17, strong=0.02)
    more = {"cu_seqlens": torch.tensor([0, 3, 600, 600, 1100])} if packed else {}
    names = [n for n in INPUTS if case.tensors.get(n) is not None]
    given = case.to(torch.float32)
    wide = given.to(torch.float64)
    for c in (given, wide):
        for n in names:
            c.tensors[n] = c.tensors[n].detach().requires_grad_()
    got, state = linear_attention(**given.tensors, **given.options, **more, backend="cpu", return_state=True)
    want, want_state = linear_attention(**wide.tensors, **wide.options, **more, return_state=True)
    assert_near(got, want, torch.float32, "o")
    grads = gradients(got, state, [given.tensors[n] for n in names])
    wants = gradients(want, want_state, [wide.tensors[n] for n in names])
    for name, a, b in zip(names, grads, wants, strict=True):
        assert_near(a, b, torch.float32, f"gradient of {name}")


@pytest.mark.parametrize("decay", ["none", "head", "scalar", "vector"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("heads", [(2, 2, 2), (10, 2, 1), (2, 2, 4)], ids=str)
def test_step_in_place(instruction_set, decay, normalize, heads):
    case = make_case(decay, "add", normalize, T=7, heads=heads, K=19, V=37).to(torch.float32)
    want, want_state = oracle(case)
    states = max(heads[1:])
    s = torch.zeros(2, states, 19, 37)
    z = torch.zeros(2, states, 19) if normalize else None
    rows = []
    for t in range(7):
        one = case.time(slice(t, t + 1)).tensors
        tensors = {name: one[name] for name in ("decay", "beta")}
        rows.append(step_(one["q"], one["k"], one["v"], s, z, **tensors, scale=19**-0.5))
    assert_near(torch.cat(rows, 1), want, torch.float32, "o")
    assert_near(s, want_state.s, torch.float32, "s")
    if normalize:
        assert_near(z, want_state.z, torch.float32, "z")


@pytest.mark.parametrize("heads", [1, 3, 8])
@pytest.mark.parametrize("causal", [True, False])
def test_threads_change_nothing(heads, causal):
    q, k, v = torch.randn(3, 1, 300, heads, 96).unbind()
    want = linear_attention(q, k, v, causal=causal, backend="cpu")
    for threads in (2, 5):
        torch.set_num_threads(threads)
        got = linear_attention(q, k, v, causal=causal, backend="cpu")
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["elu", "relu"])
@pytest.mark.parametrize("decay", ["none", "scalar", "vector"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("layout", ["padded", "packed", "one token"])
def test_map_on_the_way(instruction_set, name, decay, normalize, layout):
    """A map of a channel is applied by the kernel, backward too; padding may hold anything and stays nothing."""
    T, heads = (1 if layout == "one token" else 70), (4, 2, 4)
    case = make_case(decay, "add", normalize, T=T, B=1 if layout == "packed" else 2, heads=heads, K=19, V=21)
    case.tensors["q"] -= 0.3
    case.tensors["k"] -= 0.3
    phi = feature_map(name, head_dim=19, scale=0.6)
    more = {"cu_seqlens": torch.tensor([0, 5, 5, 40, T])} if layout == "packed" else {}
    if layout == "padded":
        more["mask"] = torch.rand(2, T) > 0.3
    names = [n for n in INPUTS if case.tensors.get(n) is not None]
    results = []
    for dtype, backend in ((torch.float32, "cpu"), (torch.float64, "torch")):
        one = case.to(torch.float32).to(dtype)
        for n in names:
            x = one.tensors[n].detach()
            if layout == "padded" and n in ("q", "k"):
                x[~more["mask"]] = torch.nan
            one.tensors[n] = x.requires_grad_()
        if layout == "one token":  # alone, normalised, it would read itself whatever q is
            more["initial_state"] = State(
                s=torch.linspace(-1, 1, 2 * 4 * 19 * 21).reshape(2, 4, 19, 21).to(dtype),
                z=torch.linspace(1, 2, 2 * 4 * 19).reshape(2, 4, 19).to(dtype) if normalize else None,
                tokens=torch.ones(2, dtype=torch.int64),
                fingerprint=phi.fingerprint,
            )
        o, state = linear_attention(
            **one.tensors, **one.options, **more, feature_map=phi, backend=backend, return_state=True
        )
        results.append((o, state.s, *gradients(o, state, [one.tensors[n] for n in names])))
    for what, got, want in zip(("o", "s", *names), *results, strict=True):
        assert_near(got, want, torch.float32, what)


def test_map_of_a_subclass_is_its_own():
    class Doubled(Elu):
        def features(self, x, side, positions):
            return 2 * super().features(x, side, positions)

    q, k, v = torch.randn(3, 1, 9, 2, 8).unbind()
    plain = linear_attention(q, k, v, feature_map=Elu(8), backend="cpu")
    torch.testing.assert_close(linear_attention(q, k, v, feature_map=Doubled(8), backend="cpu"), 4 * plain)


@pytest.mark.parametrize("decay", ["none", "head", "scalar", "vector"])
@pytest.mark.parametrize("heads", [(1, 1, 1), (2, 1, 1), (2, 2, 2)], ids=str)
def test_sequence_in_parts(decay, heads):
    """Fewer states than threads: the sequence is cut, and everything is as if it were not."""
    case = make_case(decay, "add", True, B=1, T=8500, heads=heads, K=9, V=17, strong=0.002).to(torch.float32)
    names = [n for n in INPUTS if case.tensors.get(n) is not None]
    _, begun = linear_attention(**case.time(slice(0, 7)).tensors, **case.options, return_state=True)
    results = []
    for threads in (1, 2, 3, 4):
        torch.set_num_threads(threads)
        for n in names:
            case.tensors[n] = case.tensors[n].detach().requires_grad_()
        o, state = linear_attention(
            **case.tensors, **case.options, initial_state=begun, backend="cpu", return_state=True
        )
        results.append((o, state.s, state.z, *gradients(o, state, [case.tensors[n] for n in names])))
    for other in results[1:]:
        for what, got, want in zip(("o", "s", "z", *names), other, results[0], strict=True):
            assert_near(got, want, torch.float32, what)


def test_packed_sequences_in_parts():
    q, k, v = torch.rand(3, 1, 6000, 1, 8).unbind()
    bounds = torch.tensor([0, 0, 5, 5990, 6000, 6000])
    want = linear_attention(q, k, v, cu_seqlens=bounds, backend="cpu", return_state=True)
    torch.set_num_threads(16)
    got = linear_attention(q, k, v, cu_seqlens=bounds, backend="cpu", return_state=True)
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(got[1].s, want[1].s, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("decay", "write", "normalize", "name"),
    [
        pytest.param(*mixer.values, name, id=f"{mixer.id}-{name}")
        for mixer in EVERY_MIXER
        for name in ("q", "k", "v", "beta", *(["erase"] if "erase" in mixer.values else []))
    ],
)
def test_what_is_no_number_stays_behind_its_token(instruction_set, decay, write, normalize, name):
    """A block of rows multiplies what lies above its diagonal by zero, and zero times NaN is NaN."""
    case = make_case(decay, write, normalize, B=1, T=80, heads=(4, 2, 2), K=17, V=37).to(torch.float32)
    clean = linear_attention(**case.tensors, **case.options, backend="cpu")
    for t, bad in ((3, float("nan")), (17, float("inf")), (30, float("nan")), (64, float("nan"))):
        spoiled = case.tensors[name].clone()
        spoiled[:, t] = bad
        o = linear_attention(**case.with_(**{name: spoiled}).tensors, **case.options, backend="cpu")
        assert torch.equal(o[:, :t], clean[:, :t]), f"{name} at {t} reached an earlier token"
        assert not o[:, t].isfinite().all()


@pytest.mark.parametrize("normalize", [False, True])
def test_log_features_that_are_no_numbers_stay_behind_their_token(instruction_set, normalize):
    phi = feature_map("favor+", head_dim=8, num_features=24)
    q, k, v = torch.randn(3, 1, 80, 2, 8).unbind()
    clean = linear_attention(q, k, v, feature_map=phi, normalize=normalize, backend="cpu")
    for t in (3, 17, 64):
        for i in range(3):
            inputs = [x.clone() for x in (q, k, v)]
            inputs[i][:, t] = float("nan")
            o = linear_attention(*inputs, feature_map=phi, normalize=normalize, backend="cpu")
            torch.testing.assert_close(o[:, :t], clean[:, :t])


def test_long_sequence():
    q, k, v = torch.rand(3, 1, 65537, 1, 64).unbind()
    whole, end = linear_attention(q, k, v, normalize=True, backend="cpu", return_state=True)
    first, state = linear_attention(q[:, :43884], k[:, :43884], v[:, :43884], normalize=True, return_state=True)
    rest, state = linear_attention(
        q[:, 43884:], k[:, 43884:], v[:, 43884:], normalize=True, initial_state=state, return_state=True
    )
    torch.testing.assert_close(whole, torch.cat([first, rest], 1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(end.s, state.s, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("write", WRITES)
def test_opcheck(write):
    delta = write != "add"
    q, k, v = (torch.rand(2, 40, 2, n, requires_grad=True) for n in (8, 8, 6))
    decay = (-torch.rand(2, 40, 2)).requires_grad_()
    erase = torch.rand(2, 40, 2, 8, requires_grad=True) if write == "erase" else None
    s, z = torch.rand(2, 2, 8, 6, requires_grad=True), torch.rand(2, 2, 8, requires_grad=True)
    # scale, normalize, causal, delta, qk_l2norm, map, map_scale
    options = (0.5, True, True, delta, delta, None if delta else "elu", 0.7)
    torch.library.opcheck(
        torch.ops.phistate.linear_attention.default, (q, k, v, decay, None, erase, s, z, None, None, *options, True)
    )
    q, k, v, erase = (None if x is None else x.detach()[:, :1] for x in (q, k, v, erase))
    torch.library.opcheck(
        torch.ops.phistate.linear_attention_step_.default,
        (q, k, v, None, None, erase, s.detach(), z.detach(), 0.5, delta, delta),
    )


def test_opcheck_of_log_features():
    log_q, log_k, v = (torch.randn(2, 40, 2, n) for n in (8, 8, 6))
    s, z, log_scale = torch.rand(2, 2, 8, 6), torch.rand(2, 2, 8), torch.randn(2, 2, 8)
    torch.library.opcheck(
        torch.ops.phistate.linear_attention_log.default, (log_q, log_k, v, None, s, z, log_scale, None, None, 0.5, True)
    )


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("offsets", [[1, 40], [0, 30, 20, 40], [0, 41], [0, 39]], ids=str)
def test_kernels_read_no_offsets_that_do_not_fit(delta, offsets):
    """Compiled code asserts offsets beside the operator, not before it."""
    q, k, v = torch.rand(3, 1, 40, 2, 8).unbind()
    packed = torch.tensor(offsets)
    options = (0.5, False, True, delta, False, None, 0.0)
    run = torch.ops.phistate.linear_attention.default
    with pytest.raises(RuntimeError, match="cu_seqlens: takes offsets from 0 to T that never decrease"):
        run(q, k, v, *(None,) * 6, packed, *options, False)
    o, s, z, kept, denominators = run(q, k, v, *(None,) * 7, *options, True)
    with pytest.raises(RuntimeError, match="cu_seqlens: takes offsets from 0 to T that never decrease"):
        torch.ops.phistate.linear_attention_backward.default(
            *(q, k, v, *(None,) * 6, packed, *options),
            *(o, None, None, o, s, z, kept, denominators, *(False,) * 5),
        )


def test_compiles_without_a_break():
    def loss(q, k, v, decay):
        return linear_attention(q, k, v, decay=decay, normalize=True, backend="cpu").square().sum()

    tensors = [torch.rand(1, 40, 2, 8).requires_grad_() for _ in range(3)]
    tensors.append((-torch.rand(1, 40, 2)).requires_grad_())
    want = torch.autograd.grad(loss(*tensors), tensors)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(*tensors), tensors)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_what_it_refuses():
    q = torch.rand(1, 4, 1, 2)
    with pytest.raises(ValueError, match="float64: the kernels compute in float32"):
        linear_attention(q.double(), q.double(), q.double(), backend="cpu")
    with pytest.raises(ValueError, match="the kernels are chunked"):
        linear_attention(q, q, q, form="parallel", backend="cpu")
    assert linear_attention(q.double(), q.double(), q.double()).dtype == torch.float64


@pytest.mark.parametrize("name", ["x86-64-v9", "armv8" if "portable" in ISAS and "armv8" not in ISAS else "sse"])
def test_a_set_the_machine_lacks_is_an_error(name):
    with pytest.raises(ValueError, match=f"PHISTATE_ISA: got {name}"):
        native.force_isa(name)
    native.force_isa(None)
    done = run_python("import phistate.ops.backends.cpu", PHISTATE_ISA=name)
    assert done.returncode != 0
    assert f"ValueError: PHISTATE_ISA: got {name}" in done.stderr


def test_a_set_is_forced():
    done = run_python(
        "from phistate.ops.backends import native; print(native.isa())",
        PHISTATE_ISA="portable",
    )
    assert done.stdout.strip() == "portable"


def test_without_the_library_it_says_why(tmp_path):
    code = """
        import torch, phistate
        q = torch.rand(1, 3, 1, 2)
        phistate.linear_attention(q, q, q)
        try:
            phistate.linear_attention(q, q, q, backend="cpu")
        except ValueError as error:
            print(error)
    """
    done = run_python(code, PHISTATE_LIBRARY=str(tmp_path / "none.so"))
    assert "the native library is not there" in done.stdout, done.stderr


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
def test_extra_memory():
    """Forward: the output and at most 8 MiB. Backward: three gradients, the output, and kept states."""
    code = """
        import torch
        from phistate import linear_attention

        def peak():
            status = open("/proc/self/status").read()
            return int(status.split("VmHWM:")[1].split()[0]) * 1024

        torch.set_num_threads(2)
        small = torch.ones(1, 1000, 8, 64, requires_grad=True)
        linear_attention(small, small, small, backend="cpu").sum().backward()
        q, k, v = (torch.rand(1, 65536, 8, 64) for _ in range(3))
        size = q.numel() * 4
        before = peak()
        o = linear_attention(q, k, v, backend="cpu")
        print((peak() - before - size) / 2**20)
        del o
        d_o = torch.ones_like(q)
        before = peak()
        for x in (q, k, v):
            x.requires_grad_()
        o = linear_attention(q, k, v, backend="cpu")
        torch.autograd.grad(o, (q, k, v), d_o)
        print((peak() - before) / size)
    """
    done = run_python(code)
    forward, both = (float(x) for x in done.stdout.split())
    assert forward <= 8, done.stderr
    print(f"\nforward: output + {forward:.1f} MiB; forward + backward: {both:.2f} × q")
    assert both <= 4.5  # the output, three gradients, a state every 512 tokens
