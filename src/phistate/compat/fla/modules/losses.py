"""fla's losses: ``fused_cross_entropy``, ``fused_linear_cross_entropy`` and ``fused_kl_div`` of ``fla.modules``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phistate.compat.arguments import wide
from phistate.compat.fla.precision import widened
from phistate.ops.checks import check_choice


def cross_entropy_loss(
    logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    logit_softcapping: float | None = None,
    ignore_index: int = -100,
    inplace_backward: bool = False,
    process_group: Any = None,
) -> tuple[Tensor, Tensor]:
    """Cross entropy ``[N]`` of ``logits [N,V]``, in float32, and the part of it that is the z-loss.

    With ``x = logit_scale · logits``, softly capped to ``cap · tanh(x / cap)``::

        loss = logsumexp(x) - (1 - s) x_target - s mean(x) + z        s the label smoothing
        z    = lse_square_scale · logsumexp(x)²                       without a gradient of its own

    Both are 0 where the target is ``ignore_index``. ``inplace_backward`` saves memory in fla and changes nothing here.

    Raises:
        ValueError: a ``process_group``; vocabularies are not split over processes here.
    """
    _check_process_group(process_group)
    if target.shape != logits.shape[:1]:
        raise ValueError(f"target: got shape {tuple(target.shape)}; takes {tuple(logits.shape[:1])}, a class a row")
    x = widened(logits) * logit_scale
    if logit_softcapping is not None:
        x = logit_softcapping * torch.tanh(x / logit_softcapping)
    counted = target != ignore_index
    lse = x.logsumexp(-1)
    chosen = x.gather(-1, target.where(counted, 0).unsqueeze(-1)).squeeze(-1)
    loss = lse - (1 - label_smoothing) * chosen
    if label_smoothing > 0:
        loss = loss - label_smoothing * x.mean(-1)
    z = lse_square_scale * lse.square()
    return (loss + z).where(counted, 0.0), z.detach().where(counted, 0.0)


def cross_entropy_module(self: Any, input: Tensor, target: Tensor) -> Tensor | tuple[Tensor, Tensor]:
    """``FusedCrossEntropyLoss.forward``: :func:`cross_entropy_loss`, reduced over the targets that count."""
    loss, z = cross_entropy_loss(
        input,
        target,
        label_smoothing=self.label_smoothing,
        logit_scale=self.logit_scale,
        lse_square_scale=self.lse_square_scale,
        logit_softcapping=self.logit_softcapping,
        ignore_index=self.ignore_index,
        inplace_backward=self.inplace_backward,
        process_group=self.process_group,
    )
    if self.reduction != "none":
        counted = (target != self.ignore_index).sum() if self.reduction == "mean" else 1
        loss, z = loss.sum() / counted, z.sum() / counted
    return (loss, z) if self.return_z_loss else loss


def fused_linear_cross_entropy_loss(
    x: Tensor,
    target: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    logit_softcapping: float | None = None,
    num_chunks: int = 8,
    reduction: str = "mean",
    use_l2warp: bool = False,
    l2_penalty_factor: float = 1e-4,
    accumulate_grad_in_fp32: bool = True,
    process_group: Any = None,
) -> Tensor:
    """Cross entropy of ``linear(x)``, whose logits exist for one chunk of the rows at a time.

    Args:
        x: ``[N,H]``.
        target: ``[N]``.
        weight: ``[V,H]``.
        bias: ``[V]``.
        ignore_index: as :func:`cross_entropy_loss`, which says the loss of a row.
        label_smoothing: as there.
        logit_scale: as there.
        logit_softcapping: as there.
        num_chunks: how many chunks at most.
        reduction: ``"mean"`` over the targets that count (0 if none does) or ``"sum"``.
        use_l2warp: add the gradient, not the value, of ``l2_penalty_factor / 2N · Σ max(logits)²``.
        l2_penalty_factor: that factor.
        accumulate_grad_in_fp32: sum the parameters' gradients over the chunks in float32.
        process_group: None.

    Raises:
        ValueError: a ``process_group``, or another reduction.
    """
    _check_process_group(process_group)
    check_choice("reduction", reduction, ("mean", "sum"))
    counted = (target != ignore_index).sum().clamp_min(1) if reduction == "mean" else 1

    def loss(parameters: Sequence[Tensor], x: Tensor, labels: Tensor) -> Tensor:
        logits = F.linear(x, *parameters)
        of_row, _ = cross_entropy_loss(
            logits,
            labels,
            label_smoothing=label_smoothing,
            logit_scale=logit_scale,
            logit_softcapping=logit_softcapping,
            ignore_index=ignore_index,
        )
        total = of_row.sum() / counted
        if not use_l2warp:
            return total
        penalty = widened(logits.max(-1).values).square().sum() * (l2_penalty_factor / 2 / len(target))
        return total + penalty - penalty.detach()

    parameters = (weight,) if bias is None else (weight, bias)
    return _by_chunks(loss, parameters, x, target, num_chunks, accumulate_grad_in_fp32)


def fused_kl_div_loss(
    x: Tensor,
    target_x: Tensor,
    weight: Tensor,
    target_weight: Tensor,
    reduction: str = "batchmean",
    accumulate_grad_in_fp32: bool = True,
) -> Tensor:
    """``Σ KL(softmax(target_x target_weightᵀ) ‖ softmax(x weightᵀ)) / N`` of N rows, a chunk of them at a time.

    Raises:
        RuntimeError: a target that requires a gradient, as fla raises it.
        ValueError: another reduction.
    """
    if target_x.requires_grad or target_weight.requires_grad:
        raise RuntimeError("target_x, target_weight: got one that requires a gradient; takes detached tensors")
    check_choice("reduction", reduction, ("batchmean",))

    def loss(parameters: Sequence[Tensor], x: Tensor, teacher: Tensor) -> Tensor:
        student = widened(F.linear(x, *parameters)).log_softmax(-1)
        teacher = widened(F.linear(teacher, target_weight)).log_softmax(-1)
        return F.kl_div(student, teacher, reduction="sum", log_target=True) / len(target_x)

    return _by_chunks(loss, (weight,), x, target_x, 8, accumulate_grad_in_fp32)


def _check_process_group(process_group: Any) -> None:
    if process_group is not None:
        raise ValueError("process_group: got one; takes None, a vocabulary is not split over processes here")


Loss = Callable[[Sequence[Tensor], Tensor, Tensor], Tensor]


def _by_chunks(
    loss: Loss, parameters: Sequence[Tensor], x: Tensor, beside: Tensor, chunks: int, in_fp32: bool
) -> Tensor:
    """The sum of ``loss(parameters, rows of x, rows of beside)`` over chunks of the rows."""
    size = max(1, -(-len(x) // max(1, chunks)))
    rows = list(zip(x.split(size), beside.split(size), strict=True))
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in (x, *parameters)):
        return torch.stack([loss(parameters, *row) for row in rows]).sum()
    return _Chunked.apply(loss, rows, in_fp32, x, *parameters)


class _Chunked(torch.autograd.Function):
    """Takes each chunk's gradient as soon as there is its loss, so that its logits need not be kept."""

    @staticmethod
    def forward(
        ctx: Any, loss: Loss, rows: list[tuple[Tensor, Tensor]], in_fp32: bool, x: Tensor, *parameters: Tensor
    ) -> Tensor:
        leaves = [p.detach().requires_grad_(p.requires_grad) for p in parameters]
        sums = [torch.zeros_like(p, dtype=wide(p) if in_fp32 else p.dtype) for p in parameters]
        total, of_x = torch.zeros((), dtype=wide(x), device=x.device), []
        for part, beside in rows:
            part = part.detach().requires_grad_()
            with torch.enable_grad():
                here = loss(leaves, part, beside)
            gradients = torch.autograd.grad(here, [part, *(p for p in leaves if p.requires_grad)])
            total += here.detach()
            of_x.append(gradients[0])
            for leaf, summed in zip(leaves, sums, strict=True):
                if leaf.requires_grad:
                    gradients = gradients[1:]
                    summed += gradients[0]
        ctx.save_for_backward(torch.cat(of_x), *(g.to(p.dtype) for g, p in zip(sums, parameters, strict=True)))
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[3:]
        found = [g * outer.to(g.dtype) if w else None for g, w in zip(ctx.saved_tensors, wanted, strict=True)]
        return (None, None, None, *found)
