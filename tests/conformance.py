"""The invariants of the op, run by every backend.

A backend plugs in with two functions: ``attend`` runs it, ``variants`` lists the (form, dtype) pairs it offers.
The oracle is the recurrent form of the reference in float64.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from phistate import State, linear_attention

DECAYS = ("none", "head", "scalar", "vector")
WRITES = ("add", "delta", "erase")  # erase: a delta write with an erase key of its own
HEADS = ((2, 2, 2), (4, 2, 2), (4, 1, 1), (2, 2, 4), (1, 2, 4), (4, 4, 2))
INPUTS = ("q", "k", "v", "decay", "beta", "erase")
EVERY_MIXER = [
    pytest.param(decay, write, normalize, id=f"{decay}-{write}-{'normalized' if normalize else 'plain'}")
    for decay in DECAYS
    for write in WRITES
    for normalize in (False, True)
]


@dataclass
class Case:
    """Arguments of one call; ``options`` holds those that are no tensors."""

    tensors: dict[str, Tensor | None]
    options: dict[str, object]

    def to(self, dtype: torch.dtype) -> Case:
        return Case({n: x if x is None else x.to(dtype) for n, x in self.tensors.items()}, self.options)

    def with_(self, **changes: Tensor | None) -> Case:
        return Case({**self.tensors, **changes}, self.options)

    def time(self, part: slice | list[int]) -> Case:
        cut = {n: x if x is None or (n == "decay" and x.ndim == 1) else x[:, part] for n, x in self.tensors.items()}
        return Case(cut, self.options)

    def rows(self, part: slice) -> Case:
        cut = {n: x if x is None or (n == "decay" and x.ndim == 1) else x[part] for n, x in self.tensors.items()}
        return Case(cut, self.options)


def make_case(
    decay="scalar",
    write="add",
    normalize=False,
    *,
    B=2,
    T=11,
    heads=(2, 2, 2),
    K=5,
    V=3,
    beta=True,
    strong=1.0,
) -> Case:
    """A case whose recurrence stays finite and, if normalised, whose denominators stay away from zero."""
    Hq, Hk, Hv = heads
    Hs = max(Hk, Hv)
    draw = torch.rand if normalize else torch.randn
    q, k = draw(B, T, Hq, K, dtype=torch.float64), draw(B, T, Hk, K, dtype=torch.float64)
    shapes = {"none": None, "head": (Hs,), "scalar": (B, T, Hs), "vector": (B, T, Hs, K)}
    shape = shapes[decay]
    tensors = {
        "q": q,
        "k": k,
        "v": torch.randn(B, T, Hv, V, dtype=torch.float64),
        "decay": None if shape is None else -strong * torch.rand(shape, dtype=torch.float64),
        "beta": torch.rand(B, T, Hs, dtype=torch.float64) if beta else None,
    }
    if write == "erase":
        # Short, for k eᵀ has eigenvalues of either sign: a long product of I − β k eᵀ is not to grow.
        tensors["erase"] = 0.5 * torch.nn.functional.normalize(draw(B, T, Hk, K, dtype=torch.float64), dim=-1)
    options = {"write": "add" if write == "add" else "delta", "normalize": normalize, "qk_l2norm": write != "add"}
    return Case(tensors, options)


def oracle(case: Case, **more: object) -> tuple[Tensor, State]:
    """The equation as written, in float64."""
    wide = case.to(torch.float64)
    return linear_attention(
        **wide.tensors, **wide.options, **more, form="recurrent", backend="torch", return_state=True
    )


def gradients(o: Tensor, state: State, wanted: list[Tensor]) -> tuple[Tensor, ...]:
    """Of a scalar that every output and the final state enter."""
    loss = (o.double() * torch.linspace(-1, 1, max(o.numel(), 1))[: o.numel()].view(o.shape)).sum()
    loss = loss + state.s.double().square().sum()
    if state.z is not None:
        loss = loss + state.z.double().square().sum()
    return torch.autograd.grad(loss, wanted)


def assert_near(got: Tensor, want: Tensor, dtype: torch.dtype, what: str = "") -> None:
    """Error against float64 relative to the largest value; a few roundings of the type are allowed."""
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
    assert bool(torch.isfinite(got).all()), f"{what}: not finite"
    size = max(want.abs().max().item() if want.numel() else 0.0, 1e-3)
    allowed = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    error = (got.double() - want.double()).abs().max().item() if want.numel() else 0.0
    assert error <= allowed * size, f"{what}: error {error:.3g} at size {size:.3g}, {dtype}"


class Conformance:
    """Subclass, fill in the two functions, and every invariant is a test."""

    def attend(self, form: str, **arguments: object) -> tuple[Tensor, State]:
        """Run the backend in ``form``; gives the output and the State."""
        raise NotImplementedError

    def variants(self) -> list[tuple[str, torch.dtype]]:
        """The (form, dtype) pairs the backend offers."""
        raise NotImplementedError

    def run(self, case: Case, form: str, **more: object) -> tuple[Tensor, State]:
        return self.attend(form, **case.tensors, **case.options, **more)

    def exact(self) -> list[tuple[str, torch.dtype]]:
        """The variants in the widest type offered: enough where a property, not rounding, is in question."""
        widest = max((dtype for _, dtype in self.variants()), key=lambda dtype: torch.finfo(dtype).bits)
        return [(form, dtype) for form, dtype in self.variants() if dtype == widest]

    @pytest.mark.parametrize(("decay", "write", "normalize"), EVERY_MIXER)
    @pytest.mark.parametrize("heads", HEADS, ids=str)
    def test_values_and_gradients(self, decay, write, normalize, heads):
        case = make_case(decay, write, normalize, heads=heads, T=9)
        for form, dtype in self.variants() if heads == HEADS[1] else self.exact():
            given = case.to(dtype)
            rounded = given.to(torch.float64)
            names = [n for n in INPUTS if rounded.tensors.get(n) is not None]
            for c in (given, rounded):
                for n in names:
                    c.tensors[n] = c.tensors[n].detach().requires_grad_()
            want, want_state = oracle(rounded)
            got, state = self.run(given, form)
            assert got.dtype == dtype
            assert_near(got, want, dtype, "o")
            assert_near(state.s, want_state.s, max(dtype, torch.float32, key=_bits), "s")
            want_grads = gradients(want, want_state, [rounded.tensors[n] for n in names])
            grads = gradients(got, state, [given.tensors[n] for n in names])
            for name, a, b in zip(names, grads, want_grads, strict=True):
                assert a.dtype == dtype
                assert_near(a, b, dtype, f"gradient of {name} ({form})")

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        T=st.sampled_from([0, 1, 2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 100, 130]),
        K=st.sampled_from([1, 3, 8, 16, 17, 60, 64, 100]),
        V=st.sampled_from([1, 2, 7, 16, 33, 64, 65]),
        B=st.integers(1, 2),
        heads=st.sampled_from(HEADS),
        decay=st.sampled_from(DECAYS),
        write=st.sampled_from(WRITES),
        normalize=st.booleans(),
        beta=st.booleans(),
        strong=st.sampled_from([0.0, 0.1, 10.0]),
    )
    def test_any_shape(self, T, K, V, B, heads, decay, write, normalize, beta, strong):
        case = make_case(
            decay,
            write,
            normalize,
            B=B,
            T=T,
            heads=heads,
            K=K,
            V=V,
            beta=beta or write != "add",
            strong=strong,
        )
        for form, dtype in self.exact():
            given = case.to(dtype)
            want, want_state = oracle(given)
            got, state = self.run(given, form)
            assert_near(got, want, dtype, f"o ({form})")
            assert_near(state.s, want_state.s, dtype, f"s ({form})")
            assert state.tokens.tolist() == [T] * B
            assert (state.z is not None) == normalize

    @pytest.mark.parametrize(("decay", "write", "normalize"), EVERY_MIXER)
    @pytest.mark.parametrize("cuts", [(1, 2, 3), (5,), (0, 70), (64, 65)], ids=str)
    def test_segments_carry_on(self, decay, write, normalize, cuts):
        case = make_case(decay, write, normalize, T=75)
        for form, dtype in self.exact():
            given = case.to(dtype)
            want, want_state = self.run(given, form)
            pieces, state, edges = [], None, (0, *cuts, 75)
            for a, b in itertools.pairwise(edges):
                o, state = self.run(given.time(slice(a, b)), form, initial_state=state)
                pieces.append(o)
            assert_near(torch.cat(pieces, 1), want, dtype, "o")
            assert_near(state.s, want_state.s, dtype, "s")
            assert state.tokens.tolist() == [75, 75]

    @pytest.mark.parametrize(("decay", "write", "normalize"), EVERY_MIXER)
    def test_gradient_through_the_state(self, decay, write, normalize):
        first, second = make_case(decay, write, normalize, T=6), make_case(decay, write, normalize, T=5)
        for form, dtype in self.exact():
            results = []
            for run in (lambda c, **more: self.run(c, form, **more), oracle):  # noqa: B023
                wide = dtype if len(results) == 0 else torch.float64
                state = self.run(first.to(dtype), form)[1]
                held = [state.s.detach().to(wide).requires_grad_()]
                z = None
                if state.z is not None:
                    z = state.z.detach().to(wide).requires_grad_()
                    held.append(z)
                o, after = run(second.to(dtype), initial_state=State(s=held[0], z=z, tokens=state.tokens))
                results.append(gradients(o, after, held))
            for got, want in zip(*results, strict=True):
                assert_near(got, want, dtype, "gradient of the initial state")

    @pytest.mark.parametrize(("decay", "write", "normalize"), EVERY_MIXER)
    def test_padding_changes_nothing(self, decay, write, normalize):
        case = make_case(decay, write, normalize, B=1, T=70, heads=(2, 2, 4))
        poison = dict(make_case(decay, write, normalize, B=1, T=78, heads=(2, 2, 4)).tensors.items())
        learnt = ("q", "k", "v", "erase")
        for name, padded in {
            "left": [*range(8)],
            "right": [*range(70, 78)],
            "middle": [3, 4, 20, 21, 22, 40, 63, 65],
        }.items():
            mask = torch.ones(1, 78, dtype=torch.bool)
            mask[:, padded] = False
            kept = mask[0].nonzero().squeeze(1).tolist()
            for form, dtype in self.exact():
                given, long = case.to(dtype), Case(poison, case.options).to(dtype)
                tensors: dict[str, Tensor | None] = {}
                for n, x in long.tensors.items():
                    if x is None or x.ndim == 1:
                        tensors[n] = given.tensors[n]
                        continue
                    x = torch.full_like(x, float("nan") if n in learnt else -0.5)
                    x[:, kept] = given.tensors[n]
                    tensors[n] = x.requires_grad_()
                warm = self.run(given, form)[1]
                want, want_state = self.run(given, form, initial_state=warm)
                got, state = self.run(Case(tensors, case.options), form, mask=mask, initial_state=warm)
                assert_near(got[:, kept], want, dtype, name)
                assert not got[:, padded].any()
                assert_near(state.s, want_state.s, dtype, name)
                assert state.tokens.tolist() == [140]
                for grad in torch.autograd.grad(got.sum(), [x for n, x in tensors.items() if n in learnt]):
                    assert bool(torch.isfinite(grad).all())
                    assert not grad[:, padded].any()

    @pytest.mark.parametrize(("decay", "write", "normalize"), EVERY_MIXER)
    def test_packed_is_one_by_one(self, decay, write, normalize):
        case = make_case(decay, write, normalize, B=1, T=50, heads=(4, 2, 2))
        bounds = [0, 0, 7, 7, 8, 50, 50]
        for form, dtype in self.exact():
            given = case.to(dtype)
            cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
            got, state = self.run(given, form, cu_seqlens=cu_seqlens)
            again, carried = self.run(given, form, cu_seqlens=cu_seqlens, initial_state=state)
            for n, (a, b) in enumerate(itertools.pairwise(bounds)):
                part = given.time(slice(a, b))
                want, alone = self.run(part, form)
                assert_near(got[:, a:b], want, dtype, f"sequence {n}")
                assert_near(state.s[n : n + 1], alone.s, dtype, f"state {n}")
                want, alone = self.run(part, form, initial_state=alone)
                assert_near(again[:, a:b], want, dtype, f"sequence {n}, carried on")
                assert_near(carried.s[n : n + 1], alone.s, dtype, f"state {n}, carried on")
            assert state.tokens.tolist() == [0, 7, 0, 1, 42, 0]

    @pytest.mark.parametrize(("decay", "write", "normalize"), EVERY_MIXER)
    def test_rows_are_independent(self, decay, write, normalize):
        case = make_case(decay, write, normalize, B=3, T=20)
        for form, dtype in self.exact():
            given = case.to(dtype)
            got, state = self.run(given, form)
            for n in range(3):
                want, alone = self.run(given.rows(slice(n, n + 1)), form)
                assert_near(got[n : n + 1], want, dtype, f"row {n}")
                assert_near(state.s[n : n + 1], alone.s, dtype, f"row {n}")

    @pytest.mark.parametrize("write", WRITES)
    @pytest.mark.parametrize("normalize", [False, True])
    def test_decays_that_say_the_same(self, write, normalize):
        heads, B, T, K = (2, 2, 2), 2, 40, 5
        plain = make_case("none", write, normalize, B=B, T=T, heads=heads, K=K)
        per_head = -torch.rand(2, dtype=torch.float64)
        for form, dtype in self.exact():
            given = plain.to(dtype)
            want = self.run(given, form)[0]
            for shape in ((2,), (B, T, 2), (B, T, 2, K)):
                got = self.run(given.with_(decay=torch.zeros(shape, dtype=dtype)), form)[0]
                assert_near(got, want, dtype, f"decay of zeros {shape}")
            d = per_head.to(dtype)
            want = self.run(given.with_(decay=d), form)[0]
            for spelled in (d.expand(B, T, 2), d[:, None].expand(B, T, 2, K)):
                got = self.run(given.with_(decay=spelled), form)[0]
                assert_near(got, want, dtype, "constant decay spelled out")

    @pytest.mark.parametrize("decay", DECAYS)
    @pytest.mark.parametrize("normalize", [False, True])
    @pytest.mark.parametrize("heads", [(4, 2, 2), (2, 2, 4)], ids=str)
    def test_to_erase_by_the_key_is_the_delta_write(self, decay, normalize, heads):
        case = make_case(decay, "delta", normalize, heads=heads, T=75)
        case.tensors["k"] = torch.nn.functional.normalize(case.tensors["k"], dim=-1)
        plain = {**case.options, "qk_l2norm": False}
        for form, dtype in self.exact():
            tied = {n: x if x is None else x.requires_grad_() for n, x in case.to(dtype).tensors.items()}
            apart = {n: x if x is None else x.detach().requires_grad_() for n, x in tied.items()}
            apart["erase"] = apart["k"].detach().clone().requires_grad_()
            want, want_state = self.run(Case(tied, plain), form)
            got, state = self.run(Case(apart, plain), form)
            assert_near(got, want, dtype, "o")
            assert_near(state.s, want_state.s, dtype, "s")
            names = [n for n, x in tied.items() if x is not None]
            wants = dict(zip(names, gradients(want, want_state, [tied[n] for n in names]), strict=True))
            *grads, of_erase = gradients(got, state, [apart[n] for n in [*names, "erase"]])
            grads = dict(zip(names, grads, strict=True))
            grads["k"] = grads["k"] + of_erase
            for n in names:
                assert_near(grads[n], wants[n], dtype, f"gradient of {n}")

    @pytest.mark.parametrize("decay", DECAYS)
    def test_a_transition_of_two_keys_is_two_steps(self, decay):
        """S ← (I − β b cᵀ) Diag(a) S + k vᵀ: erase by c along b with no value, then write along k without erasing."""
        T = 40
        case = make_case(decay, "erase", T=T)
        for form, dtype in self.exact():
            given = case.to(dtype)
            q, k, v, c = (given.tensors[n] for n in ("q", "k", "v", "erase"))
            b, k = torch.nn.functional.normalize(torch.randn_like(k), dim=-1), 0.3 * k
            beta, decays = given.tensors["beta"], given.tensors["decay"]

            def twice(first, second):
                return torch.stack([first, second], 2).flatten(1, 2)

            steps = {"q": twice(q, q), "k": twice(b, k), "v": twice(torch.zeros_like(v), v)}
            steps |= {
                "beta": twice(beta, torch.ones_like(beta)),
                "erase": twice(c, torch.zeros_like(c)),
                "decay": decays,
            }
            if decays is not None and decays.ndim > 1:
                steps["decay"] = twice(decays, torch.zeros_like(decays))
            if decay == "head":
                spelled = decays.expand(*beta.shape)
                steps["decay"] = twice(spelled, torch.zeros_like(spelled))
            got, state = self.run(Case(steps, {"write": "delta"}), form, scale=1.0)
            S, rows = torch.zeros(2, 2, 5, 3, dtype=torch.float64), []
            for t in range(T):
                if decays is not None:
                    a = (decays if decays.ndim == 1 else decays[:, t]).double().exp()
                    S = S * (a.unsqueeze(-1) if decay == "vector" else a[..., None, None])
                held = torch.einsum("bhkv,bhk->bhv", S, c[:, t].double()) * beta[:, t].double().unsqueeze(-1)
                S = S - torch.einsum("bhk,bhv->bhkv", b[:, t].double(), held)
                S = S + torch.einsum("bhk,bhv->bhkv", k[:, t].double(), v[:, t].double())
                rows.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t].double()))
            assert_near(got[:, 1::2], torch.stack(rows, 1), dtype, "o")
            assert_near(state.s, S, dtype, "s")

    @pytest.mark.parametrize(("decay", "write", "normalize"), EVERY_MIXER)
    @pytest.mark.parametrize("heads", [(4, 2, 2), (6, 1, 1), (2, 2, 6), (1, 4, 2)], ids=str)
    def test_groups_are_repeated_heads(self, decay, write, normalize, heads):
        case = make_case(decay, write, normalize, heads=heads, T=20)
        states = max(heads[1:])
        outputs = max(heads)
        for form, dtype in self.exact():
            given = case.to(dtype)
            spelled = {}
            for n, x in given.tensors.items():
                dim = 0 if n == "decay" and x is not None and x.ndim == 1 else 2
                spelled[n] = x if x is None else x.repeat_interleave(outputs // x.shape[dim], dim=dim)
            want, want_state = self.run(Case(spelled, case.options), form)
            got, state = self.run(given, form)
            assert_near(got, want, dtype, "o")
            assert_near(state.s, want_state.s[:, :: outputs // states], dtype, "s")

    @pytest.mark.parametrize(("decay", "write", "normalize"), EVERY_MIXER)
    def test_nothing_depends_on_the_future(self, decay, write, normalize):
        case, other = (make_case(decay, write, normalize, T=40) for _ in range(2))
        for form, dtype in self.exact():
            given, changed = case.to(dtype), other.to(dtype)
            for t in (0, 17, 38):
                mixed = {}
                for n, x in given.tensors.items():
                    if x is None or x.ndim == 1:
                        mixed[n] = x
                    else:
                        mixed[n] = torch.cat([x[:, : t + 1], changed.tensors[n][:, t + 1 :]], 1)
                want = self.run(given, form)[0]
                got = self.run(Case(mixed, case.options), form)[0]
                assert torch.equal(got[:, : t + 1], want[:, : t + 1]), f"{form}: position {t} saw the future"

    @pytest.mark.parametrize("decay", ["scalar", "vector"])
    @pytest.mark.parametrize("write", WRITES)
    @pytest.mark.parametrize("normalize", [False, True])
    @pytest.mark.parametrize("reset", [-1e4, -0.1 * torch.finfo(torch.float32).max, float("-inf")])
    def test_resets_are_documents(self, decay, write, normalize, reset):
        case = make_case(decay, write, normalize, B=1, T=70)
        for form, dtype in self.exact():
            given = case.to(dtype)
            d = given.tensors["decay"].clone()
            d[:, [4, 30, 31]] = reset
            tensors = {n: x.clone().requires_grad_() for n, x in given.with_(decay=d).tensors.items()}
            got, state = self.run(Case(tensors, case.options), form)
            for a, b in ((0, 4), (4, 30), (30, 31), (31, 70)):
                want, alone = self.run(given.time(slice(a, b)), form)
                assert_near(got[:, a:b], want, dtype, f"document {a}:{b}")
            assert_near(state.s, alone.s, dtype, "s")
            for name, grad in zip(tensors, gradients(got, state, list(tensors.values())), strict=True):
                assert bool(torch.isfinite(grad).all()), f"gradient of {name}"

    @pytest.mark.parametrize("decay", ["scalar", "vector"])
    @pytest.mark.parametrize("write", WRITES)
    def test_strong_decay_stays_finite(self, decay, write):
        case = make_case(decay, write, B=1, T=70, strong=1e4)
        for form, dtype in self.exact():
            tensors = {n: x.requires_grad_() for n, x in case.to(dtype).tensors.items()}
            want, _ = oracle(Case({n: x.detach() for n, x in tensors.items()}, case.options))
            got, state = self.run(Case(tensors, case.options), form)
            assert_near(got, want, dtype)
            for grad in gradients(got, state, list(tensors.values())):
                assert bool(torch.isfinite(grad).all())

    def test_sums_are_wide(self):
        for form, dtype in self.variants():
            if form == "parallel":
                continue
            ones = torch.ones(1, 1000, 1, 1, dtype=dtype)
            _, state = self.attend(form, q=ones, k=ones, v=ones, normalize=True)
            assert state.s.dtype == state.z.dtype == max(dtype, torch.float32, key=_bits)
            assert state.s.item() == state.z.item() == 1000.0

    @pytest.mark.parametrize("scale", [None, 0.37])
    def test_scale(self, scale):
        for form, dtype in self.exact():
            given = make_case("scalar", normalize=True).to(dtype)
            plain = Case(given.tensors, {**given.options, "normalize": False})
            want = self.run(plain, form, scale=1.0)[0] * (5**-0.5 if scale is None else scale)
            assert_near(self.run(plain, form, scale=scale)[0], want, dtype, "scaled")
            assert_near(
                self.run(given, form, scale=scale)[0],
                self.run(given, form, scale=1.0)[0],
                dtype,
                "normalised",
            )

    @pytest.mark.parametrize("normalize", [False, True])
    @pytest.mark.parametrize("masked", [False, True])
    def test_not_causal(self, normalize, masked):
        for form, dtype in self.exact():
            given = make_case("none", normalize=normalize, heads=(4, 2, 2), T=70).to(dtype)
            mask = torch.rand(2, 70) > 0.3 if masked else None
            tensors = {n: x if x is None else x.requires_grad_() for n, x in given.tensors.items()}
            got, _state = self.run(Case(tensors, given.options), form, causal=False, mask=mask)
            q, k, v, beta = (tensors[n].double() for n in ("q", "k", "v", "beta"))
            weights = torch.einsum("bthk,bshk->bhts", q, k.repeat_interleave(2, 2)) * beta.repeat_interleave(
                2, 2
            ).transpose(1, 2).unsqueeze(2)
            if mask is not None:
                weights = weights * mask[:, None, None] * mask[:, None, :, None]
            total = weights.sum(-1, keepdim=True).masked_fill(weights.sum(-1, keepdim=True) == 0, 1.0)
            weights = weights / total if normalize else weights * 5**-0.5
            want = torch.einsum("bhts,bshv->bthv", weights, v.repeat_interleave(2, 2))
            assert_near(got, want, dtype)
            names = ["q", "k", "v", "beta"]
            loss = torch.linspace(-1, 1, want.numel(), dtype=torch.float64).view(want.shape)
            grads = torch.autograd.grad((got.double() * loss).sum(), [tensors[n] for n in names])
            wants = torch.autograd.grad((want * loss).sum(), [tensors[n] for n in names])
            for name, a, b in zip(names, grads, wants, strict=True):
                assert_near(a, b, dtype, f"gradient of {name}")

    def test_zero_denominator_gives_a_zero_row(self):
        for form, dtype in self.exact():
            q = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=dtype).view(1, 2, 1, 2).requires_grad_()
            k = torch.tensor([[0.0, 1.0], [0.0, 1.0]], dtype=dtype).view(1, 2, 1, 2)
            v = torch.tensor([5.0, 7.0], dtype=dtype).view(1, 2, 1, 1)
            o, _ = self.attend(form, q=q, k=k, v=v, normalize=True)
            assert o.flatten().tolist() == [0.0, 6.0]
            assert bool(torch.isfinite(torch.autograd.grad(o.sum(), q)[0]).all())

    def test_views_and_expanded_gradients(self):
        for form, dtype in self.exact():
            packed = torch.randn(2, 40, 3, 4, 6, dtype=dtype).requires_grad_()
            q, k, v = packed.unbind(2)
            want = self.attend(form, q=q.contiguous(), k=k.contiguous(), v=v.contiguous())[0]
            got = self.attend(form, q=q, k=k, v=v)[0]
            assert_near(got, want, dtype)
            assert_near(torch.autograd.grad(got.sum(), packed)[0], torch.autograd.grad(want.sum(), packed)[0], dtype)
            turned = torch.randn(2, 40, 4, 6, dtype=dtype).mT.contiguous().mT
            assert_near(
                self.attend(form, q=turned, k=turned, v=turned)[0],
                self.attend(form, q=turned.contiguous(), k=turned.contiguous(), v=turned.contiguous())[0],
                dtype,
            )


def _bits(dtype: torch.dtype) -> int:
    return torch.finfo(dtype).bits
