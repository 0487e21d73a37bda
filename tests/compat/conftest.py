"""What tests of other libraries' names share."""

import warnings

import pytest


@pytest.fixture(scope="session")
def fla():
    """flash-linear-attention with a Triton that only imports; it warns of that."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("fla", reason="flash-linear-attention (and triton) is not installed")
