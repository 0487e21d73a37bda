"""fla's ops as phistate computes them, against the recurrences their kernels run."""

from __future__ import annotations

import inspect
import itertools

import pytest
import torch

from tests.compat.fla_cases import CASES, B, Case, T

cases = pytest.mark.parametrize("case", CASES, ids=str)


def cases_with(name: str):
    """The cases whose function takes an argument of that name, as fla's does."""
    found = [case for case in CASES if name in inspect.signature(case.adapter).parameters]
    return pytest.mark.parametrize("case", found, ids=str)


def leaves(state) -> list[torch.Tensor]:
    return list(state) if isinstance(state, tuple | list) else [state]


def packed_state(case: Case, sequences: int = B, dtype=torch.float32):
    """Something to begin with, of each shape the case's state has."""
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(sequences, *shape, generator=generator).to(dtype) for shape in case.state]
    if case.name == "linear_attn_normalised":
        made[1] = made[1].abs()  # a sum of positive keys
    return made[0] if len(made) == 1 else tuple(made)


def run(case: Case, given: dict, state=None, **more):
    state = {} if state is None else {"initial_state": state}
    return case.adapter(**given, **case.options, **state, output_final_state=True, **more)


def steps(case: Case, given: dict, begin: int, end: int, row: int | None = None) -> dict:
    """Tokens ``begin`` to ``end`` of what has time, of one row if asked."""
    cut = {}
    for name, x in given.items():
        if x.ndim > 2 and x.shape[1] in (T, case.micro * T):
            n = x.shape[1] // T
            rows = slice(None) if row is None else slice(row, row + 1)
            cut[name] = x[rows, n * begin : n * end]
        else:
            cut[name] = x
    return cut


def reference(case: Case, given: dict, state=None):
    scale = {"scale": case.options["scale"]} if "scale" in case.options else {}
    return case.reference(state, **given, **scale)


def close(a, b, tolerance=2e-5):
    for x, y in zip(leaves(a), leaves(b), strict=True):
        assert x.shape == y.shape
        atol = tolerance * max(1.0, y.detach().abs().max().item())
        torch.testing.assert_close(x.detach().double(), y.detach().double(), rtol=tolerance, atol=atol)


@cases
def test_values_states_and_all_gradients_are_the_recurrences(case: Case):
    given = {name: x.clone().requires_grad_() for name, x in case.given.items()}
    state = [x.requires_grad_() for x in leaves(packed_state(case))]
    o, last = run(case, given, state[0] if len(state) == 1 else tuple(state))
    wide = {name: x.detach().double().requires_grad_() for name, x in case.given.items()}
    wide_state = [x.detach().double().requires_grad_() for x in state]
    o_ref, last_ref = reference(case, wide, wide_state[0] if len(state) == 1 else tuple(wide_state))
    close([o, *leaves(last)], [o_ref, *leaves(last_ref)])
    weights = [torch.randn_like(x) for x in (o_ref, *leaves(last_ref))]
    loss = sum((x * w).sum() for x, w in zip((o, *leaves(last)), weights, strict=True))
    loss_ref = sum((x * w).sum() for x, w in zip((o_ref, *leaves(last_ref)), weights, strict=True))
    grads = torch.autograd.grad(loss, [*given.values(), *state])
    grads_ref = torch.autograd.grad(loss_ref, [*wide.values(), *wide_state])
    for name, mine, theirs in zip([*given, *map(str, range(len(state)))], grads, grads_ref, strict=True):
        scale = theirs.abs().max().clamp(min=1e-6)
        assert (mine.double() - theirs).abs().max() <= 1e-4 * scale, name


@cases
def test_one_call_is_any_split_carried_by_its_state(case: Case):
    whole, last = run(case, case.given)
    first, state = run(case, steps(case, case.given, 0, 20))
    second, again = run(case, steps(case, case.given, 20, T), state if len(case.state) == 1 else tuple(state))
    close([whole, *leaves(last)], [torch.cat([first, second], 1), *leaves(again)])


@cases_with("cu_seqlens")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_sequences_are_those_sequences_one_by_one(case: Case, dtype):
    bounds = [0, 9, 9, 26, T]
    given = steps(case, case.given, 0, T, row=0)
    state = packed_state(case, len(bounds) - 1)
    o, last = run(case, given, state, cu_seqlens=torch.tensor(bounds, dtype=dtype))
    for i, (begin, end) in enumerate(itertools.pairwise(bounds)):
        own = [x[i : i + 1] for x in leaves(state)]
        if begin == end:
            close([x[i : i + 1] for x in leaves(last)], own)
            continue
        part = steps(case, given, begin, end)
        alone, end_state = run(case, part, own[0] if len(own) == 1 else tuple(own))
        close([o[:, begin:end], *(x[i : i + 1] for x in leaves(last))], [alone, *leaves(end_state)])


