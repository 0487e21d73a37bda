"""Every example in a docstring of the installed package runs and gives what it says."""

import doctest
import importlib
import pkgutil

import pytest

import phistate

MODULES = sorted(
    module.name for module in pkgutil.walk_packages(phistate.__path__, "phistate.") if "__main__" not in module.name
)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert failed == 0


def test_the_package_is_walked():
    assert {"phistate.mixer", "phistate.ops.linear_attention"} <= set(MODULES)
