"""What the op refuses, and how it says so; feature maps, log space and states through the op."""

import itertools

import pytest
import torch

import phistate
from phistate import linear_attention
from tests.conformance import EVERY_MIXER, make_case

Q = torch.rand(2, 6, 4, 8)
K = torch.rand(2, 6, 2, 8)
V = torch.rand(2, 6, 2, 3)


def offsets(*values):
    return torch.tensor(values)


BAD = {
    "rank of q": ({"q": Q[0]}, ValueError, r"q: got shape \(6, 4, 8\); takes \[B,T,H,D\]"),
    "rank of v": ({"v": V[..., 0]}, ValueError, "v: got shape"),
    "not a tensor": ({"k": K.tolist()}, TypeError, "k: got list"),
    "integers": ({"q": Q.long(), "k": K.long(), "v": V.long()}, TypeError, "q: got torch.int64"),
    "heads of k": (
        {"k": torch.rand(2, 6, 3, 8)},
        ValueError,
        "k: got 3 heads; takes a count that divides the largest, 4",
    ),
    "heads of the states": (
        {"q": torch.rand(2, 6, 12, 8), "k": torch.rand(2, 6, 4, 8), "v": torch.rand(2, 6, 6, 3)},
        ValueError,
        "k: got 4 heads; takes a count that divides the states' 6",
    ),
    "no heads": ({"q": Q[:, :, :0]}, ValueError, "q: got 0 heads"),
    "dtype of k": ({"k": K.double()}, TypeError, "k: got torch.float64; takes torch.float32"),
    "device of v": ({"v": V.to("meta")}, ValueError, "v: got device meta; takes cpu"),
    "batch of v": ({"v": V[:1]}, ValueError, "v: got batch 1; takes 2"),
    "length of k": ({"k": K[:, :5], "v": V[:, :5]}, ValueError, "k: got length 5; takes 6"),
    "length of v": ({"v": V[:, :5]}, ValueError, "v: got length 5; takes 6"),
    "size of k": ({"k": K[..., :5]}, ValueError, "k: got last dimension 5; takes 8"),
    "positive decay": ({"decay": torch.tensor([-1.0, 176.0])}, ValueError, "decay: got a maximum of 176; takes"),
    "NaN decay": ({"decay": torch.tensor([-1.0, float("nan")])}, ValueError, "decay: got a maximum of nan; takes"),
    "shape of decay": ({"decay": -torch.rand(4)}, ValueError, r"decay: got shape \(4,\); takes \(2,\) or \(2, 6, 2\)"),
    "dtype of decay": (
        {"decay": -torch.rand(2).half()},
        TypeError,
        "decay: got torch.float16; takes torch.float32$",
    ),
    "device of mask": (
        {"mask": torch.ones(2, 6, dtype=torch.bool, device="meta")},
        ValueError,
        "mask: got device meta; takes cpu, where the inputs are",
    ),
    "decay is a number": ({"decay": -0.1}, TypeError, "decay: got float"),
    "shape of beta": ({"beta": torch.rand(2, 6, 4)}, ValueError, r"beta: got shape \(2, 6, 4\); takes \(2, 6, 2\)"),
    "write": ({"write": "erase"}, ValueError, "write: got 'erase'; takes 'add', 'delta'"),
    "erase of an additive write": (
        {"erase": K},
        ValueError,
        "erase: got a tensor with write='add'; takes None, or write='delta'",
    ),
    "erase is a list": ({"write": "delta", "erase": [1.0]}, TypeError, "erase: got list"),
    "shape of erase": (
        {"write": "delta", "erase": Q},
        ValueError,
        r"erase: got shape \(2, 6, 4, 8\); takes \(2, 6, 2, 8\)",
    ),
    "dtype of erase": (
        {"write": "delta", "erase": K.double()},
        TypeError,
        "erase: got torch.float64; takes torch.float32",
    ),
    "device of erase": ({"write": "delta", "erase": K.to("meta")}, ValueError, "erase: got device meta; takes cpu"),
    "erase with a feature map": (
        {"write": "delta", "erase": K, "feature_map": phistate.feature_map("elu", head_dim=8)},
        ValueError,
        "erase: got a tensor with a feature map",
    ),
    "form": ({"form": "fast"}, ValueError, "form: got 'fast'; takes 'auto'"),
    "backend": ({"backend": "tpu"}, ValueError, "backend: got 'tpu'; takes 'auto'"),
    "signed": ({"signed": "maybe"}, ValueError, "signed: got 'maybe'"),
    "mask of numbers": ({"mask": torch.ones(2, 6)}, TypeError, "mask: got torch.float32; takes a bool tensor"),
    "shape of mask": ({"mask": torch.ones(2, 5, dtype=torch.bool)}, ValueError, r"mask: got shape \(2, 5\)"),
    "packed batch": ({"cu_seqlens": offsets(0, 6)}, ValueError, "cu_seqlens: got it with batch 2"),
    "delta not causal": ({"causal": False, "write": "delta"}, ValueError, "causal: got False with write='delta'"),
    "decay not causal": ({"causal": False, "decay": -torch.rand(2)}, ValueError, "causal: got False with a decay"),
    "feature map": ({"feature_map": torch.exp}, TypeError, "feature_map: got builtin_function_or_method"),
    "initial state": ({"initial_state": torch.zeros(2, 2, 8, 3)}, TypeError, "initial_state: got Tensor"),
}


