"""The preset table: each line, in three forms, is one equation."""

import subprocess
import sys

import pytest
import torch

import phistate
from phistate.mixer import PRESETS, retention_decay


def arguments(mixer: phistate.Mixer) -> dict:
    """q, k, v of the acceptance's shapes, and the decay and beta the mixer takes, all requiring gradients."""
    shapes = {"none": None, "head": None, "scalar": (2, 37, 4), "vector": (2, 37, 4, 8)}
    tensors = {
        "q": torch.randn(2, 37, 4, 8, dtype=torch.float64),
        "k": torch.randn(2, 37, 4, 8, dtype=torch.float64),
        "v": torch.randn(2, 37, 4, 12, dtype=torch.float64),
    }
    if mixer.decay == "head":
        tensors["decay"] = retention_decay(4).double()
    elif shapes[mixer.decay]:
        tensors["decay"] = -torch.rand(shapes[mixer.decay], dtype=torch.float64)
    if mixer.write == "delta":
        tensors["beta"] = torch.rand(2, 37, 4, dtype=torch.float64)
    return {name: x.requires_grad_() for name, x in tensors.items()}


@pytest.mark.parametrize("mixer", PRESETS.values(), ids=lambda mixer: mixer.name)
def test_three_forms_of_every_preset(mixer):
    tensors = arguments(mixer)
    phi = mixer.make_feature_map(8)
    phi = None if phi is None else phi.double()
    results = []
    for form in ("recurrent", "chunked", "parallel"):
        o, state = mixer.attend(**tensors, phi=phi, form=form)
        results.append((o, state.s, *torch.autograd.grad(o.sin().sum() + state.s.sum(), list(tensors.values()))))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    assert results[0][0].shape == (2, 37, 4, 12)


def test_retention_is_a_constant_decay():
    torch.testing.assert_close(retention_decay(3).exp(), 1 - torch.tensor([1 / 32, 1 / 64, 1 / 128]))


def test_what_a_mixer_refuses():
    q, k, v = torch.rand(3, 1, 5, 2, 4).unbind()
    with pytest.raises(ValueError, match="name: got 'mamba3'; takes linear, performer"):
        phistate.preset("mamba3")
    with pytest.raises(ValueError, match="phi: got None; 'linear' takes elu"):
        phistate.preset("linear").attend(q, k, v)
    with pytest.raises(ValueError, match="decay: got None; 'gla' takes vector"):
        phistate.preset("gla").attend(q, k, v)
    with pytest.raises(ValueError, match="decay: got shape"):
        phistate.preset("gla").attend(q, k, v, decay=-torch.rand(1, 5, 2))
    with pytest.raises(ValueError, match=r"decay: got \(2,\); 'deltanet' takes none"):
        phistate.preset("deltanet").attend(q, k, v, decay=-torch.rand(2))
    with pytest.raises(TypeError, match="order: got an option"):
        phistate.preset("kda").make_feature_map(4, order=3)


def test_importing_phistate_is_light():
    code = (
        "import phistate, sys\n"
        "phistate.linear_attention, phistate.feature_map\n"
        "assert not {'transformers', 'typer', 'rich', 'matplotlib', 'sklearn', 'onnxruntime'} & set(sys.modules)\n"
        "assert set(phistate.__all__) <= set(dir(phistate))\n"
        "assert all(getattr(phistate, name) is not None for name in phistate.__all__)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
