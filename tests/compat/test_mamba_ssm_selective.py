"""Mamba-1's functions of mamba_ssm against what it says they compute: values, gradients, states."""

import pytest
import torch
import torch.nn.functional as F

from phistate.compat.mamba_ssm.selective import (
    mamba_inner_fn,
    mamba_inner_ref,
    selective_scan_fn,
    selective_scan_ref,
    selective_state_update,
    selective_state_update_ref,
)
from tests.compat import oracles
from tests.compat.inputs import inner_inputs, scan_inputs, update_inputs
from tests.compat.oracles import ROUNDING, doubled, leaves, same, same_gradients

KINDS = [(b, c) for b in ("token", "groups", "one group", "constant") for c in ("token", "groups", "constant")]


@pytest.mark.parametrize("kind", KINDS, ids=" x ".join)
@pytest.mark.parametrize("dtype", ROUNDING)
def test_selective_scan(kind, dtype):
    inputs = leaves(**scan_inputs(kind, dtype))
    got = selective_scan_fn(**inputs, delta_softplus=True, return_last_state=True)
    want = oracles.selective_scan(**doubled(inputs), delta_softplus=True)
    same(got[0], want[0], ROUNDING[dtype])
    same(got[1], want[1], ROUNDING[dtype])
    same_gradients(got, want, inputs, ROUNDING[dtype])


def test_selective_scan_of_few_arguments():
    inputs = {name: scan_inputs(("token", "token"))[name] for name in ("u", "delta", "A", "B", "C")}
    inputs["delta"] = inputs["delta"].abs()
    for scan in (selective_scan_fn, selective_scan_ref):
        same(scan(**inputs), oracles.selective_scan(**inputs)[0])


def test_selective_scan_takes_each_tensor_in_its_own_type():
    wide = scan_inputs(("token", "groups"))
    types = dict(zip(wide, [torch.bfloat16, torch.float32, torch.float32, torch.float16, torch.bfloat16], strict=False))
    narrow = {name: t.to(types.get(name, torch.float32)) for name, t in wide.items()}
    y, state = selective_scan_fn(**narrow, delta_softplus=True, return_last_state=True)
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    want = oracles.selective_scan(**{name: t.double() for name, t in narrow.items()}, delta_softplus=True)
    same(y, want[0], 1e-2)
    same(state, want[1], 1e-5)


def inner_oracle(inputs, B_proj_bias=None, C_proj_bias=None, b=None, c=None, dt=None, eps=1e-6, softplus=True):
    x, z = inputs["xz"].chunk(2, 1)
    N = inputs["A"].shape[1]
    x = oracles.convolve(x, inputs["conv1d_weight"][:, 0], inputs["conv1d_bias"], "silu")
    made = torch.einsum("rd,bdl->brl", inputs["x_proj_weight"], x)
    rank = inputs["delta_proj_weight"].shape[1]
    delta = torch.einsum("dr,brl->bdl", inputs["delta_proj_weight"], made[:, :rank])
    B, C = inputs["B"], inputs["C"]
    if B is None:
        B = made[:, rank : rank + N] + (0 if B_proj_bias is None else B_proj_bias[:, None])
    if C is None:
        C = made[:, -N:] + (0 if C_proj_bias is None else C_proj_bias[:, None])

    def normed(M, weight):
        return M if weight is None else oracles.norm(M.transpose(-1, -2), weight, None, eps, True).transpose(-1, -2)

    y, _ = oracles.selective_scan(
        x, normed(delta, dt), inputs["A"], normed(B, b), normed(C, c), inputs["D"], z, inputs["delta_bias"], softplus
    )
    return F.linear(y.transpose(1, 2), inputs["out_proj_weight"], inputs["out_proj_bias"])


@pytest.mark.parametrize("given", [False, True], ids=["from the inputs", "given"])
@pytest.mark.parametrize("dtype", ROUNDING)
def test_mamba_inner(given, dtype):
    B, C = (torch.randn(2, 1, 3, 7), torch.randn(6, 3)) if given else (None, None)
    inputs = leaves(**{name: None if t is None else t.to(dtype) for name, t in inner_inputs(B, C).items()})
    got, want = mamba_inner_fn(**inputs), inner_oracle(doubled(inputs))
    same(got, want, ROUNDING[dtype])
    same_gradients([got], [want], inputs, ROUNDING[dtype])
    same(mamba_inner_ref(**inputs), want, ROUNDING[dtype])