@pytest.mark.parametrize(("changes", "error", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input(changes, error, message):
    with pytest.raises(error, match=message):
        linear_attention(**{"q": Q, "k": K, "v": V, **changes})


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        (offsets(1, 6), "a first offset of 1; takes 0"),
        (offsets(0, 4, 3, 6), "which decreases"),
        (offsets(0, 5), "a last offset of 5; takes T = 6"),
        (offsets(), "takes an int32 or int64 tensor"),
        (offsets(0.0, 6.0), "takes an int32 or int64 tensor"),
        (offsets(0, 6)[None], r"got shape \(1, 2\)"),
    ],
)
def test_bad_packing(bounds, message):
    with pytest.raises((ValueError, TypeError), match=f"cu_seqlens: .*{message}"):
        linear_attention(Q[:1], K[:1], V[:1], cu_seqlens=bounds)


def test_unknown_argument():
    with pytest.raises(TypeError, match="decays"):
        linear_attention(Q, K, V, decays=None)


def test_bad_state():
    _, state = linear_attention(Q, K, V, return_state=True)
    with pytest.raises(ValueError, match="initial_state: got a state without normaliser z"):
        linear_attention(Q, K, V, normalize=True, initial_state=state)
    with pytest.raises(ValueError, match="initial_state: got s of shape"):
        linear_attention(Q[:1], K[:1], V[:1], initial_state=state)
    with pytest.raises(TypeError, match="initial_state: got torch.float32 on cpu; takes torch.float64"):
        linear_attention(Q.double(), K.double(), V.double(), initial_state=state)


def test_a_state_knows_its_map():
    one, other = (
        phistate.feature_map("favor+", head_dim=8, num_features=16, generator=torch.Generator().manual_seed(s))
        for s in (1, 2)
    )
    _, state = linear_attention(Q, K, V, feature_map=one, normalize=True, return_state=True)
    linear_attention(Q, K, V, feature_map=one, normalize=True, initial_state=state)
    for phi in (other, None):
        with pytest.raises(ValueError, match="initial_state: got"):
            linear_attention(
                *((Q, K, V) if phi is not None else (torch.rand(2, 6, 4, 16), torch.rand(2, 6, 2, 16), V)),
                feature_map=phi,
                normalize=True,
                initial_state=state,
            )


def test_a_signed_map_needs_leave():
    phi = phistate.feature_map("rff", head_dim=8, num_features=16)
    with pytest.raises(ValueError, match="feature_map: got .* whose weights may be negative"):
        linear_attention(Q, K, V, feature_map=phi, normalize=True)
    linear_attention(Q, K, V, feature_map=phi, normalize=True, signed="allow")
    linear_attention(Q, K, V, feature_map=phi)


