"""The smoother under odd weights and widths: the right answer, or a word that names what is wrong; never NaN."""

import copy
import warnings

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sklearn.exceptions import NotFittedError

import phistate
from phistate.smoother import KernelSmoother

rng = np.random.default_rng(0)
X = rng.standard_normal((100, 2))
Y = np.sin(2 * X[:, 0])
MAPS = ["grid", "favor+", "hyperbolic", "oprf", "rff", "sderf", "simplex", "exact"]
every_map = pytest.mark.parametrize("name", MAPS)


def smoother(name, **options):
    chosen = {"exact": True} if name == "exact" else {"feature_map": name, "signed": "allow", "random_state": 0}
    return KernelSmoother(**{**chosen, **options})


def told(call):
    """What a call gives, and the warnings it gave."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        return call(), [str(warning.message) for warning in caught]


def refusal(call):
    """The message of the error that a call raises; None where it raises none."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return None


# Weights


@every_map
def test_weights_of_zero_change_nothing(name):
    learned = smoother(name, bandwidth=1.5).fit(X, Y)
    before = learned.predict(X)
    np.testing.assert_array_equal(learned.partial_fit(X[:3] + 1e3, Y[:3], np.zeros(3)).predict(X), before)
    prepared = smoother(name, bandwidth=1.5).prepare(X).partial_fit(X[:3], np.ones((3, 2)), np.zeros(3))
    with pytest.raises(NotFittedError):
        prepared.predict(X)
    np.testing.assert_array_equal(prepared.partial_fit(X, Y).predict(X), before)


@every_map
@pytest.mark.parametrize("bandwidth", ["scott", 1.5])
@pytest.mark.parametrize("row", [1e16, 1e200, -1e308])
def test_rows_of_no_weight_are_no_rows(name, bandwidth, row):
    rows = np.vstack([[[row, row]], X * 0.3, [[0.0, row]]])
    weights, targets = np.r_[0.0, np.ones(100), 0.0], np.r_[1e308, Y, -1e308]
    options = {"bandwidth": bandwidth, "num_features": 4096}
    (ours, theirs), _ = told(
        lambda: (smoother(name, **options).fit(rows, targets, weights), smoother(name, **options).fit(X * 0.3, Y))
    )
    np.testing.assert_array_equal(ours.bandwidth_, theirs.bandwidth_)
    np.testing.assert_array_equal(ours.offset_, theirs.offset_)
    np.testing.assert_array_equal(ours.predict(X), theirs.predict(X))


@every_map
@pytest.mark.parametrize("weight", [5e-324, 1e-310, 1e-200, 1e150, 1e308, np.finfo(float).max])
def test_a_common_factor_of_the_weights_changes_the_mass_alone(name, weight):
    value, mass = smoother(name, bandwidth=1.5).fit(X, Y).predict(X, return_mass=True)
    ours, our_mass = smoother(name, bandwidth=1.5).fit(X, Y, np.full(100, weight)).predict(X, return_mass=True)
    np.testing.assert_allclose(ours, value, rtol=1e-9, atol=1e-11)
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(our_mass, mass * weight, rtol=1e-9, atol=1e-320)


def test_scott_counts_weights_beyond_float64():
    few = KernelSmoother(exact=True).fit(X, Y, np.full(100, 2.0**20)).bandwidth_
    many = KernelSmoother(exact=True).fit(X, Y, np.full(100, 2.0**1020)).bandwidth_  # whose sum is inf
    np.testing.assert_allclose(many, few * 2.0 ** (-1000 / 6), rtol=1e-12)
    value, mass = KernelSmoother(exact=True).fit(X, Y, np.full(100, 1e307)).predict(X, return_mass=True)
    np.testing.assert_array_equal(value, Y)
    np.testing.assert_allclose(mass, 1e307, rtol=1e-12)
    with pytest.raises(ValueError, match=r"bandwidth: got 'scott', here \[.*e-\d+ .*e-\d+\]; "):
        KernelSmoother(num_features=100).fit(X, Y, np.full(100, 1e307))


@pytest.mark.parametrize("size", [1e-322, 1e-200, 1e200, 1e300])
def test_scott_knows_columns_of_every_size(size):
    unit = KernelSmoother().fit(X, Y)
    ours = KernelSmoother().fit(X * size, Y)
    np.testing.assert_allclose(ours.bandwidth_, unit.bandwidth_ * size, rtol=0.1 if size < 1e-300 else 1e-12)
    assert np.sqrt(np.mean((ours.predict(X * size) - unit.predict(X)) ** 2)) < (0.1 if size < 1e-300 else 1e-9)


