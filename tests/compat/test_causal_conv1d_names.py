"""The functions of causal_conv1d's names against what causal_conv1d says they compute."""

import pytest
import torch

from phistate.compat.causal_conv1d import (
    PACKAGE,
    causal_conv1d_fn,
    causal_conv1d_ref,
    causal_conv1d_update,
    causal_conv1d_update_ref,
    causal_conv1d_varlen_states,
)
from phistate.compat.functions import signature_of
from tests.compat import oracles
from tests.compat.oracles import ROUNDING, doubled, leaves, same, same_gradients

PUBLISHED = {
    "causal_conv1d_fn": "x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False, "
    "final_states_out=None, activation=None",
    "causal_conv1d_ref": "x, weight, bias=None, initial_states=None, return_final_states=False, "
    "final_states_out=None, activation=None, seq_idx=None",
    "causal_conv1d_update": "x, conv_state, weight, bias=None, activation=None, cache_seqlens=None, "
    "conv_state_indices=None",
    "causal_conv1d_update_ref": "x, conv_state, weight, bias=None, activation=None, cache_seqlens=None",
    "causal_conv1d_varlen_states": "x, cu_seqlens, state_len",
    "causal_conv1d_varlen_states_ref": "x, cu_seqlens, state_len",
}
B, D, L = 2, 5, 7


def test_signatures_are_those_of_the_package():
    functions = {name: value for names in PACKAGE.table.values() for name, value in names.items()}
    assert {name: signature_of(function) for name, function in functions.items()} == PUBLISHED