def test_a_position_beyond_the_last():
    phi = phistate.feature_map("cosformer", head_dim=8, max_length=8)
    _, state = linear_attention(Q, K, V, feature_map=phi, normalize=True, return_state=True)
    with pytest.raises(ValueError, match="positions: got"):
        linear_attention(Q, K, V, feature_map=phi, normalize=True, initial_state=state)


POSITIVE = ["elu", "relu", "exp", "taylor", "favor+", "cosformer", "hedgehog"]


def make_map(name, **options):
    return phistate.feature_map(name, head_dim=8, **options).double()


@pytest.mark.parametrize("name", POSITIVE)
@pytest.mark.parametrize("causal", [True, False])
def test_a_map_is_its_features(name, causal):
    phi = make_map(name)
    q, k, v = (x.double() for x in (Q, K, V))
    positions = torch.arange(6) if phi.positional else None
    want = linear_attention(phi.query(q, positions), phi.key(k, positions), v, normalize=True, causal=causal)
    got = linear_attention(q, k, v, feature_map=phi, normalize=True, causal=causal)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
    want = linear_attention(phi.query(q, positions), phi.key(k, positions), v, scale=0.3, causal=causal)
    got = linear_attention(q, k, v, feature_map=phi, scale=0.3, causal=causal)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", POSITIVE)
def test_positions_pads_and_states_agree(name):
    phi = make_map(name)
    q, k, v = (x.double() for x in (Q[:1], K[:1], V[:1]))
    want, whole = linear_attention(q, k, v, feature_map=phi, normalize=True, return_state=True)
    first, state = linear_attention(q[:, :2], k[:, :2], v[:, :2], feature_map=phi, normalize=True, return_state=True)
    rest, state = linear_attention(
        q[:, 2:], k[:, 2:], v[:, 2:], feature_map=phi, normalize=True, initial_state=state, return_state=True
    )
    torch.testing.assert_close(torch.cat([first, rest], 1), want)
    torch.testing.assert_close(state.s, whole.s)
    mask = torch.tensor([[False, True, True, False, True, True, True, True]])
    padded = [x.new_full((1, 8, *x.shape[2:]), float("nan")) for x in (q, k, v)]
    for x, y in zip(padded, (q, k, v), strict=True):
        x[mask] = y[0]
        x.requires_grad_()
    got = linear_attention(*padded, feature_map=phi, normalize=True, mask=mask)
    torch.testing.assert_close(got[mask][None], want)
    for grad in torch.autograd.grad(got.sum(), padded):
        assert bool(torch.isfinite(grad).all())
    twice = [torch.cat([x, x[:, :0], x[:, :4]], 1) for x in (q, k, v)]
    got, packed = linear_attention(
        *twice, feature_map=phi, normalize=True, cu_seqlens=offsets(0, 6, 6, 10), return_state=True
    )
    torch.testing.assert_close(got, torch.cat([want, want[:, :4]], 1))
    torch.testing.assert_close(packed.s[:1], whole.s)
    again = linear_attention(
        *twice, feature_map=phi, normalize=True, cu_seqlens=offsets(0, 6, 6, 10), initial_state=packed
    )
    alone = linear_attention(q, k, v, feature_map=phi, normalize=True, initial_state=whole)
    torch.testing.assert_close(again[:, :6], alone)


