"""Random maps as what they claim to be: unbiased, of the variance their formula says, on Haar rows."""

import math

import numpy as np
import pytest
import torch

from phistate.features import (
    Centred,
    FavorPlus,
    FavorPlusPlus,
    FavorSharp,
    Hyperbolic,
    PolySketch,
    Simplex,
    TrigonometricFeatures,
)
from phistate.features.rows import draw_rows, simplex
from tests.features.cases import RANDOM, D, generator, make, sample, vectors

DRAWS = 20000
X = torch.cat([vectors(3, seed=1, size=0.2), vectors(3, seed=5, size=0.4)])
Y = torch.cat([vectors(3, seed=2, size=0.2), vectors(3, seed=6, size=0.4)])
"""Six pairs, half of them small, half as large as the tails of an exponential still let the draws judge."""

UNBIASED = {
    "favor+ independent": lambda: FavorPlus(D, num_features=6, orthogonal=False),
    "favor+ orthogonal": lambda: FavorPlus(D, num_features=6),
    "rff independent": lambda: TrigonometricFeatures(D, num_features=12, orthogonal=False),
    "rff orthogonal": lambda: TrigonometricFeatures(D, num_features=12),
    "hyperbolic independent": lambda: Hyperbolic(D, num_features=12, orthogonal=False),
    "hyperbolic orthogonal": lambda: Hyperbolic(D, num_features=12),
    "simplex": lambda: Simplex(D, num_features=6),
    "oprf independent": lambda: FavorPlusPlus(D, num_features=6, orthogonal=False).fit(*sample()),
    "oprf orthogonal": lambda: FavorPlusPlus(D, num_features=6).fit(*sample()),
    "oprf with a given": lambda: FavorPlusPlus(D, num_features=6, a=-0.3),
    "sderf independent": lambda: FavorSharp(D, num_features=6, orthogonal=False).fit(*sample()),
    "sderf fully balanced": lambda: FavorSharp(D, num_features=6, orthogonal=False, balance="full").fit(*sample()),
    "centred favor+": lambda: Centred(FavorPlus(D, num_features=6)).fit(*sample()),
    "centred oprf": lambda: Centred(FavorPlusPlus(D, num_features=6)).fit(*sample()),
}


class Pairs(torch.nn.Module):
    """κ̂ of the six pairs, as a function of the rows."""

    def __init__(self, phi):
        super().__init__()
        self.phi = phi
        self.drawn = phi.phi if isinstance(phi, Centred) else phi

    def forward(self):
        return (self.phi.query(X) * self.phi.key(Y)).sum(-1)


