"""Maps that are fitted: what a fit makes of them, what it refuses, and that no state outlives it."""

import pytest
import torch

from phistate import linear_attention
from phistate.features import (
    Centred,
    Exp,
    FavorPlus,
    FavorPlusPlus,
    FavorSharp,
    FittedFeatureMap,
    Nystrom,
    Relu,
    feature_map,
)
from tests.features.cases import NAMES, OPTIONS, D, generator, make, sample, vectors

FITTED = [name for name in NAMES if isinstance(make(name), FittedFeatureMap)]


def unfitted(name, **options):
    return feature_map(name, head_dim=D, **OPTIONS[name], **options)


def centred(**options):
    return Centred(FavorPlus(D, num_features=6, generator=generator()), **options)


EVERY = {**{name: lambda name=name, **o: unfitted(name, **o) for name in FITTED}, "centred": centred}


@pytest.fixture(params=EVERY)
def build(request):
    return EVERY[request.param]


def test_refuses_a_call_before_fit(build):
    phi = build()
    assert not phi.is_fitted
    for side in (phi.query, phi.key):
        with pytest.raises(ValueError, match=r"got a call before fit; takes fit\(q, k\) first"):
            side(vectors(5, 3))
    assert phi.fit(*sample()) is phi
    assert phi.is_fitted
    assert phi.query(vectors(5, 3)).isfinite().all()


def test_refuses_what_cannot_be_fitted(build):
    phi = build(heads=2)
    q, k = sample()
    for name, at in (("q", 0), ("k", 1)):
        for bad, error, words in (
            (torch.where(vectors(2, 30, 6) > 1, torch.nan, q), ValueError, "got NaN or infinite values"),
            (q * torch.inf, ValueError, "got NaN or infinite values"),
            (q[..., :3], ValueError, r"got shape \(2, 30, 6, 3\)"),
            (q[:0], ValueError, r"got shape \(0, 30, 6, 4\)"),
            (q[0, 0, 0], ValueError, r"got shape \(4,\)"),
            (q[:, :, :5], ValueError, "got 5 heads; takes a multiple of heads = 2"),
            (q.long(), TypeError, "got dtype torch.int64"),
        ):
            pair = [q, k]
            pair[at] = bad
            with pytest.raises(error, match=f"{name}: {words}"):
                phi.fit(*pair)
    assert not phi.is_fitted


def test_sets_of_heads_are_fitted_and_used_one_by_one(build):
    q, k = sample()
    k = k[:, :, :2]  # grouped: three query heads to a key head
    torch.manual_seed(0)
    together = build(heads=2).fit(q, k)
    for head in range(2):
        torch.manual_seed(0)
        alone = build().fit(q[:, :, 3 * head : 3 * head + 3], k[:, :, head : head + 1])
        for group in range(3):
            at = 3 * head + group
            expected = alone.query(q[:, :, at : at + 1])
            torch.testing.assert_close(together.query(q)[:, :, at : at + 1], expected)
        torch.testing.assert_close(together.key(k)[:, :, head : head + 1], alone.key(k[:, :, head : head + 1]))
    with pytest.raises(ValueError, match="with H a multiple of heads = 2"):
        together.query(q[:, :, :3])


def test_state_dict_carries_the_fit(build):
    torch.manual_seed(0)
    phi = build(heads=2).fit(*sample())
    torch.manual_seed(1)
    other = build(heads=2)
    other.load_state_dict(phi.state_dict())
    assert other.is_fitted
    assert other.fingerprint == phi.fingerprint
    assert torch.equal(other.key(vectors(5, 2)), phi.key(vectors(5, 2)))


def test_a_state_does_not_outlive_a_fit(build):
    q, k = sample()
    phi = build().fit(q, k)
    before = phi.fingerprint
    half = {"feature_map": phi, "normalize": True, "signed": "allow", "return_state": True}
    _, state = linear_attention(q[:, :10], k[:, :10], k[:, :10], **half)
    linear_attention(q[:, 10:], k[:, 10:], k[:, 10:], initial_state=state, **half)
    phi.fit(q * 1.5, k - 0.3)
    assert phi.fingerprint != before
    with pytest.raises(ValueError, match="initial_state: got a state made with the feature map"):
        linear_attention(q[:, 10:], k[:, 10:], k[:, 10:], initial_state=state, **half)
    phi.fit(q, k)
    assert phi.fingerprint == before


