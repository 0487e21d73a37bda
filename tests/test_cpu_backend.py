"""The native kernels: the op's invariants on every instruction set, and what only kernels can get wrong."""

import pytest
import torch

from phistate import linear_attention
from phistate.ops.backends import native
from tests.conformance import Conformance

pytestmark = pytest.mark.skipif(native.why_not() is not None, reason=f"no native library: {native.why_not()}")
ISAS = native.isas() if native.why_not() is None else []


class TestCpuBackend(Conformance):
    @pytest.fixture(autouse=True, params=ISAS)
    def instruction_set(self, request):
        native.force_isa(request.param)
        yield
        native.force_isa(None)

    def attend(self, form, **arguments):
        return linear_attention(**arguments, form=form, backend="cpu", return_state=True)

    def variants(self):
        return [("auto", torch.float32), ("auto", torch.bfloat16), ("auto", torch.float16)]
