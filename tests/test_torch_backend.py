"""The reference against its own definition, and against finite differences."""

import pytest
import torch

from phistate import linear_attention
from phistate.ops import reference
from tests.conformance import EVERY_MIXER, Conformance, make_case


class TestTorchBackend(Conformance):
    def attend(self, form, **arguments):
        return linear_attention(**arguments, form=form, backend="torch", return_state=True)

    def variants(self):
        return [
            ("recurrent", torch.float64),
            ("parallel", torch.float64),
            ("chunked", torch.float64),
            ("chunked", torch.float32),
            ("recurrent", torch.bfloat16),
            ("chunked", torch.float16),
        ]


@pytest.mark.parametrize(("decay", "write", "normalize"), EVERY_MIXER)
@pytest.mark.parametrize("form", ["recurrent", "parallel", "chunked"])
def test_gradcheck(decay, write, normalize, form, monkeypatch):
    monkeypatch.setattr(reference, "CHUNK", 2)
    case = make_case(decay, write, normalize, B=1, T=5, heads=(2, 1, 1), K=3, V=2)
    names = [n for n, x in case.tensors.items() if x is not None]

    def run(*tensors):
        arguments = {**case.tensors, **dict(zip(names, tensors, strict=True))}
        o, state = linear_attention(**arguments, **case.options, form=form, return_state=True)
        return (o, state.s) if state.z is None else (o, state.s, state.z)

    assert torch.autograd.gradcheck(run, [case.tensors[n].requires_grad_() for n in names], atol=1e-6)