def test_mamba_inner_with_biases_and_norms():
    inputs = leaves(**inner_inputs())
    extra = leaves(
        B_proj_bias=torch.randn(3).double(),
        C_proj_bias=torch.randn(3).double(),
        b_rms_weight=torch.randn(3).double(),
        c_rms_weight=torch.randn(3).double(),
        dt_rms_weight=torch.randn(6).double(),
    )
    got = mamba_inner_fn(**inputs, **extra, delta_softplus=True, checkpoint_lvl=0, b_c_dt_rms_eps=1e-3)
    want = inner_oracle(
        inputs,
        extra["B_proj_bias"],
        extra["C_proj_bias"],
        extra["b_rms_weight"],
        extra["c_rms_weight"],
        extra["dt_rms_weight"],
        1e-3,
    )
    same(got, want)
    same_gradients([got], [want], inputs | extra)


def test_mamba_inner_under_autocast():
    inputs = {name: None if t is None else t.float() for name, t in inner_inputs().items()}
    with torch.autocast("cpu", torch.bfloat16):
        got = mamba_inner_fn(**inputs)
    assert got.dtype == torch.bfloat16
    same(got, inner_oracle({name: None if t is None else t.double() for name, t in inputs.items()}), 5e-2)


def update_oracle(state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False):
    """One token of the selective scan on all channels of all heads."""
    B, C = (t if t.ndim == 3 else t[:, None] for t in (B, C))
    flat = [x.flatten(1), dt.flatten(1)]
    B, C = (t.repeat_interleave(flat[0].shape[1] // t.shape[1], 1) for t in (B, C))
    dt_bias = None if dt_bias is None else dt_bias.flatten()
    step = oracles.step_size(flat[1], dt_bias, dt_softplus, (-float("inf"), float("inf")))[..., None]
    h = (step * A.flatten(0, -2)).exp() * state.flatten(1, -2) + step * flat[0][..., None] * B
    y = (h * C).sum(-1)
    y = y if D is None else y + D.flatten() * flat[0]
    y = y if z is None else y * F.silu(z.flatten(1))
    return y.view(x.shape), h.view(state.shape)


UPDATES = [(0, 0, False), (0, 2, False), (4, 2, False), (4, 2, True), (4, 0, True), (1, 1, False)]


@pytest.mark.parametrize("heads, groups, tied", UPDATES)
@pytest.mark.parametrize("few", [False, True], ids=["all", "few"])
@pytest.mark.parametrize("dtype", ROUNDING)
def test_selective_state_update(heads, groups, tied, few, dtype):
    inputs = update_inputs(heads, groups, tied, dtype)
    if few:
        inputs = {name: inputs[name] for name in ("state", "x", "dt", "A", "B", "C")}
    for update in (selective_state_update, selective_state_update_ref):
        held = inputs["state"].clone()
        want, state = update_oracle(**doubled(inputs), dt_softplus=True)
        same(update(**inputs | {"state": held}, dt_softplus=True), want, ROUNDING[dtype])
        same(held, state, ROUNDING[dtype])


@pytest.mark.parametrize("heads, groups, tied", UPDATES)
def test_selective_state_update_of_chosen_rows(heads, groups, tied):
    inputs = update_inputs(heads, groups, tied)
    numbers = torch.tensor([4, -1, 0], dtype=torch.int32)
    kept = torch.randn(6, *inputs["state"].shape[1:]).double()
    want, state = update_oracle(**inputs | {"state": kept[[4, 0, 0]]}, dt_softplus=True)
    want[1] = 0
    expected = kept.clone()
    expected[4], expected[0] = state[0], state[2]
    same(selective_state_update(**inputs | {"state": kept}, dt_softplus=True, state_batch_indices=numbers), want)
    same(kept, expected)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("order", [(0, 1, 3, 2), (0, 2, 1, 3), (3, 1, 2, 0)], ids=str)
def test_a_state_of_any_order_in_memory_is_written_in_place(order, tied):
    inputs = update_inputs(4, 2, tied)
    back = [order.index(i) for i in range(4)]
    held = inputs["state"].permute(order).contiguous().permute(back)
    want, state = update_oracle(**inputs, dt_softplus=True)
    same(selective_state_update(**inputs | {"state": held}, dt_softplus=True), want)
    same(held, state)


def test_a_step_keeps_the_states_type_and_records_nothing():
    inputs = update_inputs(4, 2, True, torch.float32)
    held = inputs["state"].bfloat16().requires_grad_()
    y = selective_state_update(**inputs | {"state": held, "x": inputs["x"].requires_grad_()}, dt_softplus=True)
    assert held.dtype == torch.bfloat16
    assert held.grad_fn is None
    assert not y.requires_grad
    same(held.detach(), update_oracle(**inputs, dt_softplus=True)[1].detach(), 1e-2)
