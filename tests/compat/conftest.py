"""flash-linear-attention as the tests of its stand-ins import it: without a GPU, and without its warnings."""

import importlib
import warnings

import pytest


@pytest.fixture(scope="session")
def fla():
    """A function that imports a module of fla, skipping the test where there is none."""
    pytest.importorskip("fla", reason="flash-linear-attention is not installed")

    def load(name):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no GPU, no flash-attn, torch's own deprecations: said while importing
            return importlib.import_module(name)

    return load
