"""Small random arguments of mamba_ssm's functions."""

import torch


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
