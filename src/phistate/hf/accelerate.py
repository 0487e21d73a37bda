"""accelerate(): existing hybrid models, fast on a CPU, by replacing the functions their layers call."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from torch import nn

from phistate.compat.functions import replacement, signature_of
from phistate.compat.report import LOCK, Entry, Report
from phistate.compat.swap import original_of, swap
from phistate.hf.corrections import hand_over
from phistate.hf.hooks import HOOKS, UNCOVERED
from phistate.ops.backends import native


def accelerate(model: nn.Module, *, correct: bool = True) -> Report:
    """Make a hybrid model of transformers or flash-linear-attention fast on a CPU, with the same answers.

    Finds the modules that the classes of ``model``'s layers come from and replaces in them the functions it knows by
    name *and* signature (``torch_chunk_gated_delta_rule``, ``mamba2_chunk_scan``, ``causal_conv1d_fn``, …), wherever
    they are held: the module itself, the class, or a layer's own attribute. What it does not know it does not touch.
    For layers of flash-linear-attention, whose kernels run on no CPU, it replaces every function that
    :mod:`phistate.compat.fla` knows, in each module that holds it.
    A replaced function hands tensors that are not on the CPU to the one it replaced. The ``forward`` of a layer that
    knows more than it passes on is replaced by one that hands this over, for as long as the call lasts. Other models
    made of the same classes run what was replaced too, without the corrections. A call that fails undoes what it did.

    Args:
        model: a model, or any part of one.
        correct: also give the right answer in the few places where transformers loses an argument on the way to the
            function: the recurrent state of Mamba-1 layers when several tokens follow a cache, the limits of
            Mamba-2's time step in the decode step, and the cache of fla's models in ``generate``. False: the same
            answers as transformers there too.

    Returns:
        A :class:`Report`; ``with accelerate(model) as report:`` undoes it at the end of the block.

    Raises:
        TypeError: ``model`` is no ``torch.nn.Module``.

    >>> import torch, phistate.hf
    >>> report = phistate.hf.accelerate(torch.nn.Linear(2, 2))
    >>> report.replaced, report.left[0].what
    ([], "none of its classes' modules hold a function that phistate knows")
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}; takes a torch.nn.Module")
    report = Report(type(model).__name__, native.why_not() or "native")
    # Whoever gets no report could undo nothing.
    try:
        with LOCK:
            _replace(report, model, correct)
            if report.replaced:
                for entry, undo in hand_over(model, correct):
                    report._undo.append(undo)
                    if entry is not None and entry not in report.corrected:
                        report.corrected.append(entry)
    except BaseException:
        report.undo()
        raise
    return report


def _replace(report: Report, model: nn.Module, correct: bool) -> None:
    replacements: dict[int, Callable[..., Any]] = {}
    of_fla: dict[str, list[nn.Module]] = {}
    for owner, layers in _owners(model).items():
        module = owner.__name__ if isinstance(owner, ModuleType) else owner.__module__
        if module.partition(".")[0] == "fla":
            of_fla.setdefault(module, []).extend(layers)
            continue
        for name in _known_names(owner):
            _visit(report, owner, name, layers, replacements)
    if of_fla and (there := _elsewhere([layer for layers in of_fla.values() for layer in layers])):
        report.left.append(Entry("fla", "-", there))
    elif of_fla:
        # Imported here: a model of transformers needs none of it.
        from phistate.compat.fla import PACKAGE
        from phistate.compat.fla.patch import patch
        from phistate.compat.install import warn_if_unchecked

        warn_if_unchecked(PACKAGE, sys.modules["fla"].__version__)
        replacements |= patch(report, of_fla.keys(), correct)
    for path, layer in model.named_modules():
        for name, value in list(vars(layer).items()):
            original = original_of(value)
            if id(original) in replacements:
                where = f"{type(layer).__name__} {path}"
                report._undo.append(swap(layer, name, replacements[id(original)]))
                report.replaced.append(Entry(where, name, "held by the layer; the same function"))
    if not report.replaced and not report.left:
        why = "none of its classes' modules hold a function that phistate knows"
        report.left.append(Entry(report.model, "-", why))


def _owners(model: nn.Module) -> dict[ModuleType | type, list[nn.Module]]:
    """Every class of a layer and every module such a class comes from, with the layers concerned."""
    owners: dict[ModuleType | type, list[nn.Module]] = {}
    for layer in model.modules():
        for cls in type(layer).__mro__:
            module = sys.modules.get(cls.__module__)
            if cls.__module__.partition(".")[0] in ("torch", "builtins") or module is None:
                continue
            for owner in (module, cls):
                layers = owners.setdefault(owner, [])
                if not layers or layers[-1] is not layer:
                    layers.append(layer)
    return owners


def _known_names(owner: ModuleType | type) -> Iterator[str]:
    prefix = "" if isinstance(owner, ModuleType) else f"{owner.__name__}."
    for name in (*HOOKS, *UNCOVERED):
        head, _, attribute = name.rpartition(".")
        if (f"{head}." if head else "") == prefix and attribute in vars(owner):
            yield name


def _visit(
    report: Report,
    owner: ModuleType | type,
    name: str,
    layers: list[nn.Module],
    replacements: dict[int, Callable[..., Any]],
) -> None:
    attribute = name.rpartition(".")[2]
    where = owner.__name__ if isinstance(owner, ModuleType) else f"{owner.__module__}.{owner.__name__}"
    found = vars(owner)[attribute]
    if name in UNCOVERED:
        report.left.append(Entry(where, attribute, UNCOVERED[name]))
        return
    hook = HOOKS[name]
    original = original_of(found)
    if not callable(original):
        report.left.append(Entry(where, attribute, f"is no function but {type(original).__name__}"))
        return
    signature = signature_of(original)
    if signature != hook.signature:
        report.left.append(Entry(where, attribute, f"takes ({signature}); phistate knows ({hook.signature})"))
        return
    there = _elsewhere(layers)
    if there:
        report.left.append(Entry(where, attribute, there))
        return
    # Where fla or mamba_ssm is installed, transformers' functions are theirs, for CUDA, wrapped around its own.
    new = found if found is not original else replacement(original, hook, inspect.unwrap(original))
    report._undo.append(swap(owner, attribute, new))
    replacements[id(original)] = new
    report.replaced.append(Entry(where, attribute, hook.what))


def _elsewhere(layers: list[nn.Module]) -> str:
    """Why layers none of which is on the CPU are left alone; empty for others."""
    devices = {p.device.type for layer in layers for p in layer.parameters()} or {"cpu"}
    if "cpu" in devices:
        return ""
    return f"its layers are on {', '.join(sorted(devices))}; phistate's kernels are for the CPU"