@pytest.mark.parametrize(
    "weight, message",
    [
        (2.0, r"got shape \(\); takes \(100,\), a weight a row"),
        ([1.0], r"got shape \(1,\); takes \(100,\)"),
        (np.ones((100, 1)), r"got shape \(100, 1\); takes \(100,\)"),
        ("balanced", r"got str; takes \(100,\) real numbers"),
        (["1"] * 100, r"got list; takes \(100,\) real numbers"),
        (np.full(100, 1j), r"got ndarray; takes \(100,\) real numbers"),
        ([[1.0], [1.0, 2.0]], r"got list; takes \(100,\) real numbers"),
        ([None] * 99 + ["a"], r"got list; takes \(100,\) real numbers"),
        ([np.nan] * 100, "got nan to nan; takes finite weights ≥ 0"),
        ([np.inf] * 100, "got inf to inf; takes finite weights ≥ 0"),
        ([-1.0] + [2.0] * 99, "got -1.0 to 2.0; takes finite weights ≥ 0"),
        ([0.0] * 100, "got zeros only; takes at least one positive weight to prepare on"),
    ],
)
def test_what_weights_must_be(weight, message):
    for call in (
        KernelSmoother().fit,
        KernelSmoother().partial_fit,
        lambda X, _, weight: KernelSmoother().prepare(X, weight),
    ):
        with pytest.raises(ValueError, match=f"^sample_weight: {message}"):
            call(X, Y, weight)


def test_targets_whose_sum_is_beyond_float64():
    with pytest.raises(ValueError, match=r"^y: got 1e\+308; takes at most 2e\+292"):
        KernelSmoother().fit(X, np.full(100, -1e308))
    np.testing.assert_allclose(
        KernelSmoother().fit(X, Y * 1e290).predict(X), KernelSmoother().fit(X, Y).predict(X) * 1e290
    )


# Widths


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from(MAPS),
    st.one_of(st.floats(-300, 300), st.floats(-6, 2)),
    st.one_of(st.floats(-300, 300), st.floats(-2, 2)),
    st.sampled_from([0.0, -320.0, 290.0, 308.2]),
)
@example("favor+", -5.0, -5.0, 0.0)
@example("hyperbolic", -5.0, -5.0, 0.0)
@example("simplex", -5.0, -5.0, 0.0)
@example("sderf", -300.0, -300.0, 0.0)
@example("oprf", -300.0, -300.0, 0.0)
@example("rff", -2.0, -2.0, 0.0)
@example("rff", -0.3, -0.3, 308.2)
@example("grid", -310.0, 0.0, 0.0)
@example("exact", -323.0, 0.0, 0.0)
def test_near_the_exact_answer_or_told(name, first, second, weight):
    """Over every width and weight: finite, and as near to the exact smoother as it says, or a word of the bandwidth."""
    bandwidth = 10.0 ** np.array([first, second])
    weights = 10.0 ** (weight - np.arange(100) % 3)
    ours, exact = (smoother(which, bandwidth=bandwidth, num_features=512) for which in (name, "exact"))
    refused, said = told(lambda: refusal(lambda: ours.fit(X, Y, weights)))
    if refused is not None:
        assert refused.startswith(("bandwidth: got", "num_features: got 512; feature_map='grid'"))
        return
    (value, mass), said_of_mass = told(lambda: ours.predict(X, return_mass=True))
    wanted, wanted_mass = exact.fit(X, Y, weights).predict(X, return_mass=True)
    assert np.isfinite(value).all()
    assert not np.isnan(mass).any()
    assert all(message.startswith("bandwidth: got") for message in said + said_of_mass)
    allowed = 0.0 if name == "exact" else ours.total_variation_
    assert np.abs(value - wanted).mean() <= allowed * np.ptp(Y) + 1e-9
    assert allowed < 0.5 or said
    if (wanted_mass > 1e-300).all() and np.isfinite(wanted_mass).all():  # else it has lost its digits
        off = np.sort(np.abs(mass / wanted_mass - 1))[49]
        assert off <= (1e-9 if name == "exact" else ours.delta_ + 1e-6)
    assert name == "exact" or ours.delta_ < 0.5 or said_of_mass


@pytest.mark.parametrize("bandwidth", [1e-320, 1e-300, 1e-160, 1e-100, 1e-5, [1e-5, 1.0], [1.0, 1e-300]])
@pytest.mark.parametrize("name", ["auto", *MAPS[:-1]])
def test_a_width_the_map_cannot_hold(name, bandwidth):
    rows = np.random.default_rng(0).standard_normal((1000, 2))
    learned = smoother(name, bandwidth=bandwidth)
    refused, _ = told(lambda: refusal(lambda: learned.fit(rows, np.sin(rows[:, 0]))))
    if refused is not None:
        assert refused.startswith("bandwidth: got")
        return
    # OPRF and SDERF spread their features over any range, so averages are of near rows; the mass is lost.
    assert name in ("auto", "oprf", "sderf")
    (value, _), said = told(lambda: learned.predict(rows, return_mass=True))
    assert np.sqrt(np.mean((value - np.sin(rows[:, 0])) ** 2)) < 0.2
    assert any("bandwidth: got" in message and "the mass of" in message for message in said)


