"""What every feature map keeps, whichever family it is of."""

import copy
import inspect
import math
import pickle

import pytest
import torch

from phistate.features import ExponentialFeatureMap, FittedFeatureMap, feature_map, feature_map_names
from tests.features.cases import NAMES, OPTIONS, RANDOM, D, kernel, make, sample, vectors

EXPONENTIAL = [name for name in NAMES if isinstance(make(name), ExponentialFeatureMap)]
POSITIONS = torch.arange(5)


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


def sides(phi):
    return (phi.query, phi.key)


def test_every_map_is_a_case():
    assert set(OPTIONS) == set(feature_map_names())


def test_shape_and_dtype(name):
    phi = make(name)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        for shape in ((2, 5, 3), (1, 5, 1), (0, 5, 2)):
            for side in sides(phi):
                features = side(vectors(*shape, dtype=dtype), POSITIONS)
                assert features.shape == (*shape, phi.num_features)
                assert features.dtype == dtype
    for side in sides(phi):
        assert side(vectors(2, 0, 3), POSITIONS[:0]).shape == (2, 0, 3, phi.num_features)


def test_half_inputs_lose_only_their_own_rounding(name):
    phi = make(name)
    for dtype in (torch.bfloat16, torch.float16):
        x = vectors(2, 5, 3, dtype=dtype)
        for side in sides(phi):
            exact = side(x.double(), POSITIONS)
            tolerance = torch.finfo(dtype).eps
            torch.testing.assert_close(side(x, POSITIONS).double(), exact, rtol=tolerance, atol=1e-6)


def test_autocast_does_not_reach_inside(name):
    phi = make(name)
    x = vectors(2, 5, 3, dtype=torch.float32)
    for side in sides(phi):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = side(x, POSITIONS)
        torch.testing.assert_close(inside, side(x, POSITIONS), rtol=0, atol=0)


def test_positions_are_ignored_or_needed(name):
    phi = make(name)
    x = vectors(2, 5, 3)
    if not phi.positional:
        for side in sides(phi):
            torch.testing.assert_close(side(x), side(x, POSITIONS), rtol=0, atol=0)
        return
    spelled = POSITIONS.expand(2, 5)
    for side in sides(phi):
        torch.testing.assert_close(side(x, spelled), side(x, POSITIONS), rtol=0, atol=0)
        assert not torch.equal(side(x, POSITIONS + 1), side(x, POSITIONS))
        with pytest.raises(ValueError, match="positions: got None"):
            side(x)
        with pytest.raises(ValueError, match=r"positions: got shape \(4,\)"):
            side(x, POSITIONS[:4])
        with pytest.raises(TypeError, match=r"positions: got dtype torch.float32"):
            side(x, POSITIONS.float())


def test_positive_is_true_to_its_word(name):
    phi = make(name)
    weights = kernel(phi, vectors(40, 2, size=3), vectors(40, 2, seed=1, size=3), torch.arange(40) % 16)
    assert (weights >= 0).all() == phi.positive


def test_scale_is_split_between_query_and_key(name):
    phi, unit = make(name, scale=0.3), make(name, scale=1.0)
    if isinstance(unit, FittedFeatureMap):  # to what the other map saw
        unit.fit(*(math.sqrt(0.3) * given for given in sample()))
    x = vectors(2, 5, 3)
    assert make(name).scale == pytest.approx(D**-0.5)
    for side, plain in zip(sides(phi), sides(unit), strict=True):
        torch.testing.assert_close(side(x, POSITIONS), plain(x * math.sqrt(0.3), POSITIONS))


def test_strided_views(name):
    phi = make(name)
    x = vectors(2, 3, 5).transpose(1, 2)
    for side in sides(phi):
        torch.testing.assert_close(side(x, POSITIONS), side(x.contiguous(), POSITIONS))


@torch.no_grad()
def test_inputs_are_left_alone(name):
    phi = make(name, scale=1.0)
    x = vectors(2, 5, 3, dtype=torch.float32)
    before = x.clone()
    for side in sides(phi):
        side(x, POSITIONS)
        assert torch.equal(x, before)


def test_values_do_not_depend_on_whether_gradients_are_kept(name):
    phi = make(name)
    x = vectors(2, 5, 3, dtype=torch.float32)
    for side in sides(phi):
        with torch.no_grad():
            plain = side(x, POSITIONS)
        torch.testing.assert_close(side(x.clone().requires_grad_(), POSITIONS), plain)


