"""State: a value that shares no memory with what it came from, and is saved whole or not at all."""

import os
import stat
import threading

import pytest
import torch

import phistate
from phistate import State, linear_attention
from phistate.ops.backends import native

BACKENDS = ["torch", "cpu"] if native.why_not() is None else ["torch"]
PARTS = ("s", "z", "log_scale", "tokens")
Q = torch.rand(2, 6, 4, 8)
K = torch.rand(2, 6, 2, 8)
V = torch.rand(2, 6, 2, 3)


def make():
    phi = phistate.feature_map("favor+", head_dim=8, num_features=16)
    return phi, linear_attention(Q, K, V, feature_map=phi, normalize=True, return_state=True)[1]


def tensors(state):
    return [x for x in (getattr(state, n) for n in PARTS) if x is not None]


def assert_apart(state, *others):
    """No two of these tensors share memory."""
    places = [x.untyped_storage().data_ptr() for x in tensors(state) if x.numel()]
    taken = {x.untyped_storage().data_ptr() for x in others if x.numel()}
    assert len(set(places)) == len(places)
    assert not taken & set(places)


class TestFile:
    def test_save_and_load(self, tmp_path):
        phi, state = make()
        state.save(tmp_path / "state.safetensors")
        again = State.load(tmp_path / "state.safetensors")
        for name in PARTS:
            assert torch.equal(getattr(state, name), getattr(again, name))
        assert again.fingerprint == state.fingerprint == phi.fingerprint
        assert [p.name for p in tmp_path.iterdir()] == ["state.safetensors"]

    def test_load_refuses_other_files(self, tmp_path):
        from safetensors.torch import save_file

        save_file({"s": torch.zeros(1)}, tmp_path / "weights.safetensors")
        with pytest.raises(ValueError, match="path: got .*weights.safetensors"):
            State.load(tmp_path / "weights.safetensors")

    def test_a_failed_save_leaves_nothing(self, tmp_path):
        _, state = make()
        (tmp_path / "taken").mkdir()
        with pytest.raises(OSError, match="taken"):
            state.save(tmp_path / "taken")
        assert [p.name for p in tmp_path.iterdir()] == ["taken"]

    def test_threads_may_save_to_one_path(self, tmp_path):
        _, state = make()
        path, failures, start = tmp_path / "state", [], threading.Barrier(4)

        def save():
            start.wait()
            try:
                for _ in range(20):
                    state.save(path)
                    State.load(path)
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=save) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert list(tmp_path.iterdir()) == [path]

    def test_parts_that_share_memory(self, tmp_path):
        both = torch.rand(1, 1, 1, 4)
        s = torch.rand(2, 3, 4, 1)
        for state in (
            State(s=both[..., :3], z=both[..., 3], tokens=torch.zeros(1).long()),
            State(s=s, z=s[..., 0], log_scale=s[..., 0], tokens=torch.zeros(2).long()),
        ):
            state.save(tmp_path / "state")
            again = State.load(tmp_path / "state")
            for a, b in zip(tensors(state), tensors(again), strict=True):
                assert torch.equal(a, b)

    @pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX's")
    def test_permissions_are_a_new_files(self, tmp_path):
        _, state = make()
        before = os.umask(0o027)
        try:
            state.save(tmp_path / "state")
        finally:
            os.umask(before)
        assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o640


class TestValue:
    @pytest.mark.parametrize(
        "copy",
        [
            lambda state: state.fork(),
            lambda state: state.detach(),
            lambda state: state.to("cpu"),
            lambda state: state.to(torch.device("cpu")),
            lambda state: state.reorder(torch.tensor([0, 1])),
        ],
    )
    def test_every_method_copies(self, copy):
        _, state = make()
        got = copy(state)
        assert_apart(got, *tensors(state))
        assert got.fingerprint == state.fingerprint
        for a, b in zip(tensors(got), tensors(state), strict=True):
            assert torch.equal(a, b)

    def test_reorder(self):
        _, state = make()
        turned = state.reorder(torch.tensor([1, 0, 1]))
        assert torch.equal(turned.s[0], state.s[1])
        assert torch.equal(turned.log_scale[2], state.log_scale[1])
        assert turned.tokens.shape == (3,)

    def test_the_graph(self):
        live = State(s=torch.zeros(1, 1, 1, 1, requires_grad=True), tokens=torch.zeros(1, dtype=torch.int64))
        assert live.fork().s.requires_grad
        assert not live.detach().s.requires_grad

    def test_bytes(self):
        _, state = make()
        assert state.nbytes == 4 * 2 * 2 * 16 * (3 + 1 + 1) + 8 * 2

    @pytest.mark.parametrize(
        "wrong",
        [
            {"s": torch.zeros(2, 3, 4)},
            {"z": torch.zeros(2, 3, 5)},
            {"z": torch.zeros(2, 3, 4, dtype=torch.bfloat16)},
            {"z": torch.zeros(2, 3, 4, device="meta")},
            {"log_scale": torch.zeros(2, 3, 4).double()},
            {"tokens": torch.zeros(3, dtype=torch.int64)},
            {"tokens": torch.zeros(2, dtype=torch.int64, device="meta")},
        ],
    )
    def test_parts_that_do_not_fit(self, wrong):
        good = {"s": torch.zeros(2, 3, 4, 5), "tokens": torch.zeros(2, dtype=torch.int64)}
        with pytest.raises((ValueError, TypeError), match=f"{next(iter(wrong))}: got"):
            State(**{**good, **wrong})


