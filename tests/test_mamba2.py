"""Mamba-2's own arguments, against its recurrence written out."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from phistate import State, mamba2_scan, mamba2_step_
from tests.scan_cases import BACKENDS, assert_near, differentiable, poison, to


def make(batch=2, T=9, H=4, P=3, G=2, N=5, *, full=True):
    draw = {"dtype": torch.float64}
    return {
        "x": torch.randn(batch, T, H, P, **draw),
        "dt": torch.randn(batch, T, H, **draw),
        "A": -torch.rand(H, **draw),
        "B": torch.randn(batch, T, G, N, **draw),
        "C": torch.randn(batch, T, G, N, **draw),
        "D": torch.randn(H, **draw) if full else torch.randn(H, P, **draw),
        "z": torch.randn(batch, T, H, P, **draw) if full else None,
        "dt_bias": torch.randn(H, **draw) if full else None,
    }


def oracle(c, limit, S):
    """The docstring's recurrence; S [B,H,N,P]."""
    heads, groups = c["x"].shape[2], c["B"].shape[2]
    dt = F.softplus(c["dt"] + (0 if c["dt_bias"] is None else c["dt_bias"])).clamp(*limit)
    B, C = (c[n].repeat_interleave(heads // groups, 2) for n in "BC")
    rows = []
    for t in range(c["x"].shape[1]):
        x, step = c["x"][:, t], dt[:, t, :, None, None]
        S = (step * c["A"][:, None, None]).exp() * S + step * B[:, t].unsqueeze(-1) * x.unsqueeze(-2)
        y = (C[:, t].unsqueeze(-2) @ S).squeeze(-2) + (c["D"].unsqueeze(-1) if c["D"].ndim == 1 else c["D"]) * x
        rows.append(y if c["z"] is None else y * F.silu(c["z"][:, t]))
    return torch.stack(rows, 1), S


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.1, 0.7)])
def test_is_the_recurrence(full, dtype, limit):
    c = make(full=full)
    S = torch.randn(2, 4, 5, 3, dtype=torch.float64)
    given = to(c, dtype)
    want, want_s = oracle(to(given, torch.float64), limit, S)
    held = State(s=S.to(torch.promote_types(dtype, torch.float32)), tokens=torch.tensor([3, 3]))
    more = {"dt_softplus": True, "dt_limit": limit}
    y, state = mamba2_scan(**given, **more, initial_state=held, return_state=True)
    assert y.dtype == dtype
    allowed = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 3e-2}[dtype]
    assert_near(y, want, dtype, "y", allowed=allowed)
    assert_near(state.s, want_s, dtype, "s", allowed=allowed)
    assert state.tokens.tolist() == [12, 12]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("keep", ["N dense", "P dense", "neither"])
@pytest.mark.parametrize(
    ("dtype", "held"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)],
)
def test_step_is_a_scan_of_one(backend, full, keep, dtype, held):
    """The clamp of the step sizes too, which decoding elsewhere forgets."""
    c = to(make(T=1, full=full), dtype)
    state = torch.randn(2, 4, 3, 5).to(held)
    want, want_s = oracle(to(c, torch.float64), (0.1, 0.7), state.double().mT)
    if keep != "N dense":
        state = state.mT.contiguous().mT if keep == "P dense" else torch.stack([state, state], -1)[..., 0]
    one = {n: t[:, 0] if n in ("x", "dt", "B", "C", "z") and t is not None else t for n, t in c.items()}
    y = mamba2_step_(state, **one, dt_softplus=True, dt_limit=(0.1, 0.7), backend=backend)
    assert_near(y, want[:, 0], dtype, "y")
    assert_near(state, want_s.mT, held, "state")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide", ["B", "C", "BC"])
