"""The functions of mamba_ssm's names against what mamba_ssm says they compute: values, gradients, states."""

import pytest
import torch
import torch.nn.functional as F

from phistate.compat.functions import signature_of
from phistate.compat.mamba_ssm import PACKAGE, gated, norms
from phistate.compat.mamba_ssm.selective import (
    mamba_inner_fn,
    mamba_inner_ref,
    selective_scan_fn,
    selective_scan_ref,
    selective_state_update,
    selective_state_update_ref,
)
from phistate.compat.mamba_ssm.ssd import mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined
from tests.compat import oracles
from tests.compat.oracles import ROUNDING, doubled, leaves, same, same_gradients

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


def scan_inputs(kind, dtype=torch.float64):
    batch, dim, N, L = 2, 6, 3, 7
    shapes = {"token": (batch, N, L), "groups": (batch, 2, N, L), "one group": (batch, 1, N, L), "constant": (dim, N)}
    B, C = (torch.randn(shapes[word]) for word in kind)
    made = {
        "u": torch.randn(batch, dim, L),
        "delta": torch.randn(batch, dim, L),
        "A": -torch.rand(dim, N),
        "B": B,
        "C": C,
        "D": torch.randn(dim),
        "z": torch.randn(batch, dim, L),
        "delta_bias": torch.randn(dim),
    }
    return {name: t.to(dtype) for name, t in made.items()}


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


def inner_inputs(B=None, C=None):
    batch, dim, N, L, rank, width, out = 2, 6, 3, 7, 2, 4, 5
    made = {
        "xz": torch.randn(batch, 2 * dim, L),
        "conv1d_weight": torch.randn(dim, 1, width),
        "conv1d_bias": torch.randn(dim),
        "x_proj_weight": torch.randn(rank + 2 * N, dim),
        "delta_proj_weight": torch.randn(dim, rank),
        "out_proj_weight": torch.randn(out, dim),
        "out_proj_bias": torch.randn(out),
        "A": -torch.rand(dim, N),
        "B": B,
        "C": C,
        "D": torch.randn(dim),
        "delta_bias": torch.randn(dim),
    }
    return {name: None if t is None else t.double() for name, t in made.items()}


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


def update_inputs(heads, groups, tied, dtype=torch.float64):
    batch, P, N = 3, 4, 5
    channels = (heads, P) if heads else (P,)
    made = {
        "state": torch.randn(batch, *channels, N),
        "x": torch.randn(batch, *channels),
        "dt": torch.randn(batch, *channels),
        "A": -torch.rand(*channels, N),
        "B": torch.randn(batch, groups, N) if groups else torch.randn(batch, N),
        "C": torch.randn(batch, groups, N) if groups else torch.randn(batch, N),
        "D": torch.randn(channels),
        "z": torch.randn(batch, *channels),
        "dt_bias": torch.randn(channels),
    }
    made = {name: t.to(dtype) for name, t in made.items()}
    if tied:
        made["dt"] = made["dt"][..., :1].expand(-1, -1, P)
        made["A"] = made["A"][..., :1, :1].expand(-1, P, N)
        made["dt_bias"] = made["dt_bias"][:, :1].expand(-1, P)
    return made


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


def ssd_inputs(D=1, dtype=torch.float64, batch=2):
    L, H, P, G, N = 9, 4, 3, 2, 5
    made = {
        "x": torch.randn(batch, L, H, P),
        "dt": torch.randn(batch, L, H),
        "A": -torch.rand(H),
        "B": torch.randn(batch, L, G, N),
        "C": torch.randn(batch, L, G, N),
        "D": torch.randn((H, P)[:D]) if D else None,
        "z": torch.randn(batch, L, H, P),
        "dt_bias": torch.randn(H),
    }
    return {name: None if t is None else t.to(dtype) for name, t in made.items()}


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


def split_inputs(mlp=0, D=1, norm=True, out=True, dtype=torch.float64, batch=2):
    L, H, P, G, N, width = 8, 4, 3, 2, 5, 4
    dim, taps = H * P, H * P + 2 * G * N
    made = {
        "zxbcdt": torch.randn(batch, L, 2 * mlp + dim + taps + H),
        "conv1d_weight": torch.randn(taps, width),
        "conv1d_bias": torch.randn(taps),
        "dt_bias": torch.randn(H),
        "A": -torch.rand(H),
        "D": torch.randn((H, P)[:D]),
        "initial_states": torch.randn(batch, H, P, N),
        "rmsnorm_weight": torch.randn(dim) if norm else None,
        "outproj_weight": torch.randn(6, mlp + dim) if out else None,
        "outproj_bias": torch.randn(6) if out else None,
    }
    return {name: None if t is None else t.to(dtype) for name, t in made.items()}


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