def expected_log_second_moment(phi, q, k):
    """E log E κ̂₁² over independent pairs, what OPRF and SDERF minimise; κ̂₁ has one independent row."""
    x, y = q.reshape(-1, 1, D), k.reshape(1, -1, D)
    return (phi.relative_variance(x, y) * len(phi.directions)).log1p().mean()


def test_oprf_fit_is_the_best_a():
    q, k = sample()
    phi = FavorPlusPlus(D, num_features=4, orthogonal=False).fit(q, k)
    best = expected_log_second_moment(phi, q, k)
    for step in (0.8, 1.2):
        other = FavorPlusPlus(D, num_features=4, orthogonal=False, a=phi.a.item() * step)
        assert expected_log_second_moment(other, q, k) > best
    plain = FavorPlusPlus(D, num_features=4, orthogonal=False, a=0.0)
    assert expected_log_second_moment(plain, q, k) > best


def test_oprf_of_zero_is_favor_plus():
    phi, plain = (
        cls(D, num_features=6, generator=generator(), **o) for cls, o in ((FavorPlusPlus, {"a": 0.0}), (FavorPlus, {}))
    )
    x, y = vectors(5), vectors(5, seed=1)
    torch.testing.assert_close(phi.log_query(x), plain.log_query(x))
    torch.testing.assert_close(phi.relative_variance(x, y), plain.relative_variance(x, y))


def test_oprf_features_are_bounded():
    """Whatever the row: A < 0 damps the large ones."""
    phi = FavorPlusPlus(D, num_features=6, a=-0.5, scale=1.0)
    x = vectors(1)
    with torch.no_grad():
        phi.directions.mul_(100)
    assert (phi.log_query(x) < 0).all()


@pytest.mark.parametrize("balance", ["none", "diagonal", "full"])
def test_sderf_transforms_keep_the_dot_product_and_find_the_axes(balance):
    q, k = sample()
    phi = FavorSharp(D, num_features=4, balance=balance).fit(q, k)
    x, y = q.reshape(-1, D) * phi.scale**0.5, k.reshape(-1, D) * phi.scale**0.5
    tx, ty = x @ phi.query_transform[0].double().T, y @ phi.key_transform[0].double().T
    torch.testing.assert_close(tx @ ty.T, x @ y.T, atol=1e-5, rtol=1e-5)
    z = tx[:, None] + ty[None]
    moment = torch.einsum("abi,abj->ij", z, z) / z.shape[0] / z.shape[1]
    torch.testing.assert_close(moment, torch.diag(moment.diagonal()), atol=1e-5, rtol=0)
    # u² − (1+2λ)u − 2λ = 0, where the derivative of log((1+u)/2) − ½ log u + λ/u vanishes.
    u, lam = 1 - 8 * phi.spectrum[0].double(), moment.diagonal()
    torch.testing.assert_close(u.square(), (1 + 2 * lam) * u + 2 * lam, atol=1e-5, rtol=1e-5)


def test_balancing_lowers_what_it_minimises():
    q, k = sample()
    k = k @ torch.linalg.qr(torch.randn(D, D, generator=generator(), dtype=torch.float64))[0] * 1.5
    size, variance = {}, {}
    for balance in ("none", "diagonal", "full"):
        phi = FavorSharp(D, num_features=4, balance=balance).fit(q, k)
        tx, ty = q @ phi.query_transform[0].double().T, k @ phi.key_transform[0].double().T
        size[balance] = tx.square().sum(-1).mean() + ty.square().sum(-1).mean()
        variance[balance] = expected_log_second_moment(phi, q, k)
    assert size["full"] < size["diagonal"] < size["none"]
    oprf = FavorPlusPlus(D, num_features=4, orthogonal=False).fit(q, k)
    assert variance["full"] < variance["none"] < expected_log_second_moment(oprf, q, k)


def test_balances_of_degenerate_samples():
    q, k = sample()
    flat = q.clone()
    flat[..., 0] = 0
    phi = FavorSharp(D, num_features=4, balance="diagonal").fit(flat, k)
    assert phi.key(k).isfinite().all()
    with pytest.raises(ValueError, match=r"q: got vectors that do not span R\^D"):
        FavorSharp(D, num_features=4, balance="full").fit(flat, k)
    with pytest.raises(ValueError, match=r"k: got vectors that do not span R\^D"):
        FavorSharp(D, num_features=4, balance="full").fit(k, flat)


