"""Random maps as what they claim to be: unbiased, of the variance their formula says, on Haar rows."""

import pytest
import torch

from phistate.features import FavorPlus, TrigonometricFeatures
from phistate.features.rows import draw_rows, simplex
from tests.features.cases import D, generator, vectors

DRAWS = 4000
PAIRS = [
    (vectors(3, seed=seed, size=size), vectors(3, seed=seed + 1, size=size))
    for seed, size in ((1, 0.2), (5, 0.4))
]

UNBIASED = {
    "favor+ independent": lambda: FavorPlus(D, num_features=6, orthogonal=False, generator=generator()),
    "favor+ orthogonal": lambda: FavorPlus(D, num_features=6, generator=generator()),
    "rff independent": lambda: TrigonometricFeatures(
        D, num_features=12, orthogonal=False, generator=generator()
    ),
    "rff orthogonal": lambda: TrigonometricFeatures(D, num_features=12, generator=generator()),
}


def ratios(phi, x, y, draws=DRAWS):
    """κ̂/κ for each draw and pair: ``[draws, pairs]``."""
    exact = (phi.scale * x * y).sum(-1).exp()
    source = generator(3)
    found = []
    for _ in range(draws):
        phi.redraw(source)
        found.append((phi.query(x) * phi.key(y)).sum(-1) / exact)
    return torch.stack(found)


def within(got, expected, spread, count, errors=4):
    """Whether the mean of ``count`` values of standard deviation ``spread`` is where it should be."""
    return ((got - expected).abs() <= errors * spread / count**0.5).all()


@pytest.mark.parametrize("case", UNBIASED)
def test_unbiased_with_the_variance_of_its_formula(case):
    phi = UNBIASED[case]()
    for x, y in PAIRS:
        found = ratios(phi, x, y)
        expected = phi.relative_variance(x, y)
        assert expected.shape == (3,)
        assert within(found.mean(0), 1.0, expected.sqrt(), DRAWS)
        squares = (found - 1).square()
        assert within(squares.mean(0), expected, squares.std(0), DRAWS)


def test_coupling_rows_lowers_the_variance():
    for x, y in PAIRS:
        for cls in (FavorPlus, TrigonometricFeatures):
            plain, coupled = (
                cls(D, num_features=8, orthogonal=o).relative_variance(x, y) for o in (False, True)
            )
            assert (coupled < plain).all()


def test_relative_variance_of_trigonometric_features_is_zero_on_the_diagonal():
    x = vectors(3)
    assert (TrigonometricFeatures(D, num_features=8).relative_variance(x, x) == 0).all()
    with pytest.raises(ValueError, match="y: got last dimension 3; takes head_dim = 4"):
        TrigonometricFeatures(D, num_features=8).relative_variance(x, x[:, :3])


@pytest.mark.parametrize("rows", ["independent", "orthogonal", "simplex"])
def test_each_row_is_a_standard_normal(rows):
    w = torch.stack([draw_rows(5, D, rows, g) for g in [generator()] for _ in range(DRAWS)])  # [draws, 5, D]
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
    source = generator()
    w = torch.stack([draw_rows(D, D, "orthogonal", source) for _ in range(DRAWS)])
    q = w / w.norm(dim=-1, keepdim=True)
    trace = q.diagonal(dim1=1, dim2=2).sum(-1)
    squared = (q @ q).diagonal(dim1=1, dim2=2).sum(-1)
    for sample, expected in ((trace, 0.0), (trace**2, 1.0), (trace**4, 3.0), (squared, 1.0)):
        assert within(sample.mean(), expected, sample.std(), DRAWS)


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
