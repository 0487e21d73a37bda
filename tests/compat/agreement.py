"""An adapter beside what it stands for: values and every gradient, in the precision plain torch would have."""

import torch


def leaves(tensors, dtype):
    return [None if t is None else t.detach().to(dtype).requires_grad_() for t in tensors]


def run(function, tensors, weights):
    """Outputs of ``function(*tensors)``, then the gradients of their weighted sum."""
    outputs = function(*tensors)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else [o for o in outputs if o is not None]
    if not weights:
        weights.extend(torch.randn(o.shape, dtype=torch.float64) for o in outputs)
    total = sum((o.double() * w).sum() for o, w in zip(outputs, weights, strict=True) if o.requires_grad)
    given = [t for t in tensors if t is not None]
    gradients = torch.autograd.grad(total, given, allow_unused=True)
    return outputs, [torch.zeros_like(t) if g is None else g for t, g in zip(given, gradients, strict=True)]


def agree(adapter, reference, *tensors, dtype=torch.float32, types=True):
    """``adapter`` errs at most twice what ``reference``, plain torch in ``dtype``, errs against float64.

    A unit in the last place is always allowed: the reference may be exact by luck. With ``types`` the outputs have
    the types of the reference's.
    """
    quantised = [None if t is None else t.to(dtype) for t in tensors]
    weights = []
    exact = run(reference, leaves(quantised, torch.float64), weights)
    plain = run(reference, leaves(quantised, dtype), weights)
    ours = run(adapter, leaves(quantised, dtype), weights)
    for kind, wanted, torchs, got in zip(("output", "gradient"), exact, plain, ours, strict=True):
        assert len(got) == len(wanted)
        for i, (a, b, c) in enumerate(zip(wanted, torchs, got, strict=True)):
            assert c.shape == a.shape, (kind, i)
            assert not types or c.dtype == b.dtype, (kind, i, c.dtype, b.dtype)
            error, allowed = (c - a).abs().max().item() if a.numel() else 0.0, 0.0
            if a.numel():
                unit = torch.finfo(dtype).eps * a.abs().max().item()
                allowed = 2 * (b - a).abs().max().item() + (8 * unit if dtype == torch.float32 else unit)
            assert error <= allowed, (kind, i, error, allowed)
