"""fla's losses on a CPU: beside torch's cross entropy and divergence, values and gradients."""

import importlib
import types

import pytest
import torch
import torch.nn.functional as F

from phistate.compat.fla.modules import losses
from tests.compat.agreement import agree

both = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
TARGET = torch.tensor([3, -100, 0, 10, 5, -100, 7])


def transformed(logits, scale, cap):
    logits = logits.double() if logits.dtype == torch.float64 else logits.float()
    logits = logits * scale
    return logits if cap is None else cap * torch.tanh(logits / cap)


def reference(logits, smoothing=0.0, scale=1.0, square=0.0, cap=None, target=TARGET, ignore=-100, reduction="none"):
    x = transformed(logits, scale, cap)
    z = (square * x.logsumexp(-1).square()).masked_fill(target == ignore, 0.0)
    loss = F.cross_entropy(x, target, reduction="none", ignore_index=ignore, label_smoothing=smoothing) + z
    if reduction == "none":
        return loss, z.detach()
    counted = (target != ignore).sum() if reduction == "mean" else 1
    return loss.sum() / counted, z.sum().detach() / counted


@both
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("square", [0.0, 1e-2])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_cross_entropy(dtype, smoothing, scale, square, cap):
    logits = torch.randn(7, 11) * 4

    def ours(logits):
        return losses.cross_entropy_loss(logits, TARGET, smoothing, scale, square, cap)

    agree(ours, lambda x: reference(x, smoothing, scale, square, cap), logits, dtype=dtype)
    loss, z = ours(logits.to(dtype).requires_grad_())
    assert loss.dtype == z.dtype == torch.float32
    assert loss.requires_grad
    assert not z.requires_grad


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("return_z_loss", [False, True])
@pytest.mark.parametrize("ignore", [-100, 5])
def test_cross_entropy_module(fla, reduction, return_z_loss, ignore):
    target = TARGET.where(TARGET >= 0, ignore)
    module = importlib.import_module("fla.modules").FusedCrossEntropyLoss(
        ignore_index=ignore,
        reduction=reduction,
        label_smoothing=0.1,
        lse_square_scale=1e-2,
        return_z_loss=return_z_loss,
    )

    def wanted(logits):
        found = reference(logits, 0.1, 1.0, 1e-2, None, target, ignore, reduction)
        return found if return_z_loss else found[0]

    agree(lambda x: losses.cross_entropy_module(module, x, target), wanted, torch.randn(7, 11))


def test_nothing_counts():
    none = torch.full((3,), -100)
    loss, _ = losses.cross_entropy_loss(torch.randn(3, 5), none)
    assert torch.equal(loss, torch.zeros(3))
    assert losses.fused_linear_cross_entropy_loss(torch.randn(3, 4), none, torch.randn(5, 4)).item() == 0.0


@both
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("chunks", [1, 3, 100])
@pytest.mark.parametrize("in_fp32", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_linear_cross_entropy(dtype, reduction, chunks, in_fp32, has_bias):
    x, weight = torch.randn(7, 6), torch.randn(11, 6)
    bias = torch.randn(11) if has_bias else None

    def ours(x, weight, bias):
        loss = losses.fused_linear_cross_entropy_loss(
            *(x, TARGET, weight, bias),
            **{"label_smoothing": 0.1, "logit_scale": 0.7, "logit_softcapping": 5.0, "num_chunks": chunks},
            **{"reduction": reduction, "accumulate_grad_in_fp32": in_fp32},
        )
        return loss * 2

    def wanted(x, weight, bias):
        return reference(F.linear(x, weight, bias), 0.1, 0.7, 0.0, 5.0, reduction=reduction)[0] * 2

    # Summed chunk by chunk in bfloat16, a gradient is rounded once a chunk.
    if in_fp32 or dtype == torch.float32:
        agree(ours, wanted, x, weight, bias, dtype=dtype)
    with torch.no_grad():
        torch.testing.assert_close(ours(x, weight, bias), wanted(x, weight, bias))


def test_linear_cross_entropy_differentiates_only_what_asks():
    x, weight, bias = torch.randn(7, 6), torch.randn(11, 6).requires_grad_(), torch.randn(11)
    losses.fused_linear_cross_entropy_loss(x, TARGET, weight, bias).backward()
    given = weight.detach().requires_grad_()
    F.cross_entropy(F.linear(x, given, bias), TARGET).backward()
    torch.testing.assert_close(weight.grad, given.grad)
    assert x.grad is None


def test_l2warp_is_a_gradient_and_no_value(fla):
    warp = importlib.import_module("fla.modules.l2warp").l2_warp
    x, weight = torch.randn(7, 6).requires_grad_(), torch.randn(11, 6).requires_grad_()
    loss = losses.fused_linear_cross_entropy_loss(x, TARGET, weight, use_l2warp=True, l2_penalty_factor=0.5)
    logits = F.linear(x, weight)
    wanted = warp(F.cross_entropy(logits, TARGET), logits[None], 0.5)
    torch.testing.assert_close(loss, wanted)
    for ours, theirs in zip(*(torch.autograd.grad(v * 3, (x, weight)) for v in (loss, wanted)), strict=True):
        torch.testing.assert_close(ours, theirs)


@both
@pytest.mark.parametrize("in_fp32", [True, False])
def test_kl_div(dtype, in_fp32):
    x, weight = torch.randn(7, 6), torch.randn(11, 6)
    teacher, of_teacher = torch.randn(7, 5).to(dtype), torch.randn(11, 5).to(dtype)

    def ours(x, weight):
        same = (teacher.to(x.dtype), weight, of_teacher.to(x.dtype))
        return losses.fused_kl_div_loss(x, *same, accumulate_grad_in_fp32=in_fp32)

    def wanted(x, weight):
        student, target = F.linear(x, weight), F.linear(teacher.to(x.dtype), of_teacher.to(x.dtype))
        student, target = (transformed(t, 1.0, None).log_softmax(-1) for t in (student, target))
        return F.kl_div(student, target, reduction="batchmean", log_target=True)

    if in_fp32 or dtype == torch.float32:
        agree(ours, wanted, x, weight, dtype=dtype)
    with torch.no_grad():
        torch.testing.assert_close(ours(x.to(dtype), weight.to(dtype)), wanted(x.to(dtype), weight.to(dtype)))


def test_refuses():
    x, weight = torch.randn(7, 6), torch.randn(11, 6)
    group = types.SimpleNamespace()
    with pytest.raises(ValueError, match="process_group: got one"):
        losses.cross_entropy_loss(x, TARGET, process_group=group)
    with pytest.raises(ValueError, match="process_group: got one"):
        losses.fused_linear_cross_entropy_loss(x, TARGET, weight, process_group=group)
    with pytest.raises(ValueError, match="reduction: got 'none'"):
        losses.fused_linear_cross_entropy_loss(x, TARGET, weight, reduction="none")
    with pytest.raises(ValueError, match="reduction: got 'sum'"):
        losses.fused_kl_div_loss(x, x, weight, weight, "sum")
    with pytest.raises(RuntimeError, match="requires a gradient; takes detached"):
        losses.fused_kl_div_loss(x, x.clone().requires_grad_(), weight, weight)
    with pytest.raises(ValueError, match="target: got shape"):
        losses.cross_entropy_loss(x, TARGET[:3])