def test_gradients(name):
    phi = make(name).double()
    # Nothing here lies within the finite difference of a kink.
    x = vectors(1, 3, 2).requires_grad_()
    parameters = list(phi.parameters())
    for side in sides(phi):
        torch.autograd.gradcheck(lambda x, *_, side=side: side(x, POSITIONS[:3]) + 0 * x.sum(), (x, *parameters))


def test_gradients_stay_finite_where_a_feature_would_overflow():
    x = torch.tensor([[[[200.0, -200.0, 0.0, 1.0]]]], requires_grad=True)
    for name in ("elu", "relu", "hedgehog"):
        make(name).query(x).sum().backward()
        assert x.grad.isfinite().all()
    for name in EXPONENTIAL:
        make(name).log_query(x).sum().backward()
        assert x.grad.isfinite().all()


@pytest.mark.parametrize("name", EXPONENTIAL)
def test_log_features(name):
    phi = make(name)
    for dtype, wide in ((torch.float64, torch.float64), (torch.bfloat16, torch.float32)):
        x = vectors(2, 5, 3, dtype=dtype)
        for log_side, side in ((phi.log_query, phi.query), (phi.log_key, phi.key)):
            logs = log_side(x)
            assert logs.dtype == wide
            torch.testing.assert_close(logs.exp().to(dtype), side(x), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's tracer imports what Python deprecates
def test_compiles_without_a_graph_break(name):
    phi = make(name)
    x = vectors(2, 5, 3)
    torch._dynamo.reset()
    compiled = torch.compile(phi.query, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, POSITIONS), phi.query(x, POSITIONS))


def test_fingerprint_knows_the_draw_and_the_settings(name):
    phi = make(name)
    assert phi.fingerprint == make(name).fingerprint
    prints = {make(name, scale=0.3).fingerprint, make(name, head_dim=D + 1).fingerprint, phi.fingerprint}
    changed = {
        "relu": {"epsilon": 0.02},
        "relu2": {"epsilon": 0.02},
        "exp": {"softmax": True},
        "polynomial": {"p": 4},
        "taylor": {"order": 4},
        "cosformer": {"max_length": 17},
        "hedgehog": {"bias": False},
        "favor+": {"orthogonal": False},
        "rff": {"orthogonal": False},
        "dpfp": {"nu": 3},
        "rebased": {"eps": 1e-3},
        "hyperbolic": {"orthogonal": False},
        "oprf": {"orthogonal": False},
        "sderf": {"balance": "full"},
        "simplex": {"num_features": 7},
        "nystrom": {"num_features": 9},
        "polysketch": {"sketch_size": 6},
    }
    if name in changed:
        prints.add(make(name, **changed[name]).fingerprint)
    if name in RANDOM:
        prints.add(make(name, seed=1).fingerprint)
    assert len(prints) == 3 + (name in changed) + (name in RANDOM)


def test_fingerprint_survives_what_changes_nothing(name):
    phi = make(name)
    before = phi.fingerprint
    assert phi.fingerprint == before
    assert copy.deepcopy(phi).fingerprint == before
    assert pickle.loads(pickle.dumps(phi)).fingerprint == before
    other = make(name, seed=1)
    other.load_state_dict(phi.state_dict())
    assert other.fingerprint == before
    x = vectors(2, 5, 3, dtype=torch.float32)
    for side, loaded in zip(sides(phi), sides(other), strict=True):
        torch.testing.assert_close(loaded(x, POSITIONS), side(x, POSITIONS), rtol=0, atol=0)
    assert phi.double().fingerprint == before


def test_fingerprint_follows_the_tensors():
    phi = make("hedgehog")
    before = phi.fingerprint
    with torch.no_grad():
        phi.query_projection.weight[0, 0] += 1e-3
    assert phi.fingerprint != before
    phi = make("favor+")
    before = phi.fingerprint
    phi.redraw(torch.Generator().manual_seed(7))
    after = phi.fingerprint
    assert after != before
    phi.redraw(torch.Generator().manual_seed(7))
    assert phi.fingerprint == after


def test_fingerprint_under_inference_mode():
    with torch.inference_mode():
        phi = make("favor+")
        before = phi.fingerprint
        phi.directions.mul_(2)
        assert phi.fingerprint != before


