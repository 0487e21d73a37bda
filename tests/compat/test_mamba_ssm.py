"""The functions of mamba_ssm's names: signatures as published, one error for what does not fit."""

import pytest
import torch

from phistate.compat.functions import signature_of
from phistate.compat.mamba_ssm import PACKAGE, gated, norms
from phistate.compat.mamba_ssm.selective import mamba_inner_fn, selective_scan_fn, selective_state_update
from phistate.compat.mamba_ssm.ssd import mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined
from tests.compat.inputs import inner_inputs, scan_inputs, split_inputs, ssd_inputs, update_inputs

SCAN = "u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False"
INNER = (
    "xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias, A, B=None, "
    "C=None, D=None, delta_bias=None, B_proj_bias=None, C_proj_bias=None, delta_softplus=True"
)
UPDATE = "state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False"
NORM = (
    "x, weight, bias, residual=None, x1=None, weight1=None, bias1=None, eps=1e-06, dropout_p=0.0, rowscale=None, "
    "prenorm=False, residual_in_fp32=False"
)
GATED = "x, weight, bias, z=None, eps=1e-06, group_size=None, norm_before_gate=True"
PUBLISHED = {
    "selective_scan_fn": SCAN,
    "selective_scan_ref": SCAN,
    "mamba_inner_fn": f"{INNER}, checkpoint_lvl=1, b_rms_weight=None, c_rms_weight=None, dt_rms_weight=None, "
    "b_c_dt_rms_eps=1e-06",
    "mamba_inner_ref": INNER,
    "selective_state_update": f"{UPDATE}, state_batch_indices=None",
    "selective_state_update_ref": UPDATE,
    "mamba_chunk_scan_combined": "x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, "
    "seq_idx=None, cu_seqlens=None, dt_softplus=False, dt_limit=(0.0, inf), return_final_states=False, "
    "return_varlen_states=False",
    "mamba_split_conv1d_scan_combined": "zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, "
    "initial_states=None, seq_idx=None, dt_limit=(0.0, inf), return_final_states=False, activation='silu', "
    "rmsnorm_weight=None, rmsnorm_eps=1e-06, outproj_weight=None, outproj_bias=None, headdim=None, ngroups=1, "
    "norm_before_gate=True",
    "layer_norm_fn": f"{NORM}, is_rms_norm=False, return_dropout_mask=False",
    "rms_norm_fn": f"{NORM}, return_dropout_mask=False",
    "layernorm_fn": f"{GATED}, is_rms_norm=False",
    "rmsnorm_fn": GATED,
}


def test_signatures_are_those_of_the_package():
    functions = {
        name: value for names in PACKAGE.table.values() for name, value in names.items() if not isinstance(value, type)
    }
    assert {name: signature_of(function) for name, function in functions.items()} == PUBLISHED


SCAN_INPUTS = scan_inputs(("token", "token"), torch.float32)
UPDATE_INPUTS = update_inputs(0, 0, False, torch.float32)
CHUNK_INPUTS = ssd_inputs(1, torch.float32)
SPLIT_INPUTS = split_inputs(dtype=torch.float32)
ROWS = torch.randn(2, 6)