class TestLogSpace:
    """Exponential maps streamed with a running maximum: the values of exp, where exp itself has none."""

    @pytest.fixture
    def phi(self):
        return make_map("favor+", num_features=24, generator=torch.Generator().manual_seed(0))

    @pytest.mark.parametrize("shape", [None, (2,), (2, 6, 2), (2, 6, 2, 24)], ids=str)
    @pytest.mark.parametrize("normalize", [True, False])
    def test_is_the_plain_map_with_gradients(self, phi, shape, normalize):
        inputs = [x.double().requires_grad_() for x in (Q, K, V)]
        decay = None if shape is None else (-3 * torch.rand(shape, dtype=torch.float64)).requires_grad_()
        wanted = inputs if decay is None else [*inputs, decay]
        q, k, v = inputs
        results = []
        for arguments in (
            {"q": q, "k": k, "feature_map": phi},
            {"q": phi.query(q), "k": phi.key(k)},
        ):
            o = linear_attention(**arguments, v=v, decay=decay, normalize=normalize, scale=0.4)
            results.append((o, *torch.autograd.grad(o.cos().sum(), wanted)))
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-11)

    @pytest.mark.parametrize("form", ["recurrent", "chunked", "parallel"])
    @pytest.mark.parametrize("size", [30.0, 300.0])
    def test_finite_where_exp_is_not(self, phi, form, size):
        """Log features down to about −1e4; a stream in float32 is the whole in float64."""
        q, k, v = (
            x.clone().requires_grad_()
            for x in (size * torch.randn(2, 90, 2, 8), size * torch.randn(2, 90, 2, 8), torch.randn(2, 90, 2, 3))
        )
        o = linear_attention(q, k, v, feature_map=phi, normalize=True, form=form)
        log_kernel = torch.logsumexp(
            phi.log_query(q.double()).transpose(1, 2).unsqueeze(3)
            + phi.log_key(k.double()).transpose(1, 2).unsqueeze(2),
            -1,
        )
        future = torch.ones(90, 90, dtype=torch.bool).triu(1)
        weights = log_kernel.masked_fill(future, float("-inf")).softmax(-1)
        want = torch.einsum("bhts,bshv->bthv", weights, v.double())
        # float32 logarithms of this size carry an error of their own.
        allowed = 4 * torch.finfo(torch.float32).eps * phi.log_key(k.double()).abs().max().item()
        assert (o - want).abs().max().item() < max(allowed, 1e-5)
        for grad in torch.autograd.grad(o.sum(), (q, k, v)):
            assert bool(torch.isfinite(grad).all())
        state, pieces = None, []
        for part in (slice(0, 1), slice(1, 2), slice(2, 70), slice(70, 90)):
            piece, state = linear_attention(
                q[:, part],
                k[:, part],
                v[:, part],
                feature_map=phi,
                normalize=True,
                form=form,
                initial_state=state,
                return_state=True,
            )
            pieces.append(piece)
        assert (torch.cat(pieces, 1) - o).abs().max().item() < max(allowed, 1e-5)
        assert bool(torch.isfinite(state.s).all())

    def test_a_reset_forgets_the_maximum(self, phi):
        """A document that ends takes its maximum with it, so that small features after a huge one are not lost."""
        q, k, v = (x.double() for x in (Q, K, V))
        k = torch.cat([100 * k[:, :3], k[:, 3:]], 1)
        decay = torch.zeros(2, 6, 2, dtype=torch.float64)
        decay[:, 3] = float("-inf")
        got = linear_attention(q, k, v, feature_map=phi, decay=decay, normalize=True)
        want = linear_attention(q[:, 3:], k[:, 3:], v[:, 3:], feature_map=phi, normalize=True)
        torch.testing.assert_close(got[:, 3:], want)

    @pytest.mark.parametrize("shape", [(2,), (1, 10, 2), (1, 10, 2, 24)], ids=str)
    def test_packed_with_a_decay_is_one_by_one(self, phi, shape):
        """Whose maxima one scan over all sequences finds, the empty ones' carried on as they were."""
        q, k, v = (x[:1].repeat(1, 2, 1, 1)[:, :10].double() for x in (Q, 30 * K, V))
        decay, bounds = -20 * torch.rand(shape, dtype=torch.float64), [0, 0, 3, 4, 4, 10, 10]
        options = {"feature_map": phi, "normalize": True, "return_state": True}
        warm = None
        for _ in range(2):
            got, state = linear_attention(
                q, k, v, decay=decay, cu_seqlens=offsets(*bounds), initial_state=warm, **options
            )
            for n, (a, b) in enumerate(itertools.pairwise(bounds)):
                before = warm and phistate.State(
                    **{p: getattr(warm, p)[n : n + 1] for p in ("s", "z", "log_scale", "tokens")},
                    fingerprint=warm.fingerprint,
                )
                part = decay if decay.ndim == 1 else decay[:, a:b]
                want, alone = linear_attention(
                    q[:, a:b], k[:, a:b], v[:, a:b], decay=part, initial_state=before, **options
                )
                torch.testing.assert_close(got[:, a:b], want)
                for p in ("s", "z", "log_scale"):
                    torch.testing.assert_close(getattr(state, p)[n : n + 1], getattr(alone, p))
            warm = state

    @pytest.mark.parametrize("causal", [True, False])
    def test_a_warm_state_merges_its_scale(self, phi, causal):
        q, k, v = (x.double() for x in (Q, K, V))
        for first, second in ((1.0, 50.0), (50.0, 1.0)):
            _, state = linear_attention(q, first * k, v, feature_map=phi, normalize=True, return_state=True)
            got = linear_attention(
                q, second * k, v, feature_map=phi, normalize=True, initial_state=state, causal=causal
            )
            keys, values = torch.cat([first * k, second * k], 1), torch.cat([v, v], 1)
            want = linear_attention(torch.cat([q, q], 1), keys, values, feature_map=phi, normalize=True, causal=causal)
            torch.testing.assert_close(got, want[:, 6:])


