"""Settings every test runs under."""

import numpy as np
import pytest
import torch

from phistate.ops.backends import native

ISAS = native.isas() if native.why_not() is None else []
"""Instruction sets the kernels can run with here; none without the native library."""


@pytest.fixture(params=ISAS)
def instruction_set(request):
    """Makes the kernels run with each instruction set in turn."""
    native.force_isa(request.param)
    yield request.param
    native.force_isa(None)


@pytest.fixture(autouse=True)
def poisoned_allocations():
    """Uninitialised memory is NaN, torch's and the kernels' scratch: one that reads what it never wrote fails."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    if ISAS:
        native.poison_scratch(True)
    yield
    torch.use_deterministic_algorithms(before)
    if ISAS:
        native.poison_scratch(False)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    np.random.seed(0)  # what a scikit-learn estimator draws from without a random_state


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors only pay for threads; a test of threads asks for them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