@cases_with("reverse")
def test_reversed_is_each_sequence_turned_around(case: Case):
    turned = {name: x.flip(1) if x.ndim > 2 else x for name, x in case.given.items()}
    o, last = run(case, case.given, reverse=True)
    expected, state = run(case, turned)
    close([o, *leaves(last)], [expected.flip(1), *leaves(state)])
    bounds = torch.tensor([0, 5, 5, T])
    one = steps(case, case.given, 0, T, row=0)
    o, _ = run(case, one, cu_seqlens=bounds, reverse=True)
    for begin, end in itertools.pairwise(bounds.tolist()):
        if begin < end:
            close(o[:, begin:end], run(case, steps(case, one, begin, end), reverse=True)[0])


@cases_with("state_v_first")
def test_states_can_have_their_values_first(case: Case):
    state = leaves(packed_state(case))
    turned = [state[0].mT.contiguous(), *state[1:]]
    o, last = run(case, case.given, state[0] if len(state) == 1 else tuple(state))
    same, other = run(case, case.given, turned[0] if len(state) == 1 else tuple(turned), state_v_first=True)
    close([o, leaves(last)[0]], [same, leaves(other)[0].mT])
    if "kwargs" in inspect.signature(case.adapter).parameters:
        with pytest.warns(DeprecationWarning, match="state_v_first"):
            run(case, case.given, transpose_state_layout=True)
        with pytest.raises(ValueError, match="state_v_first"):
            run(case, case.given, state_v_first=True, transpose_state_layout=True)


@cases
def test_no_state_is_given_that_was_not_asked_for(case: Case):
    state = case.adapter(**case.given, **case.options, output_final_state=False)[1]
    kept = leaves(state)
    assert kept[0] is None
    # z of a normalised linear attention and of LightNet comes back all the same.
    assert all(x is None for x in kept[1:]) == (
        case.name.partition("_")[0] not in ("lightnet", "linear") or len(kept) == 1
    )


@cases
def test_float64_is_computed_in_float64(case: Case):
    given = {name: x.double() for name, x in case.given.items()}
    state = packed_state(case, dtype=torch.float64)
    o, last = run(case, given, state)
    exact, end = reference(case, given, state)
    assert all(x.dtype == torch.float64 for x in (o, *leaves(last)))
    close([o, *leaves(last)], [exact, *leaves(end)], 1e-11)


@cases
def test_no_steps_at_all(case: Case):
    given = {name: x.requires_grad_() for name, x in steps(case, case.given, 0, 0).items()}
    state = [x.requires_grad_() for x in leaves(packed_state(case))]
    o, last = run(case, given, state[0] if len(state) == 1 else tuple(state))
    close(last, state)
    assert o.shape[1] == 0
    sum(x.sum() for x in (o, *leaves(last))).backward()
    assert all(torch.equal(x.grad, torch.ones_like(x)) for x in state)


@cases
def test_low_precision_errs_at_most_twice_what_plain_torch_errs(case: Case):
    low = {name: x.bfloat16() for name, x in case.given.items()}
    exact, _ = reference(case, {name: x.double() for name, x in low.items()})
    plain, _ = reference(case, low)
    o, last = run(case, low)
    assert o.dtype == torch.bfloat16
    assert all(x.dtype == torch.float32 for x in leaves(last))
    error, allowed = (o.double() - exact).norm(), (plain.double() - exact).norm()
    assert error <= 2 * allowed


@cases
def test_a_positive_decay_is_refused_by_its_own_name(case: Case):
    for name in case.decays:
        given = case.given | {name: case.given[name] + 10}
        with pytest.raises(ValueError, match=rf"{name}.*: got a maximum"):
            run(case, given)


@cases_with("cu_seqlens")
def test_packing_that_does_not_fit_is_refused_in_words_fla_uses(case: Case):
    with pytest.raises(ValueError, match="batch size is expected to be 1"):
        run(case, case.given, cu_seqlens=torch.tensor([0, T]))
    one = steps(case, case.given, 0, T, row=0)
    with pytest.raises(ValueError, match="number of initial states is expected to be equal|initial_state"):
        run(case, one, packed_state(case, 3), cu_seqlens=torch.tensor([0, 5, T]))


@cases_with("kwargs")
def test_what_fla_does_not_know_is_refused(case: Case):
    with pytest.raises(TypeError, match="nonsense"):
        run(case, case.given, nonsense=1)
    with pytest.raises(DeprecationWarning, match="head_first"):
        run(case, case.given, head_first=False)
    with pytest.raises(ValueError, match="chunk_size"):
        run(case, case.given, chunk_size=48)


@cases
def test_extreme_decays_stay_finite(case: Case):
    for name in case.decays:
        given = {n: x.clone().requires_grad_() for n, x in case.given.items()}
        low = case.given[name].clone()
        low[:, 3::5] = -1e4
        given[name] = low.requires_grad_()
        o, last = run(case, given)
        grads = torch.autograd.grad(o.sum() + sum(x.sum() for x in leaves(last)), list(given.values()))
        assert all(x.isfinite().all() for x in (o, *leaves(last), *grads))
        exact, _ = reference(case, {n: x.detach().double() for n, x in given.items()})
        close(o, exact, 1e-4)