class TestStep:
    @pytest.mark.parametrize("backend", ["auto", "torch"])
    @pytest.mark.parametrize(("decay", "write", "normalize"), EVERY_MIXER)
    def test_is_the_op_in_place(self, decay, write, normalize, backend):
        case = make_case(decay, write, normalize, T=6, heads=(4, 2, 2)).to(torch.float32)
        want, whole = linear_attention(**case.tensors, **case.options, backend=backend, return_state=True)
        _, state = linear_attention(
            **case.time(slice(0, 2)).tensors, **case.options, backend=backend, return_state=True
        )
        options = {n: x for n, x in case.options.items() if n != "normalize"}
        place = state.s.data_ptr()
        outputs = [
            phistate.linear_attention_step_(state, **case.time(slice(t, t + 1)).tensors, **options, backend=backend)
            for t in range(2, 6)
        ]
        assert state.s.data_ptr() == place
        assert state.tokens.tolist() == [6, 6]
        torch.testing.assert_close(torch.cat(outputs, 1), want[:, 2:], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(state.s, whole.s, rtol=1e-4, atol=1e-5)

    def test_what_it_refuses(self):
        _, state = linear_attention(Q, K, V, return_state=True)
        with pytest.raises(ValueError, match="q: got 6 tokens; takes one"):
            phistate.linear_attention_step_(state, Q, K, V)
        with pytest.raises(ValueError, match="gradient"):
            phistate.linear_attention_step_(state, Q[:, :1].clone().requires_grad_(), K[:, :1], V[:, :1])
        with pytest.raises(TypeError, match="state: got Tensor"):
            phistate.linear_attention_step_(state.s, Q[:, :1], K[:, :1], V[:, :1])
        one = (state, Q[:, :1], K[:, :1], V[:, :1])
        with pytest.raises(ValueError, match="erase: got a tensor with write='add'"):
            phistate.linear_attention_step_(*one, erase=K[:, :1])
        with pytest.raises(ValueError, match=r"erase: got shape \(2, 6, 2, 8\); takes \(2, 1, 2, 8\)"):
            phistate.linear_attention_step_(*one, write="delta", erase=K)
        with pytest.raises(ValueError, match="gradient"):
            phistate.linear_attention_step_(*one, write="delta", erase=K[:, :1].clone().requires_grad_())
        phi = phistate.feature_map("favor+", head_dim=8, num_features=8)
        _, mapped = linear_attention(Q, K, V, feature_map=phi, return_state=True)
        with pytest.raises(ValueError, match="^state: got a state made with the feature map"):
            phistate.linear_attention_step_(mapped, Q[:, :1], K[:, :1], V[:, :1])
