"""Tensors whose numbers cannot be read, or not one by one: meta, fake, and those torch.func maps over."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import phistate
from phistate import State, causal_conv1d, linear_attention, mamba2_scan, selective_scan
from phistate.ops.backends import native
from tests.features.cases import NAMES, make

BACKENDS = ["torch", "auto"] if native.why_not() is None else ["torch"]
OFFSETS = torch.tensor([0, 2, 6])


def shapes(result):
    """Of an op's output and state, or of a step's output."""
    parts = result if isinstance(result, tuple) else (result,)
    tensors = [x for p in parts for x in ((p.s, p.z, p.log_scale, p.tokens) if isinstance(p, State) else (p,))]
    return [None if x is None else (x.shape, x.dtype) for x in tensors]


def attend(q, k, v, decay, offsets, backend, phi=None):
    more = {"normalize": phi is None or phi.positive, "feature_map": phi, "backend": backend, "return_state": True}
    _, state = linear_attention(q, k, v, decay=decay, cu_seqlens=offsets, **more)
    return linear_attention(q, k, v, decay=decay, cu_seqlens=offsets, **more, initial_state=state)


def arguments(packed, decayed):
    q, k, v = torch.rand(3, 1, 6, 2, 4).unbind()
    return q, k, v[..., :3], -torch.rand(2) if decayed else None, OFFSETS if packed else None


def without(kind, tensors, call):
    """``call`` on the tensors without their values."""
    if kind == "meta":
        return call(*(x if x is None else x.to("meta") for x in tensors))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return call(*(x if x is None else mode.from_tensor(x) for x in tensors))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["meta", "fake"])
class TestShapes:
    """What comes out is what the values would have given, but for the values."""

    @pytest.mark.parametrize("packed", [False, True])
    @pytest.mark.parametrize("decayed", [False, True])
    @pytest.mark.parametrize("name", [None, *NAMES])
    def test_of_the_op(self, kind, backend, packed, decayed, name):
        given = arguments(packed, decayed)
        phi = None if name is None else make(name)
        want = attend(*given, backend, phi)
        if phi is not None and kind == "meta":
            phi = phi.to("meta")
        got = without(kind, given, lambda *tensors: attend(*tensors, backend, phi))
        assert shapes(got) == shapes(want)

    def test_of_the_others(self, kind, backend):
        x, dt, A = torch.randn(1, 6, 4, 3), torch.rand(1, 6, 4), -torch.rand(4)
        B, C = torch.randn(2, 1, 6, 2, 5).unbind()
        more = {"return_state": True, "backend": backend}
        for offsets in (None, OFFSETS):
            for call, tensors in (
                (lambda *t: mamba2_scan(*t[:-1], cu_seqlens=t[-1], **more), (x, dt, A, B, C, A, offsets)),
                (
                    lambda *t: selective_scan(*t[:-1], cu_seqlens=t[-1], **more),
                    (dt, dt, -torch.rand(4, 5), B[:, :, 0], C[:, :, 0], offsets),
                ),
                (lambda *t: causal_conv1d(*t[:-1], cu_seqlens=t[-1], **more), (dt, torch.rand(4, 3), offsets)),
            ):
                assert shapes(without(kind, tensors, call)) == shapes(call(*tensors))

    def test_of_the_step(self, kind, backend):
        q, k, v = torch.rand(3, 2, 1, 2, 4).unbind()
        tensors = (torch.rand(2, 2, 4, 4), torch.rand(2, 2, 4), torch.tensor([1, 2]), q, k, v, -torch.rand(2))

        def call(s, z, tokens, q, k, v, decay):
            return phistate.linear_attention_step_(
                State(s=s, z=z, tokens=tokens), q, k, v, decay=decay, backend=backend
            )

        assert shapes(without(kind, tensors, call)) == shapes(call(*tensors))

    def test_of_a_step_that_erases(self, kind, backend):
        q, k, v, erase = torch.rand(4, 2, 1, 2, 4).unbind()
        tensors = (torch.rand(2, 2, 4, 4), torch.tensor([1, 2]), q, k, v, erase)

        def call(s, tokens, q, k, v, erase):
            return phistate.linear_attention_step_(
                State(s=s, tokens=tokens), q, k, v, write="delta", erase=erase, backend=backend
            )

        assert shapes(without(kind, tensors, call)) == shapes(call(*tensors))

    def test_of_the_other_steps(self, kind, backend):
        x, dt, A = torch.randn(1, 4, 3), torch.rand(1, 4), -torch.rand(4)
        B, C = torch.randn(2, 1, 2, 5).unbind()
        for step, tensors in (
            (phistate.mamba2_step_, (torch.zeros(1, 4, 3, 5), x, dt, A, B, C)),
            (phistate.selective_scan_step_, (torch.zeros(1, 4, 5), dt, dt, -torch.rand(4, 5), B, C)),
            (phistate.causal_conv1d_step_, (torch.zeros(1, 4, 2), dt, torch.rand(4, 3))),
        ):
            call = lambda *t: step(*t, backend=backend)  # noqa: B023, E731 - called before the loop goes on
            assert shapes(without(kind, tensors, call)) == shapes(call(*tensors))


def test_offsets_without_values_do_not_pack_values():
    q, k, v, _, offsets = arguments(True, False)
    with pytest.raises(ValueError, match="cu_seqlens: got a tensor without values beside inputs that have some"):
        linear_attention(q, k, v, cu_seqlens=offsets.to("meta"))


class TestMapped:
    """Under torch.func.vmap: row by row, and a check sees all rows at once."""

    def assert_rowwise(self, function, rows):
        got = torch.func.vmap(function)(rows)
        torch.testing.assert_close(got, torch.stack([function(row) for row in rows]))

    @pytest.mark.parametrize("name", [None, "elu", "favor+", "cosformer"])
    @pytest.mark.parametrize("packed", [False, True])
    def test_over_a_decay(self, name, packed):
        q, k, v, _, offsets = (x if x is None else x.double() for x in arguments(packed, False))
        offsets = None if offsets is None else offsets.long()
        phi = None if name is None else make(name).double()
        for decay in (-torch.rand(3, 2), -torch.rand(3, 1, 6, 2)):
            self.assert_rowwise(
                lambda d: linear_attention(q, k, v, decay=d, feature_map=phi, cu_seqlens=offsets, backend="torch"),
                decay.double(),
            )

    def test_gradients_over_a_decay(self):
        q, k, v = (x.double() for x in arguments(False, False)[:3])
        self.assert_rowwise(
            torch.func.grad(lambda d: linear_attention(q, k, v, decay=d, backend="torch").square().sum()),
            -torch.rand(3, 2).double(),
        )

    def test_a_positive_decay_is_seen(self):
        q, k, v = arguments(False, False)[:3]
        decay = torch.tensor([[-1.0, -2.0], [-1.0, 3.0]])
        with pytest.raises(ValueError, match="decay: got a maximum of 3"):
            torch.func.vmap(lambda d: linear_attention(q, k, v, decay=d, backend="torch"))(decay)

    def test_offsets_cannot_be_mapped(self):
        q, k, v = arguments(False, False)[:3]
        with pytest.raises(ValueError, match=r"cu_seqlens: got offsets that torch.func.vmap maps over"):
            torch.func.vmap(lambda c: linear_attention(q, k, v, cu_seqlens=c, backend="torch"))(OFFSETS.expand(2, -1))

    @pytest.mark.parametrize("which", range(6))
    def test_over_each_input_of_mamba2(self, which):
        draw = {"dtype": torch.float64}
        given = [torch.randn(1, 7, 4, 3, **draw), torch.rand(1, 7, 4, **draw), -torch.rand(4, **draw)]
        given += [*torch.randn(2, 1, 7, 2, 5, **draw), torch.randn(4, 3, **draw)]

        def scan(x):
            return mamba2_scan(*(x if n == which else t for n, t in enumerate(given)), backend="torch")

        self.assert_rowwise(scan, torch.stack([given[which], given[which] / 2, given[which] / 3]))
