"""What mamba_ssm 2.3.2 and causal_conv1d 1.7 say their functions compute, token by token in plain torch."""

import torch
import torch.nn.functional as F


def step_size(dt, bias, softplus, limits=(0.0, float("inf"))):
    dt = dt if bias is None else dt + bias
    return (F.softplus(dt) if softplus else dt).clamp(*limits)


def per_channel(M, dim, t):
    """B or C of token t for every channel, ``[·,D,N]``, from any of its layouts."""
    if M.ndim == 2:
        return M
    if M.ndim == 3:
        return M[:, None, :, t]
    return M[..., t].repeat_interleave(dim // M.shape[1], 1)


def selective_scan(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False):
    bias = None if delta_bias is None else delta_bias[:, None]
    delta = delta if bias is None else delta + bias
    delta = F.softplus(delta) if delta_softplus else delta
    h, out = u.new_zeros(u.shape[0], *A.shape), []
    for t in range(u.shape[2]):
        step, x = delta[:, :, t, None], u[:, :, t, None]
        h = (step * A).exp() * h + step * x * per_channel(B, u.shape[1], t)
        out.append((h * per_channel(C, u.shape[1], t)).sum(-1))
    y = torch.stack(out, 2)
    y = y if D is None else y + D[:, None] * u
    return (y if z is None else y * F.silu(z)), h


def convolve(x, weight, bias=None, activation=None, before=None, seq_idx=None):
    """Windows of W inputs; what another number stands at is not in them, and padding (below 0) is 0."""
    width = weight.shape[1]
    past = x.new_zeros(*x.shape[:2], width - 1) if before is None else before
    windows = torch.cat([past, x], 2).unfold(2, width, 1)
    if seq_idx is not None:
        first = seq_idx[:, :1] if before is not None else seq_idx.new_full((x.shape[0], 1), -1)
        numbers = torch.cat([first.expand(-1, width - 1), seq_idx], 1).unfold(1, width, 1)
        windows = windows * (numbers == seq_idx[..., None])[:, None]
    y = (windows * weight[:, None]).sum(-1)
    y = y if bias is None else y + bias[:, None]
    y = y if activation is None else F.silu(y)
    return y if seq_idx is None else y * (seq_idx >= 0)[:, None]


def ssd(
    x, dt, A, B, C, D=None, z=None, dt_bias=None, before=None, seq_idx=None, softplus=False, limits=(0.0, float("inf"))
):
    """The output and the state ``[B,H,P,N]`` after the last token; ``dt [B,L,H]``."""
    dt = step_size(dt, dt_bias, softplus, limits)
    share = x.shape[2] // B.shape[2]
    B, C = (t.repeat_interleave(share, 2) for t in (B, C))
    h = x.new_zeros(x.shape[0], *x.shape[2:], B.shape[3]) if before is None else before
    last = torch.zeros(x.shape[0], dtype=torch.long)  # a state given is number 0's
    out = []
    for t in range(x.shape[1]):
        if seq_idx is not None:
            h = h * (seq_idx[:, t] == last)[:, None, None, None]
            last = seq_idx[:, t]
        step = dt[:, t, :, None, None]
        h = (step * A[:, None, None]).exp() * h + step * x[:, t, ..., None] * B[:, t, :, None]
        out.append((h * C[:, t, :, None]).sum(-1))
    y = torch.stack(out, 1)
    if D is not None:
        y = y + (D[:, None] if D.ndim == 1 else D) * x
    return (y if z is None else y * F.silu(z)), h


def gated_norm(x, weight, bias, z, eps, size, before_gate, rms=True):
    x = x if z is None or before_gate else x * F.silu(z)
    groups = x.unflatten(-1, (-1, size))
    groups = groups if rms else groups - groups.mean(-1, keepdim=True)
    y = (groups / (groups.square().mean(-1, keepdim=True) + eps).sqrt()).flatten(-2) * weight
    y = y if bias is None else y + bias
    return y * F.silu(z) if z is not None and before_gate else y


def norm(x, weight, bias, eps, rms):
    return gated_norm(x, weight, bias, None, eps, x.shape[-1], True, rms)


def same(got, want, tolerance=1e-10):
    assert got.shape == want.shape, (got.shape, want.shape)
    error = (got.double() - want.double()).abs().max().item() if want.numel() else 0.0
    size = max(want.abs().max().item() if want.numel() else 0.0, 1.0)
    assert error <= tolerance * size, f"error {error:.3g} of {size:.3g}"


ROUNDING = {torch.float64: 1e-10, torch.float32: 3e-5}
"""Of the kernels, which compute in float32, and of plain torch, to the largest value."""


def doubled(inputs):
    """The inputs in float64, gradients going back to them."""
    return {
        name: t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for name, t in inputs.items()
    }


def leaves(**tensors):
    return {name: None if t is None else t.detach().clone().requires_grad_() for name, t in tensors.items()}


def same_gradients(got, want, inputs, tolerance=1e-9):
    """Gradients of a scalar that each element of the tuples ``got`` and ``want`` enters."""
    inputs = {name: t for name, t in inputs.items() if t is not None}
    found = []
    for outputs in (got, want):
        loss = sum((y.double() * torch.arange(y.numel()).mul(1.7).cos().view(y.shape)).sum() for y in outputs)
        found.append(torch.autograd.grad(loss, list(inputs.values())))
    for name, a, b in zip(inputs, *found, strict=True):
        try:
            same(a, b, tolerance)
        except AssertionError as error:
            raise AssertionError(f"gradient of {name}: {error}") from None