def test_inputs_wider_than_x(backend, dtype, wide):
    """The scan takes what its step takes, and rounds nothing but the output."""
    given = to(make(2, 1), dtype)
    for n in wide:
        given[n] = torch.randn(2, 1, 2, 5)
    want, want_s = oracle(to(given, torch.float64), (0.0, float("inf")), torch.zeros(2, 4, 5, 3, dtype=torch.float64))
    y, state = mamba2_scan(**given, dt_softplus=True, return_state=True, backend=backend)
    assert y.dtype == dtype
    assert_near(y, want, dtype, "y", allowed=torch.finfo(dtype).eps)
    assert_near(state.s, want_s, torch.float32, "s")
    one = {n: t[:, 0] if n in ("x", "dt", "B", "C", "z") else t for n, t in given.items()}
    held = torch.zeros(2, 4, 3, 5)
    assert_near(mamba2_step_(held, **one, dt_softplus=True, backend=backend), y[:, 0].double(), dtype, "step")
    assert_near(held, want_s.mT, torch.float32, "state of the step")


@pytest.mark.parametrize("backend", BACKENDS)
def test_segments_padding_and_packing(backend):
    c = to(make(1, 70, full=True), torch.float32)
    more = {"dt_softplus": True, "return_state": True, "backend": backend}
    want, want_state = mamba2_scan(**c, **more)
    pieces, state = [], None
    for a, b in itertools.pairwise((0, 1, 3, 3, 66, 70)):
        part = {n: t[:, a:b] if n in ("x", "dt", "B", "C", "z") else t for n, t in c.items()}
        y, state = mamba2_scan(**part, **more, initial_state=state)
        pieces.append(y)
    assert_near(torch.cat(pieces, 1), want, torch.float32, "segments")
    assert_near(state.s, want_state.s, torch.float32, "segments")

    mask = torch.ones(1, 80, dtype=torch.bool)
    mask[:, [0, 1, 2, 20, 21, 40, 76, 77, 78, 79]] = False
    kept = mask[0].nonzero().squeeze(1)
    long = differentiable(poison(c, kept, 80, ("x", "dt", "B", "C", "z"), False))
    got, state = mamba2_scan(**long, **more, mask=mask)
    assert_near(got[:, kept], want, torch.float32, "padding")
    assert not got[~mask].any()
    assert_near(state.s, want_state.s, torch.float32, "padding")
    for n, gradient in zip(long, torch.autograd.grad(got.sum(), list(long.values())), strict=True):
        assert bool(torch.isfinite(gradient).all()), n

    bounds = [0, 0, 30, 31, 70]
    got, state = mamba2_scan(**c, **more, cu_seqlens=torch.tensor(bounds))
    for n, (a, b) in enumerate(itertools.pairwise(bounds)):
        part = {k: t[:, a:b] if k in ("x", "dt", "B", "C", "z") else t for k, t in c.items()}
        y, alone = mamba2_scan(**part, **more)
        assert_near(got[:, a:b], y, torch.float32, f"sequence {n}")
        assert_near(state.s[n : n + 1], alone.s, torch.float32, f"sequence {n}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 9, 4)}, r"x: got shape \(2, 9, 4\); takes \[B,T,H,P\]"),
        ({"dt": torch.zeros(2, 9, 3).double()}, "dt: got shape"),
        ({"B": torch.zeros(2, 9, 3, 5).double()}, "B: got shape .* takes .B,T,G,N., G a count that divides H = 4"),
        ({"C": torch.zeros(2, 9, 2, 4).double()}, "C: got shape"),
        ({"D": torch.zeros(3).double()}, "D: got shape"),
        ({"dt_limit": (1.0, 0.0)}, "dt_limit: got"),
        ({"A": torch.ones(4).double(), "dt_softplus": True}, "^A: got a maximum of 1; takes log-space values ≤ 0"),
        ({"dt": torch.full((2, 9, 4), float("nan")).double()}, "^dt: got a maximum Δ·A of nan; takes"),
        ({"dt": -torch.ones(2, 9, 4).double(), "dt_limit": (-2.0, 0.0)}, "^dt: got a maximum Δ·A of"),
        ({"x": torch.zeros(2, 9, 0, 3)}, "^x: got 0 heads"),
        ({"B": torch.zeros(2, 9, 2, 5).half()}, "^B: got torch.float16; takes torch.float64 or torch.float32"),
        ({"C": torch.zeros(2, 9, 2, 5).half()}, "^C: got torch.float16; takes torch.float64 or torch.float32"),
    ],
)
def test_what_is_refused(change, message):
    with pytest.raises((ValueError, TypeError), match=message):
        mamba2_scan(**{**make(), **change})
