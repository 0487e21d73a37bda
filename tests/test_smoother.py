"""The smoother: what scikit-learn, statsmodels and its own definition expect of it."""

import copy
import pickle

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.utils.estimator_checks import parametrize_with_checks
from statsmodels.nonparametric.kernel_regression import KernelReg

import phistate
from phistate.features import FavorPlusPlus
from phistate.features.grid import Grid
from phistate.smoother import KernelSmoother

rng = np.random.default_rng(0)
X = rng.standard_normal((300, 2))
Y = np.stack([np.sin(2 * X[:, 0]), X[:, 0] * X[:, 1]], 1) + 0.1 * rng.standard_normal((300, 2))
QUERIES = rng.standard_normal((50, 2))
H = np.array([0.4, 0.6])


@parametrize_with_checks([KernelSmoother(), KernelSmoother(exact=True), KernelSmoother("oprf")])
def test_scikit_learn(estimator, check):
    check(estimator)


def by_hand(x, rows, targets, weights, h):
    kernel = weights * np.exp(-np.square((x[:, None] - rows) / h).sum(-1) / 2)
    return kernel @ targets / kernel.sum(1, keepdims=True), kernel.sum(1)


@pytest.mark.parametrize("exact, tolerance", [(True, 1e-12), (False, 1e-6)])
def test_it_is_nadaraya_watson(exact, tolerance):
    weights = rng.uniform(0, 3, 300)
    smoother = KernelSmoother(bandwidth=H, exact=exact).fit(X, Y, weights)
    value, mass = smoother.predict(QUERIES, return_mass=True)
    wanted, wanted_mass = by_hand(QUERIES, X, Y, weights, H)
    np.testing.assert_allclose(value, wanted, rtol=tolerance, atol=10 * tolerance)
    np.testing.assert_allclose(mass, wanted_mass, rtol=100 * tolerance)


