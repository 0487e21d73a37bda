"""A call made ready to be timed, ours or a peer's."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from phistate.bench.cases import Run
from phistate.bench.work import Inputs, Outputs


class Missing(Exception):
    """Why a peer cannot be measured here: not installed, or the case is none of its own."""


@dataclass(frozen=True)
class Ready:
    """A call whose inputs lie in the layout it likes best.

    Args:
        run: what is timed.
        read: runs it once and gives the outputs (for ``both``: the gradients) in our layout; None: it computes
            something else, so there is no error to compare.
        threads: runs with as many, whatever the others do; None: as they do.
        note: what a reader of the figure has to know.
    """

    run: Callable[[], object]
    read: Callable[[], Outputs] | None
    threads: int | None = None
    note: str = ""


def ready(
    call: Callable[[Inputs], Outputs],
    inputs: Inputs,
    run: Run,
    *,
    swapped: Collection[str] = (),
    note: str = "",
) -> Ready:
    """``call`` on ``inputs``, forward or forward and backward by autograd.

    Args:
        call: gives its output first.
        inputs: in our layout.
        run: ``both``: the gradients of every input but the state, for a fixed gradient of the output.
        swapped: inputs (``o``: the output) that ``call`` has with time last.
        note: see :class:`Ready`.
    """

    def swap(name: str, tensor: Tensor) -> Tensor:
        return tensor.mT.contiguous() if name in swapped else tensor

    theirs = {name: swap(name, tensor) for name, tensor in inputs.items()}
    if run != "both":

        def forward() -> Outputs:
            return call(theirs)

        def read_outputs() -> Outputs:
            o, *rest = forward()
            return (o.mT if "o" in swapped else o, *rest)

        return Ready(forward, read_outputs, note=note)

    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in theirs.items()}
    with torch.no_grad():
        o = call(leaves)[0]
    # Drawn in our layout, so that every peer is given the same gradient.
    shape = o.mT.shape if "o" in swapped else o.shape
    given = swap("o", torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(o.dtype))

    def both() -> Outputs:
        return torch.autograd.grad(call(leaves)[0], list(leaves.values()), given)

    def read_gradients() -> Outputs:
        return tuple(g.mT if name in swapped else g for name, g in zip(leaves, both(), strict=True))

    return Ready(both, read_gradients, note=note)