def estimates(phi):
    """κ̂ for each draw and pair, ``[draws, pairs]``, for rows drawn in one go, as fresh blocks are."""
    pairs = Pairs(phi)
    count, dim = pairs.drawn.directions.shape
    whole = -(-count // dim) * dim
    rows = draw_rows(DRAWS * whole, dim, pairs.drawn.rows, generator(3)).view(DRAWS, whole, dim)[:, :count]
    return torch.func.vmap(lambda w: torch.func.functional_call(pairs, {"drawn.directions": w}, ()))(rows)


def within(got, expected, spread, count, errors=4):
    """Whether the mean of ``count`` values of standard deviation ``spread`` is where it should be."""
    return ((got - expected).abs() <= errors * spread / count**0.5).all()


@pytest.mark.parametrize("case", UNBIASED)
def test_unbiased_with_the_variance_of_its_formula(case):
    phi = UNBIASED[case]()
    found = estimates(phi) / (phi.scale * X * Y).sum(-1).exp()
    expected = phi.relative_variance(X, Y)
    assert expected.shape == (6,)
    assert within(found.mean(0), 1.0, expected.sqrt(), DRAWS)
    squares = (found - 1).square()
    assert within(squares.mean(0), expected, squares.std(0), DRAWS)


def test_redraw_is_such_a_draw():
    for phi in (make(name) for name in RANDOM):
        phi.redraw(generator(3))
        expected = draw_rows(*phi.directions.shape, phi.rows, generator(3))
        torch.testing.assert_close(phi.directions, expected.float(), rtol=0, atol=0)


def test_sderf_with_orthogonal_rows_is_unbiased_and_below_its_formula():
    phi = FavorSharp(D, num_features=6).fit(*sample())
    found = estimates(phi) / (phi.scale * X * Y).sum(-1).exp()
    expected = phi.relative_variance(X, Y)
    assert within(found.mean(0), 1.0, expected.sqrt(), DRAWS)
    assert (found.var(0) < expected).all()


def test_polysketch_squares_an_unbiased_sketch():
    phi = PolySketch(D, sketch_size=12)
    exact = (phi.scale * X * Y).sum(-1) ** 2
    # φ = y⊗y cannot be negative, so the square root of κ̂ is |y_x·y_y|: the sketch itself is written out.
    rows = draw_rows(DRAWS * 24, D, "independent", generator(3)).view(DRAWS, 2, 12, D)
    a, b = (rows @ X.T).prod(1), (rows @ Y.T).prod(1)  # [draws, 12, pairs]
    inner = (a * b).mean(1) * phi.scale**2
    assert within(inner.mean(0), exact, inner.std(0), DRAWS)
    torch.testing.assert_close(estimates(phi), inner**2, rtol=1e-6, atol=0)


def test_polysketch_has_the_moments_of_its_formulas():
    """Against cubature, which is exact for polynomials, where draws would need more tail than they have."""
    x, y = torch.tensor([[0.8, 0.3], [1.0, 0.0]]), torch.tensor([[0.5, -0.2], [1.0, 1.0]])
    phi = PolySketch(2, sketch_size=4, scale=1.0)
    nodes, weights = (torch.from_numpy(part) for part in np.polynomial.hermite_e.hermegauss(9))
    weights = weights / weights.sum()
    grid, mass = torch.cartesian_prod(nodes, nodes), torch.cartesian_prod(weights, weights).prod(-1)
    product = (grid @ x.double().T) * (grid @ y.double().T)  # (g·x)(g·y): [81, pairs]
    z = [(mass @ product**n) ** 2 for n in range(5)]  # E Zⁿ
    two = [sum(math.comb(n, i) * z[i] * z[n - i] for i in range(n + 1)) for n in range(5)]
    four = [sum(math.comb(n, i) * two[i] * two[n - i] for i in range(n + 1)) for n in range(5)]
    second, fourth = four[2] / 4**2, four[4] / 4**4
    exact = (x * y).sum(-1).double() ** 4
    torch.testing.assert_close(phi.relative_bias(x, y), second / exact - 1)
    torch.testing.assert_close(phi.relative_variance(x, y), (fourth - second**2) / exact**2)


def test_variances_are_ordered_as_their_papers_say():
    """Of as many features, for every pair: simplex < orthogonal < independent, hyperbolic < FAVOR+."""
    independent = FavorPlus(D, num_features=8, orthogonal=False).relative_variance(X, Y)
    orthogonal = FavorPlus(D, num_features=8).relative_variance(X, Y)
    assert (orthogonal < independent).all()
    assert (Simplex(D, num_features=8).relative_variance(X, Y) < orthogonal).all()
    assert (Hyperbolic(D, num_features=8, orthogonal=False).relative_variance(X, Y) < independent).all()
    trigonometric = (TrigonometricFeatures(D, num_features=16, orthogonal=o) for o in (True, False))
    coupled, plain = (phi.relative_variance(X, Y) for phi in trigonometric)
    assert (coupled < plain).all()


def test_relative_variance_of_trigonometric_features_is_zero_on_the_diagonal():
    x = vectors(3)
    assert (TrigonometricFeatures(D, num_features=8).relative_variance(x, x) == 0).all()
    with pytest.raises(ValueError, match="y: got last dimension 3; takes head_dim = 4"):
        TrigonometricFeatures(D, num_features=8).relative_variance(x, x[:, :3])


@pytest.mark.parametrize("rows", ["independent", "orthogonal", "simplex"])
def test_each_row_is_a_standard_normal(rows):
    w = draw_rows(2 * D * DRAWS, D, rows, generator()).view(DRAWS, 2 * D, D)
    assert w.dtype == torch.float64
    assert within(w.mean(0), 0.0, 1.0, DRAWS)
    second = torch.einsum("nri,nrj->rij", w, w) / DRAWS
    assert within(second, torch.eye(D, dtype=torch.float64), 2**0.5, DRAWS)
    fourth = w.pow(4).mean(0)
    assert within(fourth, 3.0, 96**0.5, DRAWS)  # Var g⁴ = 105 − 9
    norms = w.square().sum(-1)  # chi²(D): mean D, variance 2D
    assert within(norms.mean(0), D, (2 * D) ** 0.5, DRAWS)
    assert within(norms.var(0), 2 * D, (12 * D * (D + 4)) ** 0.5, DRAWS)
    if rows != "independent":  # norms are drawn one by one
        assert within(torch.corrcoef(norms.T)[0, 1:], 0.0, 1.0, DRAWS)


@pytest.mark.parametrize(("rows", "product"), [("orthogonal", 0.0), ("simplex", -1 / (D - 1))])
def test_rows_of_a_block_have_their_gram_matrix_and_blocks_are_fresh(rows, product):
    w = draw_rows(3 * D - 1, D, rows, generator())
    u = w / w.norm(dim=-1, keepdim=True)
    gram = u @ u.T
    same = torch.arange(3 * D - 1) // D
    same = same[:, None] == same[None, :]
    inside = gram[same & ~torch.eye(3 * D - 1, dtype=torch.bool)]
    torch.testing.assert_close(inside, torch.full_like(inside, product))
    across = gram[~same]
    assert across.abs().max() < 1 - 1e-6  # no row comes twice
    assert (across - product).abs().min() > 1e-6  # and no block continues another


def test_rotations_are_haar():
    """Moments of the trace over O(D): E tr Q = 0, E tr² = 1, E tr⁴ = 3, E tr Q² = 1."""
    w = draw_rows(D * DRAWS, D, "orthogonal", generator()).view(DRAWS, D, D)
    q = w / w.norm(dim=-1, keepdim=True)
    trace = q.diagonal(dim1=1, dim2=2).sum(-1)
    squared = (q @ q).diagonal(dim1=1, dim2=2).sum(-1)
    for values, expected in ((trace, 0.0), (trace**2, 1.0), (trace**4, 3.0), (squared, 1.0)):
        assert within(values.mean(), expected, values.std(), DRAWS)


def test_simplex_vectors():
    for dim in (2, 3, 8):
        s = simplex(dim)
        expected = torch.full((dim, dim), -1 / (dim - 1), dtype=torch.float64).fill_diagonal_(1)
        torch.testing.assert_close(s @ s.T, expected)
        torch.testing.assert_close(s.sum(0), torch.zeros(dim, dtype=torch.float64), atol=1e-12, rtol=0)
    with pytest.raises(ValueError, match="head_dim: got 1; simplex rows take at least 2"):
        simplex(1)


def test_the_draw_is_kept_in_float32_and_used_in_the_input_precision():
    phi = FavorPlus(D, num_features=6, generator=generator())
    assert phi.directions.dtype == torch.float32
    x = vectors(3)
    w = phi.directions.double()
    expected = (x * phi.scale**0.5) @ w.T - phi.scale * x.square().sum(-1, keepdim=True) / 2
    torch.testing.assert_close(phi.log_query(x), expected - 0.5 * torch.tensor(6.0).double().log())


def test_default_generator():
    torch.manual_seed(5)
    first = FavorPlus(D, num_features=6).directions
    torch.manual_seed(5)
    assert torch.equal(first, FavorPlus(D, num_features=6).directions)
    assert not torch.equal(first, FavorPlus(D, num_features=6).directions)