def test_refuses_wrong_vectors(name):
    phi = make(name)
    for side in sides(phi):
        with pytest.raises(ValueError, match="x: got last dimension 5; takes head_dim = 4"):
            side(torch.zeros(2, 5, 3, 5), POSITIONS)
        with pytest.raises(TypeError, match=r"x: got dtype torch.int64; takes a floating one"):
            side(torch.zeros(2, 5, 3, 4, dtype=torch.int64), POSITIONS)


def test_refuses_wrong_settings(name):
    for bad in (0, -1):
        with pytest.raises(ValueError, match="head_dim: got"):
            feature_map(name, head_dim=bad)
    with pytest.raises(TypeError, match=r"head_dim: got 4\.0"):
        feature_map(name, head_dim=4.0)
    for scale in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="scale: got"):
            feature_map(name, head_dim=4, scale=scale)
    with pytest.raises(
        TypeError, match=rf"surprise: got an unknown option of feature map '{name}'".replace("+", r"\+")
    ):
        feature_map(name, head_dim=4, surprise=1)


def test_unknown_name():
    with pytest.raises(ValueError, match="name: got 'softmax'; takes one of elu, relu"):
        feature_map("softmax", head_dim=4)


@pytest.mark.parametrize(
    ("name", "option", "value", "error"),
    [
        ("favor+", "num_features", 0, ValueError),
        ("favor+", "num_features", 2.0, TypeError),
        ("rff", "num_features", 0, ValueError),
        ("rff", "num_features", 7, ValueError),
        ("polynomial", "p", 0, ValueError),
        ("taylor", "order", 0, ValueError),
        ("cosformer", "max_length", 0, ValueError),
        ("hedgehog", "query_heads", 0, ValueError),
        ("hedgehog", "key_heads", 0, ValueError),
        ("relu", "epsilon", -1.0, ValueError),
        ("relu2", "epsilon", math.nan, ValueError),
        ("dpfp", "nu", 0, ValueError),
        ("dpfp", "nu", 8, ValueError),
        ("rebased", "eps", -1.0, ValueError),
        ("hyperbolic", "num_features", 0, ValueError),
        ("hyperbolic", "num_features", 7, ValueError),
        ("oprf", "num_features", 0, ValueError),
        ("oprf", "heads", 0, ValueError),
        ("oprf", "a", 0.125, ValueError),
        ("oprf", "a", -math.inf, ValueError),
        ("sderf", "num_features", 0, ValueError),
        ("sderf", "balance", "half", ValueError),
        ("simplex", "num_features", 0, ValueError),
        ("nystrom", "num_features", 0, ValueError),
        ("polysketch", "sketch_size", 0, ValueError),
    ],
)
def test_refuses_wrong_options(name, option, value, error):
    with pytest.raises(error, match=f"{option}: got"):
        feature_map(name, head_dim=4, **{option: value})


@pytest.mark.parametrize(
    ("name", "head_dim", "option", "most"),
    [
        ("polynomial", 64, "p", 4),
        ("taylor", 64, "order", 4),
        ("taylor", 1023, "order", 2),
        ("dpfp", 1024, "nu", 512),
        ("polysketch", 4, "sketch_size", 1447),
        ("favor+", 1, "num_features", 2**20),
        ("hyperbolic", 1, "num_features", 2**20),
        ("rff", 1, "num_features", 2**20),
        ("oprf", 1, "num_features", 2**20),
        ("sderf", 1, "num_features", 2**20),
        ("simplex", 2, "num_features", 2**20),
    ],
)
def test_refuses_more_features_than_anyone_can_hold(name, head_dim, option, most):
    assert feature_map(name, head_dim=head_dim, **{option: most}).num_features <= 2**20
    for more in (most + 2, 10**9):
        with pytest.raises(ValueError, match=f"{option}: got {more}") as refused:
            feature_map(name, head_dim=head_dim, **{option: more})
        assert "\n" not in str(refused.value)


def test_refuses_what_costs_more_than_its_features():
    with pytest.raises(ValueError, match="head_dim: got 1448, which makes more features than 1048576"):
        feature_map("rebased", head_dim=1448)
    with pytest.raises(ValueError, match="num_features: got 16385; takes at most 16384"):
        feature_map("nystrom", head_dim=1, num_features=2**14 + 1)


def test_every_option_has_a_default(name):
    options = inspect.signature(type(make(name))).parameters
    assert all(p.default is not p.empty for option, p in options.items() if option != "head_dim")
