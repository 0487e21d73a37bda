"""The four steps in place: what they may overwrite, and that one which fails has changed nothing."""

from dataclasses import dataclass

import pytest
import torch

import phistate
from phistate import State
from phistate.ops.backends import native

BACKENDS = ["torch", "cpu"] if native.why_not() is None else ["torch"]


@dataclass
class Step:
    """An op's step by its name, what it overwrites, and its other arguments in order."""

    held: dict[str, torch.Tensor]
    inputs: dict[str, torch.Tensor]

    def run(self, name, backend, **changes):
        held = self.held if name != "linear_attention" else {"state": State(**self.held)}
        return getattr(phistate, f"{name}_step_")(**{**held, **self.inputs, **changes}, backend=backend)


def make(name):
    if name == "linear_attention":
        held = {"s": torch.rand(2, 2, 4, 3), "z": torch.rand(2, 2, 4), "tokens": torch.tensor([5, 7])}
        return Step(held, {"q": torch.rand(2, 1, 2, 4), "k": torch.rand(2, 1, 2, 4), "v": torch.rand(2, 1, 2, 3)})
    if name == "causal_conv1d":
        return Step({"state": torch.rand(2, 5, 3)}, {"x": torch.rand(2, 5), "weight": torch.rand(5, 4)})
    if name == "selective_scan":
        inputs = {"x": torch.rand(2, 5), "delta": torch.rand(2, 5), "A": -torch.rand(5, 3)}
        return Step({"state": torch.rand(2, 5, 3)}, {**inputs, "B": torch.rand(2, 3), "C": torch.rand(2, 3)})
    inputs = {"x": torch.rand(2, 4, 3), "dt": torch.rand(2, 4), "A": -torch.rand(4)}
    return Step({"state": torch.rand(2, 4, 3, 5)}, {**inputs, "B": torch.rand(2, 2, 5), "C": torch.rand(2, 2, 5)})


def expanded(x):
    return x[:1].expand_as(x)


def shifted(x):
    """Rows that begin one element after another."""
    return torch.zeros(x.numel() + len(x), dtype=x.dtype).as_strided(x.shape, (1, *x.stride()[1:]))


def inferred(x):
    with torch.inference_mode():
        return x.clone()


NAMES = ["linear_attention", "causal_conv1d", "selective_scan", "mamba2"]
HELD = [(name, part) for name in NAMES for part in make(name).held]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("name", "part"), HELD)
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (expanded, "got strides .* takes a tensor with a place for each"),
        (shifted, "got strides .* takes a tensor with a place for each"),
        (inferred, "got a tensor made under torch.inference_mode"),
    ],
)
def test_a_step_that_fails_changes_nothing(name, part, spoil, message, backend):
    step = make(name)
    if spoil is shifted and step.held[part].ndim == 1:
        return
    step.held[part] = spoil(step.held[part])
    before = {n: x.clone() for n, x in step.held.items()}
    named = "state" if part == "state" else f"state.{part}"
    with pytest.raises(ValueError, match=f"^{named}: {message}"):
        step.run(name, backend)
    for n, x in step.held.items():
        assert torch.equal(x, before[n]), n


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
def test_what_may_be_overwritten(name, backend):
    """Rows of a larger buffer, any order in memory, an inference tensor in its mode."""
    want = make(name)
    layouts = [
        lambda x: torch.stack([x, x], 1)[:, 0],
        lambda x: torch.stack([x, x], -1)[..., 1],
        lambda x: x.movedim(0, -1).clone(memory_format=torch.contiguous_format).movedim(-1, 0),
    ]
    steps = [Step({n: layout(x) for n, x in want.held.items()}, want.inputs) for layout in layouts]
    with torch.inference_mode():
        inside = Step({n: x.clone() for n, x in want.held.items()}, want.inputs)
        y = inside.run(name, backend)
    o = want.run(name, backend)
    assert torch.equal(o, y)
    for step in (*steps, inside):
        if step is not inside:
            step.run(name, backend)
        for n, x in step.held.items():
            torch.testing.assert_close(x, want.held[n])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
def test_autograd_hears_of_it(name, backend):
    """A graph that saved the state before it was overwritten must not go on as if it had not been."""
    step = make(name)
    saved = next(iter(step.held.values()))
    weight = torch.ones((), requires_grad=True)
    later = weight * saved
    with torch.no_grad():
        step.run(name, backend)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        later.sum().backward()


@pytest.mark.parametrize("name", NAMES)
def test_what_a_step_refuses_by_name(name):
    step = make(name)
    for n, x in step.inputs.items():
        for wrong in (x.tolist(), torch.tensor(1.0), x.long()):
            with pytest.raises((TypeError, ValueError), match=f"^{n}: got"):
                step.run(name, "auto", **{n: wrong})
    held = {"state": step.held["s"] if name == "linear_attention" else step.held["state"]}
    wrongs = [held["state"].tolist(), held["state"]]
    if name != "linear_attention":
        wrongs = [held["state"].tolist(), held["state"].long(), held["state"][..., :1]]
    for wrong in wrongs:
        with pytest.raises((TypeError, ValueError), match="^state: got"):
            step.run(name, "auto", state=wrong)


@pytest.mark.parametrize("name", NAMES[1:])
def test_shapes_are_told_without_time(name):
    step = make(name)
    second = list(step.inputs)[1]
    with pytest.raises(ValueError, match=rf"^{second}: got shape \(9, 9\)"):
        step.run(name, "auto", **{second: torch.rand(9, 9)})


@pytest.mark.parametrize("backend", BACKENDS)
class TestNormaliser:
    """s and z, one of which a step could overwrite through the other."""

    def step(self, s, z, backend):
        ones = {"q": torch.ones(2, 1, 2, 4), "k": torch.ones(2, 1, 2, 4), "v": torch.ones(2, 1, 2, 3)}
        return phistate.linear_attention_step_(State(s=s, z=z, tokens=torch.zeros(2).long()), **ones, backend=backend)

    def test_shared_memory_is_refused(self, backend):
        s = torch.rand(2, 2, 4, 3)
        before = s.clone()
        with pytest.raises(ValueError, match="state.z: got memory that state.s holds too"):
            self.step(s, s[..., 1], backend)
        assert torch.equal(s, before)

    def test_columns_of_one_array_are_apart(self, backend):
        both = torch.rand(2, 2, 4, 4)
        s, z = both[..., :3].clone(), both[..., 3].clone()
        want = self.step(s, z, backend)
        assert torch.equal(self.step(both[..., :3], both[..., 3], backend), want)
        assert torch.equal(both, torch.cat([s, z.unsqueeze(-1)], -1))