@pytest.mark.parametrize("backend", BACKENDS)
class TestWithoutAStep:
    """The state after nothing is a copy of the one before it."""

    @pytest.mark.parametrize("packed", [None, [0, 0, 0], [0]])
    @pytest.mark.parametrize("phi", [None, "elu", "favor+", "cosformer"])
    @pytest.mark.parametrize(
        "options",
        [{}, {"normalize": True}, {"causal": False}, {"causal": False, "normalize": True}, {"decay": -torch.rand(2)}],
        ids=str,
    )
    def test_of_the_op(self, backend, packed, phi, options):
        self.check(backend, packed, phi, options)

    @pytest.mark.parametrize("packed", [None, [0, 0, 0], [0]])
    @pytest.mark.parametrize("write", ["add", "delta"])
    @pytest.mark.parametrize("form", ["recurrent", "chunked", "parallel"])
    def test_of_every_form(self, backend, packed, write, form):
        if backend == "cpu" and form != "chunked":
            return
        self.check(backend, packed, None, {"form": form, "write": write})

    def check(self, backend, packed, name, options):
        phi = None if name is None else phistate.feature_map(name, head_dim=8)
        more = {"feature_map": phi, "return_state": True, "backend": backend, **options}
        batch, N = (2, 2) if packed is None else (1, len(packed) - 1)
        warm_up = [x[: 1 if packed else 2, :3] for x in (Q, K, V)]
        if packed is not None:
            warm_up = [x[:, : 3 if N else 0] for x in warm_up]
            more["cu_seqlens"] = torch.tensor([0, *[3] * N])
        _, before = linear_attention(*warm_up, **more)
        if packed is not None:
            more["cu_seqlens"] = torch.tensor(packed)
        nothing = [x[:batch, :0] for x in (Q, K, V)]
        for inputs in (nothing, [x.clone().requires_grad_() for x in nothing]):
            o, after = linear_attention(*inputs, **more, initial_state=before)
            assert o.shape == (batch, 0, 4, 3)
            assert after.s.shape[0] == N
            assert_apart(after, *tensors(before))
            for a, b in zip(tensors(after), tensors(before), strict=True):
                assert torch.equal(a, b)

    def test_of_the_others(self, backend):
        for offsets, N in ((None, 1), (torch.tensor([0, 0, 0]), 2), (torch.tensor([0]), 0)):
            more = {"return_state": True, "cu_seqlens": offsets, "backend": backend}
            held = torch.rand(N, 4, 5)
            steps = torch.rand(1, 0, 4)
            B, C = torch.rand(2, 1, 0, 5).unbind()
            y, h = phistate.selective_scan(steps, steps, -torch.rand(4, 5), B, C, initial_state=held, **more)
            assert y.shape == (1, 0, 4)
            assert torch.equal(h, held)
            assert N == 0 or h.untyped_storage().data_ptr() != held.untyped_storage().data_ptr()
            past = torch.rand(N, 4, 2)
            y, last = phistate.causal_conv1d(steps, torch.rand(4, 3), initial_state=past, **more)
            assert torch.equal(last, past)
            assert N == 0 or last.untyped_storage().data_ptr() != past.untyped_storage().data_ptr()
            state = State(s=torch.rand(N, 4, 5, 3), tokens=torch.zeros(N, dtype=torch.int64))
            x, dt, B = torch.rand(1, 0, 4, 3), torch.rand(1, 0, 4), torch.rand(1, 0, 2, 5)
            y, after = phistate.mamba2_scan(x, dt, -torch.rand(4), B, B, initial_state=state, **more)
            assert y.shape == x.shape
            assert torch.equal(after.s, state.s)
            assert_apart(after, *tensors(state))
