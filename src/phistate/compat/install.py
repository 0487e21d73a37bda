"""install(): the names other people import, in this process, explicitly, and undoable."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from phistate.compat.package import Package, is_patched, patched
from phistate.compat.report import LOCK, Entry, Report, summary
from phistate.compat.stand_in import StandIn, put, stand_ins, standing

# Where each package is described, as the attribute PACKAGE; imported when it is asked for.
_PACKAGES = {
    "causal_conv1d": "phistate.compat.causal_conv1d",
    "mamba_ssm": "phistate.compat.mamba_ssm",
    "fla": "phistate.compat.fla",
}
_WARNED: set[tuple[str, str]] = set()


@dataclass
class _Standing:
    """The stand-ins for one package, and how many calls of install() share them."""

    take_out: Callable[[], None]
    why: str
    count: int = 0


_STANDING: dict[str, _Standing] = {}


def install(*names: str) -> Report:
    """Make ``import`` of these packages work on a CPU, in this process, until the report is undone.

    For each package, one of three things, which the report tells:

    - it is not installed, or cannot be imported here: modules of phistate's stand in ``sys.modules`` under its name,
      with the functions and classes people import from it, for CPU tensors;
    - it is installed and imports but fails on CPU tensors (one tiny call tells): CPU tensors given to its functions go
      to phistate, all others where they went before;
    - it is installed and serves CPU tensors: nothing is touched.

    What was imported from a stand-in before it is undone stays what it is. A call that fails undoes what it did.

    Args:
        names: of ``"mamba_ssm"``, ``"causal_conv1d"`` and ``"fla"``, one or more.

    Returns:
        A :class:`~phistate.compat.report.Report`; ``with install("mamba_ssm") as report:`` undoes it at the end.

    Raises:
        ValueError: no name, or one that is none of these.

    >>> import phistate.compat
    >>> with phistate.compat.install("mamba_ssm"):
    ...     from mamba_ssm import Mamba
    >>> Mamba(16).in_proj.weight.shape
    torch.Size([64, 16])
    """
    taken = ", ".join(map(repr, _PACKAGES))
    if not names:
        raise ValueError(f"names: got none; takes one or more of {taken}")
    for name in names:
        if name not in _PACKAGES:
            raise ValueError(f"names: got {name!r}; takes {taken}")
    # They need torch, which `import phistate.compat` does not.
    from phistate.ops.backends import native

    report = Report(", ".join(dict.fromkeys(names)), native.why_not() or "native")
    # Whoever gets no report could undo nothing.
    try:
        with LOCK:
            # In this order: the later ones look for the earlier as they are imported.
            for name in [name for name in _PACKAGES if name in names]:
                _install(report, importlib.import_module(_PACKAGES[name]).PACKAGE)
    except BaseException:
        report.undo()
        raise
    return report


def _install(report: Report, package: Package) -> None:
    name = package.name
    if isinstance(sys.modules.get(name), StandIn) and name in _STANDING:
        _stand(report, package, _STANDING[name])
        return
    before = standing(name)
    module, why = _imported(name)
    if module is None:
        # What a failed import has left behind goes; what was there before it comes back with the undo.
        for path in standing(name):
            del sys.modules[path]
        modules = stand_ins(package.table, package.versions[-1], package.file)
        _STANDING[name] = _Standing(put(modules, before), why)
        _stand(report, package, _STANDING[name])
        return
    version = str(getattr(module, "__version__", "of unknown version"))
    fails = "" if is_patched(name) else _failure(package)
    if fails is None:
        report.left.append(Entry(name, "-", f"{version} is installed and serves CPU tensors itself"))
        return
    warn_if_unchecked(package, version)
    _patch(report, package)


def warn_if_unchecked(package: Package, version: str) -> None:
    """Say once that a version of ``package`` was never checked."""
    if version in package.versions or (package.name, version) in _WARNED:
        return
    _WARNED.add((package.name, version))
    warnings.warn(
        f"{package.name} {version} was never checked with phistate, which knows {', '.join(package.versions)}: "
        "functions whose signature is known are replaced, though their meaning may have changed",
        stacklevel=4,
    )


def _failure(package: Package) -> str | None:
    """How an installed package fails on CPU tensors; None: it does not."""
    try:
        package.probe()
    except Exception as error:  # whatever a kernel for another device does with memory
        return f"{type(error).__name__}: {error}"
    return None


def _patch(report: Report, package: Package) -> None:
    """Replace what an installed package cannot do for CPU tensors."""
    from phistate.compat.patch import patch

    report._undo.append(patched(package.name))
    if package.patch is None:
        patch(report, package)
    else:
        package.patch(report)


def _imported(name: str) -> tuple[ModuleType | None, str]:
    """A package that is installed, or why there is none to be had."""
    try:
        if importlib.util.find_spec(name) is None:
            return None, "not installed"
        return importlib.import_module(name), ""
    except Exception as error:  # of any kind, from the package or what it imports
        return None, f"installed, but cannot be imported here ({type(error).__name__}: {error})"


def _stand(report: Report, package: Package, shared: _Standing) -> None:
    """Hold the stand-ins that are in sys.modules until ``report`` is undone."""
    shared.count += 1

    def undo() -> None:
        with LOCK:
            shared.count -= 1
            if shared.count == 0:
                shared.take_out()
                # Whoever has emptied sys.modules meanwhile may have made others since.
                if _STANDING.get(package.name) is shared:
                    del _STANDING[package.name]

    report._undo.append(undo)
    report.replaced.append(Entry(package.name, "-", f"stand-ins for {package.versions[-1]}: {shared.why}"))
    for path, names in package.table.items():
        report.replaced.extend(Entry(path, name, summary(value)) for name, value in names.items())
