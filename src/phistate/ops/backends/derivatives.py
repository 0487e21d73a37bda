"""What native kernels do not differentiate, and who does instead.

A kernel comes with its backward pass: gradients of first order in reverse mode. Where more is asked for, an op's form
in plain PyTorch answers, which autograd differentiates in every mode and to any order: a backward pass that is to be
differentiated runs through :func:`gradients`, and a call under forward mode or a ``torch.func`` transform is not the
kernels' at all (:func:`reasons_against`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from phistate.values import any_tangent


def reasons_against(*tensors: Tensor | None) -> list[str]:
    """Why kernels cannot work on ``tensors`` where this call stands; empty when they can.

    >>> reasons_against(torch.ones(1))
    []
    >>> torch.func.grad(lambda x: x * len(reasons_against(x)))(torch.ones(()))
    tensor(1.)
    """
    if torch._C._are_functorch_transforms_active():
        return ["inside a torch.func transform: the kernels' only derivative is autograd's own backward pass"]
    if any_tangent(tensors):
        return ["an input has a forward-mode tangent: the kernels differentiate in reverse mode"]
    return []


def gradients(
    function: Callable[..., Sequence[Tensor | None]],
    inputs: Sequence[Tensor | None],
    wanted: Sequence[bool],
    d_outputs: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Of ``Σ ⟨d_output, output⟩`` for the inputs wanted, themselves differentiable in inputs and ``d_outputs``.

    Args:
        function: gives the outputs, in plain PyTorch.
        inputs: what it takes.
        wanted: whether a gradient is asked of each.
        d_outputs: a gradient for each output; None: zero.
    """
    with torch.enable_grad():
        # An alias apiece: the gradient of one input is not to run through another that was made from it.
        aliases = [x.view_as(x) if x is not None and want else x for x, want in zip(inputs, wanted, strict=True)]
        outputs = function(*aliases)
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, d_outputs, strict=True)
            if output is not None and gradient is not None and output.requires_grad
        ]
        asked = [x for x, want in zip(aliases, wanted, strict=True) if want and x is not None]
        if not pairs or not asked:
            return [None] * len(inputs)
        results, along = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(results, asked, along, create_graph=True, allow_unused=True))
    return [next(found) if want and x is not None else None for x, want in zip(aliases, wanted, strict=True)]