@pytest.mark.filterwarnings("ignore:After 0.17 or January 2028:FutureWarning")  # of statsmodels, to its own callers
@pytest.mark.parametrize("columns", [1, 2])
def test_it_agrees_with_statsmodels(columns):
    rows, h = X[:, :columns], H[:columns]
    theirs, _ = KernelReg(Y[:, 0], rows, "c" * columns, reg_type="lc", bw=h).fit(QUERIES[:, :columns])
    exact = KernelSmoother(bandwidth=h, exact=True).fit(rows, Y[:, 0]).predict(QUERIES[:, :columns])
    folded = KernelSmoother(bandwidth=h).fit(rows, Y[:, 0]).predict(QUERIES[:, :columns])
    np.testing.assert_allclose(exact, theirs, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(folded, theirs, rtol=1e-5, atol=1e-5)


def test_mass_is_a_density():
    smoother = KernelSmoother(bandwidth=0.3).fit(X[:, :1], Y[:, 0])
    line = np.linspace(-8, 8, 2001)
    _, mass = smoother.predict(line[:, None], return_mass=True)
    density = mass / len(X) / (0.3 * np.sqrt(2 * np.pi))
    assert np.trapezoid(density, line) == pytest.approx(1, abs=1e-4)  # what the grid cuts off at its edges


@pytest.mark.parametrize("options", [{}, {"feature_map": "oprf", "num_features": 64}, {"exact": True}])
def test_order_and_batches_do_not_matter(options):
    settings = {"bandwidth": 0.5, "offset": 0.0, "random_state": 3, **options}
    whole = KernelSmoother(**settings).prepare(X).partial_fit(X, Y)
    order = rng.permutation(300)
    pieces = KernelSmoother(**settings).prepare(X)
    for rows in np.split(order, [1, 2, 40, 40 + 97]):
        pieces.partial_fit(X[rows], Y[rows])
    for ours, theirs in zip(
        pieces.predict(QUERIES, return_mass=True), whole.predict(QUERIES, return_mass=True), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(
    "options", [{}, {"feature_map": "favor+", "num_features": 64, "bandwidth": 1.0}, {"exact": True}]
)
def test_merging_partitions_is_learning_all(options):
    base = KernelSmoother(random_state=1, **options).prepare(X)
    whole = copy.deepcopy(base).partial_fit(X, Y)
    parts = [copy.deepcopy(base) for _ in range(4)]
    for part, rows in zip(parts[:3], np.split(np.arange(300), [10, 200]), strict=True):
        part.partial_fit(X[rows], Y[rows])  # and the fourth has seen nothing
    merged = copy.deepcopy(base)
    for part in parts:
        merged = merged.merge(pickle.loads(pickle.dumps(part)))
    np.testing.assert_allclose(merged.predict(QUERIES), whole.predict(QUERIES), rtol=1e-11, atol=1e-13)
    if merged.state_ is not None:
        assert merged.state_.tokens.item() == 300
        assert merged.state_.nbytes == whole.state_.nbytes


def test_the_state_does_not_grow():
    smoother = KernelSmoother(bandwidth=0.5).partial_fit(X, Y)
    before = smoother.state_.nbytes
    for _ in range(3):
        smoother.partial_fit(X, Y)
    assert smoother.state_.nbytes == before
    np.testing.assert_allclose(smoother.predict(QUERIES), KernelSmoother(bandwidth=0.5).fit(X, Y).predict(QUERIES))


def test_weights_count_rows():
    counts = rng.integers(0, 4, 300)
    weighted = KernelSmoother(bandwidth=0.5).prepare(X).partial_fit(X, Y, counts)
    repeated = KernelSmoother(bandwidth=0.5).prepare(X).partial_fit(X.repeat(counts, 0), Y.repeat(counts, 0))
    np.testing.assert_allclose(weighted.predict(QUERIES), repeated.predict(QUERIES), rtol=1e-10)
    tiny = KernelSmoother(bandwidth=0.5).prepare(X).partial_fit(X, Y, np.full(300, 1e-300))
    plain = KernelSmoother(bandwidth=0.5).prepare(X).partial_fit(X, Y)
    np.testing.assert_allclose(tiny.predict(QUERIES), plain.predict(QUERIES), rtol=1e-10)


def test_one_output_keeps_its_shape():
    flat = KernelSmoother(bandwidth=0.5).fit(X, Y[:, 0]).predict(QUERIES)
    column = KernelSmoother(bandwidth=0.5).fit(X, Y[:, :1]).predict(QUERIES)
    assert flat.shape == (50,)
    np.testing.assert_array_equal(column[:, 0], flat)


@pytest.mark.parametrize("name", ["auto", "favor+", "hyperbolic", "oprf", "sderf", "simplex"])
def test_positive_maps_average_however_far_from_the_data(name):
    smoother = KernelSmoother(name, bandwidth=100.0, random_state=0).fit(X * 100 + 1e6, Y[:, 0])
    far = np.array([[1e6 + 1e5, 1e6], [-1e6, 0.0], [1e20, -1e160], [1.7e308, -1.7e308]])
    value, mass = smoother.predict(np.vstack([far, X * 100 + 1e6]), return_mass=True)
    assert np.isfinite(value).all()
    assert value.min() >= Y[:, 0].min() - 1e-9
    assert value.max() <= Y[:, 0].max() + 1e-9
    assert mass[:4].max() == 0


def test_the_data_may_shift():
    here = KernelSmoother(bandwidth=0.5).fit(X, Y).predict(QUERIES)
    there = KernelSmoother(bandwidth=0.5).fit(X + 1e5, Y).predict(QUERIES + 1e5)
    np.testing.assert_allclose(there, here, rtol=1e-7, atol=1e-9)


def test_random_maps_come_closer_with_more_features():
    exact = KernelSmoother(bandwidth=1.0, exact=True).fit(X, Y).predict(QUERIES)

    def error(count):
        draws = [KernelSmoother("oprf", num_features=count, bandwidth=1.0, random_state=i) for i in range(5)]
        return np.sqrt(np.mean([np.square(s.fit(X, Y).predict(QUERIES) - exact).mean() for s in draws]))

    few, many = error(64), error(1024)
    assert many < few / 2
    assert many < 0.1


def test_the_map_may_be_given():
    smoother = KernelSmoother(lambda d: phistate.feature_map("taylor", head_dim=d, order=8, scale=1.0), bandwidth=3.0)
    exact = KernelSmoother(bandwidth=3.0, exact=True).fit(X, Y).predict(QUERIES)
    np.testing.assert_allclose(smoother.fit(X, Y).predict(QUERIES), exact, atol=1e-3)
    signed = KernelSmoother("rff", bandwidth=3.0, signed="allow", random_state=0).fit(X, Y)
    np.testing.assert_allclose(signed.predict(QUERIES), exact, atol=0.1)
    assert isinstance(KernelSmoother().fit(X, Y).feature_map_, Grid)
    assert type(
        KernelSmoother(num_features=64, bandwidth=1.0).fit(rng.random((20, 6)), np.arange(20)).feature_map_
    ) is (FavorPlusPlus)


def test_rows_beyond_the_grid_are_told():
    smoother = KernelSmoother(bandwidth=0.5).partial_fit(X, Y)
    with pytest.warns(UserWarning, match="X: 1 of 2 rows lie beyond what the grid was prepared for"):
        smoother.partial_fit([[0.0, 0.0], [9.0, 0.0]], Y[:2])


def test_clone_forgets_and_parameters_stay():
    smoother = KernelSmoother("favor+", num_features=8, bandwidth=[1.0, 2.0], random_state=0).fit(X, Y)
    assert clone(smoother).get_params() == smoother.get_params()
    assert clone(smoother).fit(X, Y).state_.fingerprint == smoother.state_.fingerprint
    with pytest.raises(NotFittedError):
        clone(smoother).predict(X)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"bandwidth": 0.0}, "bandwidth: got 0.0; takes 'scott' or positive"),
        ({"bandwidth": "silverman"}, "bandwidth: got 'silverman'; takes 'scott'"),
        ({"bandwidth": [1.0, 2.0, 3.0]}, "bandwidth: got .*; takes a finite number or 2, one a column"),
        ({"offset": [np.nan, 0.0]}, "offset: got .*; takes a finite number or 2"),
        ({"feature_map": "elu"}, "feature_map: got 'elu'; takes a function or one of auto, grid"),
        ({"feature_map": "rff"}, "feature_map: got TrigonometricFeatures, whose kernel can be negative"),
        ({"feature_map": "grid", "num_features": 9}, "num_features: got 9; feature_map='grid' takes at least"),
        ({"num_features": 0}, "num_features: got 0; takes an integer ≥ 1"),
        ({"signed": "yes"}, "signed: got 'yes'; takes 'refuse' or 'allow'"),
        ({"feature_map": lambda d: phistate.feature_map("elu", head_dim=d)}, "feature_map: got .*; takes head_dim = 2"),
    ],
)
def test_what_the_arguments_refuse(options, message):
    with pytest.raises(ValueError, match=message):
        KernelSmoother(**options).fit(X, Y)