def test_centring_keeps_the_kernel():
    """Written out for φ = exp, whose kernel is Σ_i exp(x_i + y_i)."""
    q, k = sample()
    phi = Centred(Exp(D)).fit(q, k)
    x, y = (t[0, :, 0] * phi.scale**0.5 for t in (q, k))
    b, c = (t.reshape(-1, D).mean(0) * phi.scale**0.5 for t in (q, k))
    middle = (x[:, None] - b + y[None] - c).exp().sum(-1)
    whole = middle * (x @ c - b @ c).exp()[:, None] * (y @ b).exp()
    torch.testing.assert_close(phi.query(q[0, :, 0]) @ phi.key(k[0, :, 0]).T, whole, rtol=1e-5, atol=0)


def test_centring_removes_what_a_common_shift_costs():
    q, k = sample()
    plain = FavorPlus(D, num_features=6, generator=generator())
    here = Centred(FavorPlus(D, num_features=6, generator=generator())).fit(q, k)
    there = Centred(FavorPlus(D, num_features=6, generator=generator())).fit(q + 3, k + 3)
    torch.testing.assert_close(there.relative_variance(q + 3, k + 3), here.relative_variance(q, k), rtol=1e-4, atol=0)
    assert (plain.relative_variance(q + 3, k + 3) > 100 * there.relative_variance(q + 3, k + 3)).all()


def test_centring_fits_the_map_inside():
    q, k = sample()
    inner = FavorPlusPlus(D, num_features=6, generator=generator())
    Centred(inner).fit(q, k)
    assert inner.is_fitted
    q, k = (t - t.reshape(-1, D).mean(0) for t in (q, k))
    torch.testing.assert_close(inner.a, FavorPlusPlus(D).fit(q, k).a, rtol=1e-5, atol=0)


def test_centring_knows_its_map():
    prints = {
        Centred(FavorPlus(D, num_features=6, orthogonal=o, generator=generator(s))).fit(*sample()).fingerprint
        for o in (False, True)
        for s in (0, 1)
    }
    assert len(prints) == 4
    with pytest.raises(TypeError, match="phi: got Relu; takes an ExponentialFeatureMap"):
        Centred(Relu(D))
    with pytest.raises(TypeError, match="phi: got Exp; takes a random map"):
        Centred(Exp(D)).fit(*sample()).relative_variance(vectors(3), vectors(3))


def test_centred_gradients():
    phi = Centred(FavorPlusPlus(D, num_features=6, heads=2, generator=generator()), heads=2).fit(*sample())
    x = vectors(1, 3, 2).requires_grad_()
    for side in (phi.log_query, phi.log_key, phi.query, phi.key):
        torch.autograd.gradcheck(side, (x,))


def test_nystrom_is_exact_on_its_landmarks():
    q, k = sample()
    phi = Nystrom(D, num_features=8).fit(q, k)
    on = phi.landmarks[0].double() / phi.scale**0.5
    exact = (phi.scale * on @ k.reshape(-1, D).T).exp()
    torch.testing.assert_close(phi.query(on) @ phi.key(k.reshape(-1, D)).T, exact, rtol=1e-3, atol=0)
    torch.testing.assert_close(phi.query(k.reshape(-1, D)) @ phi.key(on).T, exact.T, rtol=1e-3, atol=0)


def test_nystrom_survives_landmarks_that_coincide():
    q, k = sample()
    phi = Nystrom(D, num_features=8).fit(q[:, :1].expand(-1, 30, -1, -1) * 0 + 1, k * 0 + 1)
    ones = torch.ones(1, D, dtype=torch.float64)
    torch.testing.assert_close((phi.query(ones) * phi.key(ones)).sum().log(), torch.tensor(D * phi.scale).double())


def test_nystrom_errs_less_with_more_landmarks():
    q, k = sample()
    exact = (D**-0.5 * torch.einsum("bthd,bshd->bhts", q, k)).exp()
    errors = []
    for size in (4, 16, 64):
        phi = Nystrom(D, num_features=size).fit(q, k)
        got = torch.einsum("bthf,bshf->bhts", phi.query(q), phi.key(k))
        errors.append((got / exact - 1).abs().mean())
    assert errors[0] > 4 * errors[1] > 16 * errors[2]
    with pytest.raises(ValueError, match="q, k: got 720 vectors a set of heads; takes at least num_features = 721"):
        Nystrom(D, num_features=721).fit(q, k)