@pytest.mark.parametrize("rms", [True, False])
@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize("before_gate", [True, False])
@pytest.mark.parametrize("gate", [True, False])
def test_gated_norms(rms, size, before_gate, gate):
    inputs = leaves(
        x=torch.randn(2, 3, 6).double(),
        weight=torch.randn(6).double(),
        bias=torch.randn(6).double(),
        z=torch.randn(2, 3, 6).double() if gate else None,
    )
    got = gated.layernorm_fn(**inputs, eps=1e-3, group_size=size, norm_before_gate=before_gate, is_rms_norm=rms)
    want = oracles.gated_norm(**inputs, eps=1e-3, size=size or 6, before_gate=before_gate, rms=rms)
    same(got, want)
    same_gradients([got], [want], inputs)
    if rms:
        same(gated.rmsnorm_fn(**inputs, eps=1e-3, group_size=size, norm_before_gate=before_gate), want)


@pytest.mark.parametrize("rms", [True, False])
def test_norms_of_a_sum(rms):
    inputs = leaves(
        x=torch.randn(2, 3, 6).double(),
        weight=torch.randn(6).double(),
        bias=torch.randn(6).double(),
        residual=torch.randn(2, 3, 6).double(),
        x1=torch.randn(2, 3, 6).double(),
        weight1=torch.randn(6).double(),
        bias1=torch.randn(6).double(),
    )
    function = norms.rms_norm_fn if rms else norms.layer_norm_fn
    got = function(**inputs, eps=1e-3, prenorm=True)
    total = inputs["x"] + inputs["x1"] + inputs["residual"]
    want = (
        oracles.norm(total, inputs["weight"], inputs["bias"], 1e-3, rms),
        oracles.norm(total, inputs["weight1"], inputs["bias1"], 1e-3, rms),
        total,
    )
    for a, b in zip(got, want, strict=True):
        same(a, b)
    same_gradients(got, want, inputs)


def test_what_a_norm_gives():
    x, ones = torch.randn(2, 3).bfloat16(), torch.ones(3)
    assert norms.rms_norm_fn(x, ones, None).dtype == torch.bfloat16
    y, total = norms.rms_norm_fn(x, ones, None, prenorm=True)
    assert (y.dtype, total.dtype) == (torch.bfloat16, torch.bfloat16)
    assert norms.rms_norm_fn(x, ones, None, prenorm=True, residual_in_fp32=True)[1].dtype == torch.float32
    assert norms.rms_norm_fn(x, ones, None, x.float(), prenorm=True)[1].dtype == torch.float32
    assert norms.rms_norm_fn(x, ones, None, return_dropout_mask=True)[1:] == (None, None)


def test_dropout_and_rowscale_in_a_norm():
    x, scale = torch.randn(50, 8).double(), torch.rand(50).double()
    y, total, mask, _ = norms.layer_norm_fn(
        x, torch.ones(8), None, rowscale=scale, dropout_p=0.25, prenorm=True, return_dropout_mask=True
    )
    same(total, x * scale[:, None] * mask / 0.75)
    same(y, oracles.norm(total, torch.ones(8), None, 1e-6, False))
    assert 0.65 < mask.double().mean() < 0.85
    masks = norms.layer_norm_fn(x, torch.ones(8), None, x1=x, dropout_p=0.25, return_dropout_mask=True)[1:]
    assert not torch.equal(*masks)


def test_norms_as_modules():
    plain, grouped, layer = norms.RMSNorm(6, dropout_p=0.5), gated.RMSNorm(6, group_size=3), gated.LayerNorm(6)
    x, z = torch.randn(2, 6), torch.randn(2, 6)
    ones = torch.ones(6)
    assert [name for name, _ in plain.named_parameters()] == ["weight"]
    assert list(layer.state_dict()) == ["weight", "bias"]
    assert plain.bias is None
    assert grouped.bias is None
    same(grouped(x, z), oracles.gated_norm(x, ones, None, z, 1e-5, 3, True), 1e-6)
    same(layer(x), oracles.norm(x, ones, torch.zeros(6), 1e-5, False), 1e-6)
    same(plain.eval()(x), oracles.norm(x, ones, None, 1e-5, True), 1e-6)
    assert (plain.train()(x) == 0).any()
    y, total = plain.eval()(x, z, prenorm=True)
    same(total, x + z)
    same(y, oracles.norm(x + z, ones, None, 1e-5, True), 1e-6)


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