def test_what_the_data_must_be():
    smoother = KernelSmoother(bandwidth=0.5, random_state=0).fit(X, Y)
    with pytest.raises(ValueError, match="NaN"):
        smoother.partial_fit([[np.nan, 0.0]], Y[:1])
    with pytest.raises(ValueError, match="NaN"):
        smoother.partial_fit(X[:1], [[np.nan, 0.0]])
    with pytest.raises(ValueError, match="NaN"):
        smoother.predict([[np.nan, 0.0]])
    with pytest.raises(ValueError, match="3 features, but KernelSmoother is expecting 2"):
        smoother.predict(np.zeros((1, 3)))
    with pytest.raises(ValueError, match=r"y: got outputs \[n\]; takes \[n,2\], as before"):
        smoother.partial_fit(X, Y[:, 0])
    with pytest.raises(ValueError, match=r"sample_weight: got -1.0 to 1.0; takes finite weights ≥ 0"):
        smoother.partial_fit(X[:2], Y[:2], [1.0, -1.0])
    with pytest.raises(ValueError, match=r"sample_weight: got shape \(3,\); takes \(2,\)"):
        smoother.partial_fit(X[:2], Y[:2], np.ones(3))
    with pytest.raises(ValueError, match="sample_weight: got zeros only"):
        KernelSmoother().fit(X, Y, np.zeros(300))
    with pytest.raises(NotFittedError):
        KernelSmoother().prepare(X).predict(X)


def test_what_cannot_be_merged():
    smoother = KernelSmoother(bandwidth=0.5).fit(X, Y)
    for other in (
        KernelSmoother(bandwidth=0.6).fit(X, Y),
        KernelSmoother(bandwidth=0.5, offset=0.0).fit(X, Y),
        KernelSmoother(bandwidth=0.5, exact=True).fit(X, Y),
        KernelSmoother("favor+", bandwidth=0.5).fit(X, Y),
    ):
        with pytest.raises(ValueError, match="other: got another offset, bandwidth or feature map"):
            smoother.merge(other)
    with pytest.raises(ValueError, match=r"other: got outputs \[n\]; takes \[n,2\]"):
        smoother.merge(KernelSmoother(bandwidth=0.5).fit(X, Y[:, 0]))
    with pytest.raises(TypeError, match="other: got str; takes a KernelSmoother"):
        smoother.merge("other")
    with pytest.raises(NotFittedError, match="got a merge before prepare"):
        smoother.merge(KernelSmoother())
    first, second = (KernelSmoother("favor+", bandwidth=0.5, random_state=seed).fit(X, Y) for seed in (0, 1))
    with pytest.raises(ValueError, match="other: got another"):
        first.merge(second)


def test_the_grid():
    with pytest.raises(ValueError, match="counts: got 1 values; takes head_dim = 2"):
        Grid(2, low=[0, 0], high=[1, 1], counts=[3])
    with pytest.raises(ValueError, match=r"high: got 0 over low = 1; takes finite edges"):
        Grid(1, low=[1], high=[0], counts=[3])
    with pytest.raises(ValueError, match=r"counts: got \[4096, 257\], which makes more features than 1048576"):
        Grid(2, low=[0, 0], high=[1, 1], counts=[4096, 257])
    assert Grid(2, low=[0, 0], high=[1, 2], counts=[3, 4]).num_features == 12
    assert Grid(1, low=[0], high=[1], counts=[3]).fingerprint != Grid(1, low=[0], high=[2], counts=[3]).fingerprint
