"""What the tests of the scan and of the short convolution share."""

import pytest
import torch

from phistate.ops.backends import native

ISAS = native.isas() if native.why_not() is None else []
BACKENDS = ["torch", "cpu"] if ISAS else ["torch"]
ROUNDING = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.fixture
def instruction_set(isa):
    native.force_isa(isa)
    yield
    native.force_isa(None)


def to(arguments, dtype):
    return {n: t if t is None else t.to(dtype) for n, t in arguments.items()}


def differentiable(arguments):
    return {n: t if t is None else t.detach().requires_grad_() for n, t in arguments.items()}


def weights_of(y):
    """Of each output in a loss; they take turns in sign, so that no sum of theirs grows large and then cancels."""
    return torch.arange(y.numel(), dtype=torch.float64).mul(1.7).cos().view(y.shape)


def grads_of(arguments, y, state):
    """Gradients, by name, of a scalar that every output and the final state enter."""
    loss = (y.double() * weights_of(y)).sum()
    loss = loss + state.double().square().sum()
    names = [n for n, t in arguments.items() if t is not None]
    found = torch.autograd.grad(loss, [arguments[n] for n in names], materialize_grads=True)
    return dict(zip((f"d{n}" for n in names), found, strict=True))


def poison(arguments, kept, T, names, turned):
    """The arguments' named tensors stretched to T steps, NaN wherever no token stands."""
    stretched = dict(arguments)
    for n in names:
        t = arguments[n]
        if t is None:
            continue
        long = torch.full((t.shape[0], T, *t.shape[2:]), float("nan"), dtype=t.dtype)
        long[:, kept] = t.detach()
        stretched[n] = long.movedim(1, -1).contiguous().movedim(-1, 1) if turned else long
    return stretched


def assert_near(got, want, dtype, what, budget=0.0, allowed=None):
    """The error against ``want`` is within ``budget`` or a few roundings of the largest value."""
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
    assert bool(torch.isfinite(got).all()), f"{what}: not finite"
    if got.numel() == 0:
        return
    size = max(want.abs().max().item(), 0.2)  # sums of terms near 1 may cancel
    error = (got.double() - want.double()).abs().max().item()
    limit = max(budget, (ROUNDING[dtype] if allowed is None else allowed) * size)
    assert error <= limit, f"{what}: error {error:.3g}, allowed {limit:.3g}, size {size:.3g}"
