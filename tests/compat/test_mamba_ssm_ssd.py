"""Mamba-2's functions of mamba_ssm against what it says they compute: values, gradients, states."""

import pytest
import torch
import torch.nn.functional as F

from phistate.compat.mamba_ssm.ssd import mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined
from tests.compat import oracles
from tests.compat.inputs import split_inputs, ssd_inputs
from tests.compat.oracles import ROUNDING, doubled, leaves, same, same_gradients


@pytest.mark.parametrize("D", [0, 1, 2])
@pytest.mark.parametrize("limits", [(0.0, float("inf")), (0.3, 0.9)], ids=str)
@pytest.mark.parametrize("dtype", ROUNDING)
def test_chunk_scan(D, limits, dtype):
    inputs = leaves(**ssd_inputs(D, dtype), initial_states=torch.randn(2, 4, 3, 5).to(dtype))
    got = mamba_chunk_scan_combined(**inputs, chunk_size=4, dt_softplus=True, dt_limit=limits, return_final_states=True)
    twice = doubled(inputs)
    want = oracles.ssd(before=twice.pop("initial_states"), **twice, softplus=True, limits=limits)
    same(got[0], want[0], ROUNDING[dtype])
    same(got[1], want[1], ROUNDING[dtype])
    same_gradients(got, want, inputs, ROUNDING[dtype])


def test_chunk_scan_of_few_arguments():
    inputs = {name: ssd_inputs()[name] for name in ("x", "dt", "A", "B", "C")}
    same(mamba_chunk_scan_combined(**inputs, chunk_size=256), oracles.ssd(**inputs)[0])  # below 0 steps are 0


@pytest.mark.parametrize("numbers", [[[0] * 4 + [1] * 5, [0, 1, 2, 2, 2, 3, 3, 3, 3]], [[1] * 4 + [2] * 5, [0] * 9]])
@pytest.mark.parametrize("dtype", ROUNDING)
def test_chunk_scan_of_packed_sequences(numbers, dtype):
    numbers = torch.tensor(numbers, dtype=torch.int32)
    inputs = leaves(**ssd_inputs(2, dtype), initial_states=torch.randn(2, 4, 3, 5).to(dtype))
    got = mamba_chunk_scan_combined(**inputs, chunk_size=4, seq_idx=numbers, dt_softplus=True, return_final_states=True)
    twice = doubled(inputs)
    want = oracles.ssd(before=twice.pop("initial_states"), **twice, seq_idx=numbers.long(), softplus=True)
    same(got[0], want[0], ROUNDING[dtype])
    same(got[1], want[1], ROUNDING[dtype])
    same_gradients(got, want, inputs, ROUNDING[dtype])


@pytest.mark.parametrize("numbered", [True, False])
def test_chunk_scan_gives_the_state_of_every_packed_sequence(numbered):
    inputs = leaves(**ssd_inputs(1, batch=1))
    offsets = torch.tensor([0, 2, 2, 9], dtype=torch.int32)
    numbers = torch.tensor([[0] * 2 + [2] * 7], dtype=torch.int32) if numbered else None
    y, last, every = mamba_chunk_scan_combined(
        **inputs,
        chunk_size=4,
        seq_idx=numbers,
        cu_seqlens=offsets,
        dt_softplus=True,
        return_final_states=True,
        return_varlen_states=True,
    )
    timed = ("x", "dt", "B", "C", "z")
    parts = [
        oracles.ssd(**{n: t[:, a:b] if n in timed else t for n, t in inputs.items()}, softplus=True)
        for a, b in ((0, 2), (2, 9))
    ]
    want = torch.cat([y for y, _ in parts], 1)
    states = torch.cat([parts[0][1], torch.zeros_like(parts[0][1]), parts[1][1]])
    same(y, want)
    same(every, states)
    same(last, states[-1:])
    same_gradients([y, every], [want, states], inputs)