def test_the_exact_smoother_has_no_least_width():
    for bandwidth in (1e-300, 1e-160, 1e-5):
        value, mass = KernelSmoother(exact=True, bandwidth=bandwidth).fit(X, Y).predict(X, return_mass=True)
        np.testing.assert_array_equal(value, Y)
        np.testing.assert_array_equal(mass, 1)


def test_random_fourier_features_know_no_largest_norm():
    rows = np.linspace(-1, 1, 1000)[:, None]
    target = np.sin(3 * rows[:, 0])
    exact = smoother("exact", bandwidth=0.02).fit(rows, target).predict(rows)
    ours = smoother("rff", num_features=8192, bandwidth=0.02).fit(rows, target)
    assert np.sqrt(np.mean((ours.predict(rows) - exact) ** 2)) < 0.1
    assert ours.total_variation_ < 0.3


def test_the_price_can_be_read():
    narrow, wide = (KernelSmoother("favor+", bandwidth=h, random_state=0).fit(X, Y) for h in (0.7, 3.0))
    assert 0.1 < narrow.total_variation_ < 0.5
    assert 0 < wide.total_variation_ < 0.01
    assert 0 < wide.delta_ < 0.1
    assert KernelSmoother(bandwidth=1.0).fit(X, Y).total_variation_ < 1e-6
    assert KernelSmoother(exact=True).fit(X, Y).total_variation_ is None
    assert KernelSmoother(exact=True).fit(X, Y).delta_ is None


def test_a_poor_map_is_told_where_it_was_asked_for():
    with pytest.warns(UserWarning, match=r"bandwidth: got 0.3; the weights of FavorPlus with 64 features") as caught:
        poor = KernelSmoother("favor+", num_features=64, bandwidth=0.3, random_state=0).fit(X, Y)
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match=r"bandwidth: got 0.3; the mass of FavorPlus with 64 features") as caught:
        poor.predict(X, return_mass=True)
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match="bandwidth: got 0.3"):
        copy.copy(poor).prepare(X)
    poor.predict(X)  # says nothing of a mass it is not asked for


def test_a_refusal_leaves_nothing_behind():
    learned = KernelSmoother("favor+", bandwidth=2.0, random_state=0).fit(X, Y)
    with pytest.raises(
        ValueError, match="takes less than 0.9, by a wider bandwidth, more features, feature_map='grid' or"
    ):
        learned.set_params(bandwidth=1e-5).fit(X, Y)
    with pytest.raises(NotFittedError):
        learned.predict(X)
    assert learned.set_params(bandwidth=2.0).partial_fit(X, Y).state_.tokens.item() == 100


def test_rows_far_beyond_what_a_random_map_was_prepared_for_are_told():
    far = np.array([[0.0, 0.0], [50.0, 0.0], [0.0, 1e100]])
    for name in ("favor+", "hyperbolic", "oprf", "sderf", "simplex"):
        learned = smoother(name, bandwidth=2.0).fit(X, Y)
        with pytest.warns(UserWarning, match="X: 2 of 3 rows lie beyond what .* was prepared for") as caught:
            learned.partial_fit(far, np.zeros(3))
        assert caught[0].filename == __file__
        assert np.isfinite(learned.predict(np.vstack([X, far]))).all()
    learned = smoother("rff", bandwidth=2.0).fit(X, Y).partial_fit(far[:2], np.zeros(2))  # whose kernel knows no place
    with pytest.warns(UserWarning, match="X: 1 of 3 rows lie beyond"):
        learned.partial_fit(far, np.zeros(3))
    learned = smoother("oprf", bandwidth=2.0).prepare(X).partial_fit(X[:1] + 2.5, [1.0])  # held all the same
    with pytest.raises(ValueError, match="bandwidth: got 1e-300; takes one at which"):
        smoother("exact", bandwidth=1e-300).fit(X, Y).partial_fit(far * 1e200, np.zeros(3))


def test_a_map_of_ones_own_is_held_to_the_same():
    def taylor(d):
        return phistate.feature_map("taylor", head_dim=d, order=4, scale=1.0)

    assert KernelSmoother(taylor, bandwidth=4.0).fit(X, Y).total_variation_ < 0.01
    with pytest.raises(ValueError, match="bandwidth: got 0.05; the weights of Taylor with 15 features"):
        KernelSmoother(taylor, bandwidth=0.05).fit(X, Y)


def test_no_argument_is_named_that_was_not_given():
    with pytest.raises(ValueError, match="feature_map: got 'simplex' for X of 1 column; takes at least 2"):
        KernelSmoother("simplex").fit(X[:, :1], Y)
    with pytest.raises(ValueError, match=r"offset: got \[1e\+20, 1e\+20\]; takes one nearer the rows"):
        KernelSmoother(offset=1e20, bandwidth=1.0).fit(X, Y)
    for bandwidth in (None, 1j, ["a", "b"], np.inf, [1.0, np.nan]):
        with pytest.raises(ValueError, match="bandwidth: got .*; takes a finite number or 2, one a column"):
            KernelSmoother(bandwidth=bandwidth).fit(X, Y)