@pytest.mark.parametrize(
    "function, inputs, change, error, message",
    [
        (
            selective_scan_fn,
            SCAN_INPUTS,
            {"A": torch.zeros(6, 3, dtype=torch.complex64)},
            TypeError,
            "A: got torch.compl",
        ),
        (
            selective_scan_fn,
            SCAN_INPUTS,
            {"u": torch.zeros(6, 7)},
            ValueError,
            r"u: got shape \(6, 7\); takes \[B,D,L\]",
        ),
        (selective_scan_fn, SCAN_INPUTS, {"u": 1.0}, TypeError, "u: got float"),
        (selective_scan_fn, SCAN_INPUTS, {"B": torch.zeros(2, 4, 7)}, ValueError, "B: got shape"),
        (selective_scan_fn, SCAN_INPUTS, {"B": torch.zeros(2, 4, 3, 7)}, ValueError, "B: got 4 groups"),
        (selective_scan_fn, SCAN_INPUTS, {"z": torch.zeros(2, 7, 6)}, ValueError, "z: got shape"),
        (selective_state_update, UPDATE_INPUTS, {"A": torch.zeros(4, 5, dtype=torch.complex64)}, TypeError, "A: got"),
        (selective_state_update, UPDATE_INPUTS, {"state": torch.zeros(2, 4, 5)}, ValueError, "state: got shape"),
        (selective_state_update, UPDATE_INPUTS, {"B": torch.zeros(3, 6)}, ValueError, "B: got shape"),
        (selective_state_update, UPDATE_INPUTS, {"C": torch.zeros(3, 2, 5)}, ValueError, "C: got shape"),
        (
            selective_state_update,
            UPDATE_INPUTS,
            {"state_batch_indices": torch.zeros(3)},
            TypeError,
            "state_batch_indices: ",
        ),
        (
            selective_state_update,
            UPDATE_INPUTS,
            {"state_batch_indices": torch.zeros(2).int()},
            ValueError,
            "state_batch_ind",
        ),
        (
            mamba_chunk_scan_combined,
            CHUNK_INPUTS | {"chunk_size": 4},
            {"chunk_size": 0},
            ValueError,
            "chunk_size: got 0",
        ),
        (
            mamba_chunk_scan_combined,
            CHUNK_INPUTS | {"chunk_size": 4},
            {"A": torch.ones(4)},
            ValueError,
            "A: got a maximum",
        ),
        (
            mamba_chunk_scan_combined,
            CHUNK_INPUTS | {"chunk_size": 4},
            {"B": torch.ones(2, 9)},
            ValueError,
            "B: got shape",
        ),
        (
            mamba_chunk_scan_combined,
            CHUNK_INPUTS | {"chunk_size": 4},
            {"return_varlen_states": True},
            ValueError,
            "cu_seqlens: got None",
        ),
        (
            mamba_chunk_scan_combined,
            CHUNK_INPUTS | {"chunk_size": 4, "return_varlen_states": True},
            {"cu_seqlens": torch.tensor([0, 9])},
            ValueError,
            "cu_seqlens: got a batch of 2",
        ),
        (mamba_split_conv1d_scan_combined, SPLIT_INPUTS | {"chunk_size": 4}, {}, ValueError, "headdim: got None"),
        (
            mamba_split_conv1d_scan_combined,
            SPLIT_INPUTS | {"chunk_size": 4, "headdim": 3},
            {"zxbcdt": torch.zeros(2, 8, 40)},
            ValueError,
            "zxbcdt: got 40 columns; takes 48",
        ),
        (
            mamba_split_conv1d_scan_combined,
            SPLIT_INPUTS | {"chunk_size": 4, "headdim": 3},
            {"outproj_weight": None},
            ValueError,
            "outproj_bias: got one without",
        ),
        (
            gated.rmsnorm_fn,
            {"x": ROWS, "weight": torch.ones(6), "bias": None},
            {"group_size": 4},
            ValueError,
            "group_size",
        ),
        (
            norms.rms_norm_fn,
            {"x": ROWS, "weight": torch.ones(6), "bias": None},
            {"dropout_p": 1.0},
            ValueError,
            "dropout_p",
        ),
        (
            norms.rms_norm_fn,
            {"x": ROWS, "weight": torch.ones(6), "bias": None},
            {"x1": ROWS, "rowscale": torch.ones(2)},
            ValueError,
            "rowscale: got it beside x1",
        ),
    ],
)
def test_one_error_names_what_does_not_fit(function, inputs, change, error, message):
    with pytest.raises(error, match=message):
        function(**inputs | change)


@pytest.mark.parametrize("change, message", [({"checkpoint_lvl": 2}, "checkpoint_lvl: got 2; takes 0 or 1")])
def test_a_level_of_checkpoints_is_one_of_two(change, message):
    with pytest.raises(ValueError, match=message):
        mamba_inner_fn(**inner_inputs(), **change)


def test_a_norm_of_constant_values_is_refused():
    with pytest.raises(ValueError, match="b_rms_weight: got it beside values that are constant"):
        mamba_inner_fn(**inner_inputs(torch.randn(6, 3)), b_rms_weight=torch.ones(3).double())


def test_tensors_elsewhere_are_refused_in_one_sentence():
    class Elsewhere(torch.Tensor):
        device = torch.device("cuda:0")

    u = torch.zeros(1, 4, 2).as_subclass(Elsewhere)
    with pytest.raises(
        ValueError, match="u: got a tensor on cuda:0; these stand-ins for mamba_ssm run on the CPU only"
    ):
        selective_scan_fn(u, u, torch.zeros(4, 4), u, u)