def test_offsets_are_read_for_their_states_alone():
    inputs = ssd_inputs(1, batch=1)
    whole = mamba_chunk_scan_combined(**inputs, chunk_size=4, dt_softplus=True)
    same(mamba_chunk_scan_combined(**inputs, chunk_size=4, dt_softplus=True, cu_seqlens=torch.tensor([0, 3, 9])), whole)


def test_states_in_the_types_of_the_package():
    inputs = {n: t.bfloat16() if n in "xBC" else t for n, t in ssd_inputs(1, torch.float32, 1).items()}
    y, last, every = mamba_chunk_scan_combined(
        **inputs,
        chunk_size=4,
        cu_seqlens=torch.tensor([0, 9]),
        dt_softplus=True,
        return_final_states=True,
        return_varlen_states=True,
    )
    assert (y.dtype, last.dtype, every.dtype) == (torch.bfloat16, torch.float32, torch.bfloat16)
    assert last.is_contiguous()


def split_oracle(inputs, P, G, seq_idx=None, limits=(0.0, float("inf")), activation="silu", before_gate=True, eps=1e-6):
    H = inputs["D"].shape[0]
    dim, taps = H * P, inputs["conv1d_weight"].shape[0]
    mlp = (inputs["zxbcdt"].shape[-1] - dim - taps - H) // 2
    gate, value, z, xBC, dt = inputs["zxbcdt"].split([mlp, mlp, dim, taps, H], -1)
    xBC = oracles.convolve(
        xBC.transpose(1, 2), inputs["conv1d_weight"], inputs["conv1d_bias"], activation, seq_idx=seq_idx
    ).transpose(1, 2)
    x, B, C = xBC.split([dim, (taps - dim) // 2, (taps - dim) // 2], -1)
    normed = inputs["rmsnorm_weight"] is not None
    y, state = oracles.ssd(
        x.unflatten(-1, (H, P)),
        dt,
        inputs["A"],
        B.unflatten(-1, (G, -1)),
        C.unflatten(-1, (G, -1)),
        inputs["D"],
        None if normed else z.unflatten(-1, (H, P)),
        inputs["dt_bias"],
        inputs["initial_states"],
        seq_idx,
        True,
        limits,
    )
    y = y.flatten(-2)
    if normed:
        y = oracles.gated_norm(y, inputs["rmsnorm_weight"], None, z, eps, dim // G, before_gate)
    y = torch.cat([F.silu(gate) * value, y], -1)
    return (
        y if inputs["outproj_weight"] is None else F.linear(y, inputs["outproj_weight"], inputs["outproj_bias"])
    ), state


@pytest.mark.parametrize("mlp, D, norm, out", [(0, 1, True, True), (2, 2, True, True), (3, 1, False, False)])
@pytest.mark.parametrize("before_gate", [True, False])
@pytest.mark.parametrize("dtype", ROUNDING)
def test_split_conv1d_scan(mlp, D, norm, out, before_gate, dtype):
    inputs = leaves(**split_inputs(mlp, D, norm, out, dtype))
    numbers = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2], [0] * 8], dtype=torch.int32)
    got = mamba_split_conv1d_scan_combined(
        **inputs,
        chunk_size=4,
        seq_idx=numbers,
        dt_limit=(0.1, 1.5),
        return_final_states=True,
        rmsnorm_eps=1e-3,
        headdim=3 if D == 1 else None,
        ngroups=2,
        norm_before_gate=before_gate,
    )
    want = split_oracle(doubled(inputs), 3, 2, numbers.long(), (0.1, 1.5), before_gate=before_gate, eps=1e-3)
    same(got[0], want[0], ROUNDING[dtype])
    same(got[1], want[1], ROUNDING[dtype])
    same_gradients(got, want, inputs, ROUNDING[dtype])


def test_split_conv1d_scan_without_activation():
    inputs = split_inputs() | {"initial_states": None, "conv1d_bias": None}
    got = mamba_split_conv1d_scan_combined(**inputs, chunk_size=4, activation=None, headdim=3, ngroups=2)
    same(got, split_oracle(inputs, 3, 2, activation=None)[0])
