"""A function of another library and what stands in its place, which hands back what is not for the CPU."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phistate.compat.swap import WANTED

Function = Callable[..., Any]
_NUMBERS = itertools.count()


@dataclass(frozen=True)
class Hook:
    """How to replace one function.

    Args:
        signature: its parameters and defaults, without annotations.
        what: what stands there afterwards, in the report's words.
        native: makes the replacement from the function it replaces (which it may hand odd cases to).
        tensor: which parameter is a tensor, whose device decides who runs a call.
        exports: whether torch.export may see the replacement; False: it sees the function that was replaced.
    """

    signature: str
    what: str
    native: Callable[[Function], Function]
    tensor: int = 0
    exports: bool = False


def hook_of(adapter: Function, what: str) -> Hook:
    """The hook of a function that has the very signature of the one it stands for; of a method if that begins by self.

    >>> def norm(x, weight, eps=1e-6): ...
    >>> hook_of(norm, "plain torch").signature
    'x, weight, eps=1e-06'
    """
    signature = signature_of(adapter)
    return Hook(signature, what, lambda original: adapter, 1 if signature.startswith("self, ") else 0, True)


def signature_of(function: Function) -> str:
    """A function's parameters and defaults, without annotations, as :class:`Hook` writes them.

    ``apply`` of a :class:`torch.autograd.Function` has those of its forward, all but the context.

    >>> def scan(x: int, *, scale: float = 1.0) -> int: ...
    >>> signature_of(scan)
    'x, *, scale=1.0'
    """
    owner: Any = function.__self__ if inspect.ismethod(function) else None
    applied = inspect.isclass(owner) and issubclass(owner, torch.autograd.Function)
    try:
        signature = inspect.signature(owner.forward if applied else function)
    except (TypeError, ValueError):
        return "unknown"
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()][applied:]
    return str(inspect.Signature(plain))[1:-1]


def replacement(original: Function, hook: Hook, fallback: Function | None = None) -> Function:
    """``hook``'s function under the name of ``original``, to which tensors that are not on the CPU still go.

    So do all, where no attribute holds it by :func:`~phistate.compat.swap.swap`: before, and after the last undo.

    Args:
        original: what is replaced.
        hook: how.
        fallback: what ``hook`` may hand odd cases on the CPU to; None: ``original``.
    """
    native, index = hook.native(original if fallback is None else fallback), hook.tensor
    name = [part for part in hook.signature.split(", ") if part != "*"][index].partition("=")[0]
    number, exports = next(_NUMBERS), hook.exports  # TorchDynamo wraps what a new object's method closes over

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        first = args[index] if len(args) > index else kwargs.get(name)
        elsewhere = isinstance(first, Tensor) and first.device.type != "cpu"
        if number not in WANTED or elsewhere or (not exports and torch.compiler.is_exporting()):
            return original(*args, **kwargs)
        return native(*args, **kwargs)

    run._phistate_replaces = original  # type: ignore[attr-defined]
    run._phistate_number = number  # type: ignore[attr-defined]
    return run
