"""Modules that stand in sys.modules for a package which is not there, made of a table of names."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType

Table = Mapping[str, Mapping[str, object]]
"""What a package offers: by a module's path, its names and what they are."""


class StandIn(ModuleType):
    """A module of phistate's under another package's name; it has what its table says and nothing else.

    Args:
        path: the name it is imported by.
        version: of the package it stands in for.
        file: the source of what it holds, which Python names where an import from it fails.
    """

    def __init__(self, path: str, version: str, file: str) -> None:
        super().__init__(path, f"phistate's stand-in for {path}: the same names, computed on the CPU.")
        self.__spec__ = ModuleSpec(path, None, origin=file, is_package=True)
        self.__path__: list[str] = []  # nothing below it is looked for on disk
        self.__package__ = path
        self.__file__ = file
        self.__version__ = version

    def __getattr__(self, name: str) -> object:
        held = ", ".join(sorted(key for key in vars(self) if not key.startswith("__"))) or "nothing"
        raise AttributeError(f"phistate's stand-in for {self.__name__} has no {name!r}; it has {held}")


def stand_ins(table: Table, version: str, file: str) -> dict[str, StandIn]:
    """A module for each path of ``table`` and each package above one, hung into one another.

    >>> modules = stand_ins({"lib.ops": {"scan": len}}, "1.0", "here.py")
    >>> sorted(modules), modules["lib"].ops.scan([1, 2])
    (['lib', 'lib.ops'], 2)
    """
    modules: dict[str, StandIn] = {}
    for path, names in table.items():
        parts = path.split(".")
        for length in range(1, len(parts) + 1):
            above = ".".join(parts[:length])
            if above not in modules:
                modules[above] = StandIn(above, version, file)
                if length > 1:
                    setattr(modules[".".join(parts[: length - 1])], parts[length - 1], modules[above])
        vars(modules[path]).update(names)
    return modules


def put(modules: Mapping[str, ModuleType], before: Mapping[str, ModuleType]) -> Callable[[], None]:
    """Set ``modules`` into sys.modules; what is given back takes them out and puts ``before`` in their place.

    ``before`` is all that stood under the package's name, whether a module replaces it or not: modules of two
    packages are never mixed.
    """
    for path in before:
        sys.modules.pop(path, None)
    sys.modules.update(modules)

    def take_out() -> None:
        # A package that somebody has imported in their place meanwhile keeps its places.
        ours = [path for path, module in modules.items() if sys.modules.get(path) is module]
        for path in ours:
            del sys.modules[path]
        if len(ours) == len(modules):
            # What some finder has put below them goes too: a package is ours or its own.
            for path in [path for root in {path.partition(".")[0] for path in modules} for path in standing(root)]:
                del sys.modules[path]
            sys.modules.update(before)

    return take_out


def standing(package: str) -> dict[str, ModuleType]:
    """The modules of ``package`` in sys.modules, itself and all below it.

    >>> "importlib.machinery" in standing("importlib")
    True
    """
    below = f"{package}."
    return {path: module for path, module in list(sys.modules.items()) if path == package or path.startswith(below)}