def inputs_of(width=4, bias=True, dtype=torch.float64, length=L):
    made = {"x": torch.randn(B, D, length), "weight": torch.randn(D, width), "bias": torch.randn(D) if bias else None}
    return {name: None if t is None else t.to(dtype) for name, t in made.items()}


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("activation", [None, "silu", "swish"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", ROUNDING)
def test_convolution(width, activation, bias, dtype):
    inputs = leaves(**inputs_of(width, bias, dtype))
    got = causal_conv1d_fn(**inputs, activation=activation)
    want = oracles.convolve(**doubled(inputs), activation=activation)
    same(got, want, ROUNDING[dtype])
    same_gradients([got], [want], inputs, ROUNDING[dtype])
    same(causal_conv1d_ref(**inputs, activation=activation), want, ROUNDING[dtype])


@pytest.mark.parametrize("length", [1, 2, 7])
@pytest.mark.parametrize("channel_last", [True, False])
def test_states_before_and_after(length, channel_last):
    inputs = leaves(**inputs_of(length=length), initial_states=torch.randn(B, D, 3).double())
    x = inputs["x"].mT.contiguous().mT if channel_last else inputs["x"]
    got = causal_conv1d_fn(**inputs | {"x": x}, return_final_states=True, activation="silu")
    before = inputs["initial_states"]
    rest = {name: t for name, t in inputs.items() if name != "initial_states"}
    want = (oracles.convolve(**rest, activation="silu", before=before), torch.cat([before, inputs["x"]], 2)[..., -3:])
    same(got[0], want[0])
    same(got[1], want[1])
    same_gradients(got, want, inputs)


def test_states_are_written_where_they_are_asked_for():
    inputs, out = inputs_of(), torch.full((B, D, 3), 7.0).double()
    _, states = causal_conv1d_fn(**inputs, return_final_states=True, final_states_out=out)
    assert states is out
    same(out, inputs["x"][..., -3:])


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("dtype", ROUNDING)
def test_packed_sequences_and_padding(before, dtype):
    numbers = torch.tensor([[0, 0, 1, 2, 2, -1, -1], [-1, 3, 3, 3, 3, 3, 3]], dtype=torch.int32)
    inputs = leaves(**inputs_of(dtype=dtype))
    states = torch.randn(B, D, 3).to(dtype).requires_grad_() if before else None
    got = causal_conv1d_fn(**inputs, seq_idx=numbers, initial_states=states, activation="silu")
    twice = None if states is None else states.double()
    want = oracles.convolve(**doubled(inputs), activation="silu", before=twice, seq_idx=numbers)
    same(got, want, ROUNDING[dtype])
    same_gradients([got], [want], inputs | {"initial_states": states}, ROUNDING[dtype])
    same(causal_conv1d_ref(**inputs, initial_states=states, activation="silu", seq_idx=numbers), want, ROUNDING[dtype])


def test_each_tensor_in_its_own_type():
    wide = inputs_of(dtype=torch.float32)
    types = {"x": torch.bfloat16, "weight": torch.float32, "bias": torch.float16}
    inputs = {name: t.to(types[name]) for name, t in wide.items()}
    got = causal_conv1d_fn(**inputs, initial_states=torch.ones(B, D, 3))
    assert got.dtype == torch.bfloat16
    same(got, oracles.convolve(**doubled(inputs), before=torch.ones(B, D, 3)), 1e-2)


def update_oracle(state, x, weight, bias, activation, seen=None):
    """The outputs and what each row's state or ring is afterwards, one token after another."""
    state, out, width = state.clone(), [], weight.shape[1]
    for t in range(x.shape[2]):
        if seen is None:
            past = state[..., state.shape[2] - width + 1 :]
        else:
            places = [[(int(n) + t - w) % state.shape[2] for w in range(width - 1, 0, -1)] for n in seen]
            past = torch.stack([state[row][:, at] for row, at in enumerate(places)])
        window = torch.cat([past, x[:, :, t, None]], 2)
        out.append(oracles.convolve(window, weight, bias, activation)[..., -1])
        if seen is None:
            state = torch.cat([state[..., 1:], x[:, :, t, None]], 2)
        else:
            for row, n in enumerate(seen):
                state[row, :, (int(n) + t) % state.shape[2]] = x[row, :, t]
    return torch.stack(out, 2), state


@pytest.mark.parametrize("kept", [3, 4, 9])
@pytest.mark.parametrize("length", [0, 1, 2, 12], ids=["one token", "1", "2", "12"])
@pytest.mark.parametrize("dtype", ROUNDING)
def test_update(kept, length, dtype):
    inputs, state = inputs_of(dtype=dtype, length=max(length, 1)), torch.randn(B, D, kept).to(dtype)
    want, after = update_oracle(state.double(), *doubled(inputs).values(), "silu")
    x = inputs["x"] if length else inputs["x"][..., 0]
    for update in (causal_conv1d_update, causal_conv1d_update_ref):
        held = state.clone()
        got = update(x, held, inputs["weight"], inputs["bias"], "silu")
        same(got, want if length else want[..., 0], ROUNDING[dtype])
        same(held, after, ROUNDING[dtype])


@pytest.mark.parametrize("kept", [3, 4, 9])
@pytest.mark.parametrize("length", [1, 2, 5, 12])
def test_update_of_a_ring(kept, length):
    inputs, state = inputs_of(length=length), torch.randn(B, D, kept).double()
    seen = torch.tensor([2, 11], dtype=torch.int32)
    want, after = update_oracle(state, *inputs.values(), "silu", seen)
    same(causal_conv1d_update(inputs["x"], state, inputs["weight"], inputs["bias"], "silu", seen), want)
    same(state, after)


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("ring", [True, False])
def test_update_of_chosen_rows(length, ring):
    inputs, kept = inputs_of(length=length), torch.randn(6, D, 5).double()
    numbers = torch.tensor([4, -1], dtype=torch.int32)
    seen = torch.tensor([2, 11]) if ring else None
    want, after = update_oracle(kept[[4, 0]], *inputs.values(), None, seen)
    want[1] = 0
    expected = kept.clone()
    expected[4] = after[0]
    got = causal_conv1d_update(inputs["x"], kept, inputs["weight"], inputs["bias"], None, seen, numbers)
    same(got, want)
    same(kept, expected)


def test_update_records_nothing_and_keeps_the_states_type():
    inputs = leaves(**inputs_of(dtype=torch.float32, length=1))
    state = torch.zeros(B, 4, D).bfloat16().mT
    y = causal_conv1d_update(inputs["x"][..., 0], state, inputs["weight"], inputs["bias"])
    assert not y.requires_grad
    assert state.grad_fn is None
    same(state[..., -1], inputs["x"][..., 0].detach().bfloat16())


def test_states_of_packed_sequences():
    x, offsets = torch.randn(9, D), torch.tensor([0, 1, 1, 9], dtype=torch.int32)
    states = causal_conv1d_varlen_states(x, offsets, 3)
    want = torch.zeros(3, D, 3)
    want[0, :, -1] = x[0]
    want[2] = x[-3:].T
    assert torch.equal(states, want)


INPUTS = inputs_of(dtype=torch.float32)
STATE = torch.zeros(B, D, 4)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"activation": "gelu"}, ValueError, "activation: got 'gelu'; takes 'silu', 'swish' or None"),
        ({"x": torch.zeros(5, 7)}, ValueError, r"x: got shape \(5, 7\); takes \[B,D,L\]"),
        ({"weight": torch.zeros(D, 9)}, ValueError, r"weight: got shape \(5, 9\); takes \[D,W\] with W from 2 to 8"),
        ({"weight": torch.zeros(4, 4)}, ValueError, r"weight: got shape \(4, 4\)"),
        ({"bias": torch.zeros(4)}, ValueError, "bias: got shape"),
        ({"seq_idx": torch.zeros(B, 6)}, ValueError, "seq_idx: got shape"),
        ({"seq_idx": torch.zeros(B, 7), "return_final_states": True}, ValueError, "return_final_states: got it beside"),
        ({"initial_states": torch.zeros(B, D, 4)}, ValueError, "initial_states: got shape"),
        (
            {"return_final_states": True, "final_states_out": torch.zeros(B, 3, D)},
            ValueError,
            "final_states_out: got shape",
        ),
    ],
)
def test_one_error_names_what_does_not_fit(change, error, message):
    with pytest.raises(error, match=message):
        causal_conv1d_fn(**INPUTS | change)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"conv_state": torch.zeros(B, D, 2)}, ValueError, "conv_state: got shape"),
        ({"conv_state": torch.zeros(B, D)}, ValueError, "conv_state: got shape"),
        ({"conv_state": torch.zeros(1, D, 4).expand(B, -1, -1)}, ValueError, "conv_state: got strides"),
        ({"x": torch.zeros(B, D, 1, 1)}, ValueError, r"x: got shape .* takes \[B,D\] or \[B,D,L\]"),
        ({"cache_seqlens": torch.zeros(B)}, TypeError, "cache_seqlens: got torch.float32"),
        ({"conv_state_indices": torch.zeros(3).int()}, ValueError, "conv_state_indices: got shape"),
    ],
)
def test_one_error_names_what_does_not_fit_an_update(change, error, message):
    with pytest.raises(error, match=message):
        causal_conv1d_update(**INPUTS | {"conv_state": STATE} | change)


def test_offsets_of_states_are_checked():
    with pytest.raises(ValueError, match="state_len: got 0; takes 1 or more"):
        causal_conv1d_varlen_states(torch.zeros(3, 2), torch.tensor([0, 3]), 0)


def test_tensors_elsewhere_are_refused_in_one_sentence():
    class Elsewhere(torch.Tensor):
        device = torch.device("cuda:0")

    x = INPUTS["x"].as_subclass(Elsewhere)
    with pytest.raises(ValueError, match="x: got a tensor on cuda:0; these stand-ins for causal_conv1d run on the CPU"):
        causal_conv1d_fn(x, INPUTS["weight"])
