"""The defects of public implementations, each a test that fails on the defect (the op has its own)."""

import math

import pytest
import torch

from phistate import linear_attention
from phistate.features import DPFP, CosFormer, Elu, Exp, FavorPlus, Taylor, TrigonometricFeatures, feature_map
from tests.features.cases import NAMES, RANDOM, generator, make, vectors


def many(name):
    """A random map of enough rows for several blocks."""
    return make(name, **({"sketch_size": 32} if name == "polysketch" else {"num_features": 64}))


def test_01_qr_without_the_sign_of_its_diagonal():
    phi = FavorPlus(16, num_features=16, generator=generator(), scale=1.0)
    x = torch.full((1, 16), 0.25, dtype=torch.float64)
    source = generator(1)
    found = []
    for _ in range(1000):
        phi.redraw(source)
        found.append((phi.query(x) * phi.key(x)).sum() / math.exp(1.0))
    error = (phi.relative_variance(x, x) / 1000).sqrt().item()
    assert abs(torch.stack(found).mean().item() - 1) < 4 * error < 0.24


def test_02_blocks_that_repeat_one_seed():
    for name in RANDOM:
        u = torch.nn.functional.normalize(many(name).directions, dim=-1)
        cosines = (u @ u.T).abs().fill_diagonal_(0)
        assert cosines.max() < 1 - 1e-6


def test_03_epsilon_added_to_features():
    phi = FavorPlus(64, num_features=32, generator=generator(), scale=1.0)
    x = torch.randn(50, 64, generator=generator(1), dtype=torch.float64) * 1.5
    log = x @ phi.directions.double().T - x.square().sum(-1, keepdim=True) / 2 - math.log(32) / 2
    assert log.max() < math.log(1e-4)
    torch.testing.assert_close(phi.key(x), log.exp(), rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_04_features_that_look_at_other_tokens(name):
    phi = make(name)
    x = vectors(2, 6, 3)
    at = torch.arange(6)
    changed = x.clone()
    changed[:, 3:] = 100.0
    for side in (phi.query, phi.key):
        torch.testing.assert_close(side(changed, at)[:, :3], side(x, at)[:, :3], rtol=1e-12, atol=0)


def test_05_taylor_features_counted_otherwise_than_emitted():
    for d in (1, 3, 16):
        phi = Taylor(d, order=2)
        emitted = phi.key(torch.zeros(1, d)).shape[-1]
        assert emitted == phi.num_features == 1 + d + d * (d + 1) // 2


def test_06_dpfp_whose_negative_half_is_minus_relu():
    x = torch.tensor([[2.0, -3.0, 1.0]])
    r = [2.0, 0.0, 1.0, 0.0, 3.0, 0.0]
    expected = [r[i] * r[(i + j) % 6] for j in (1, 2) for i in range(6)]
    phi = DPFP(3, nu=2, scale=1.0)
    torch.testing.assert_close(phi.key(x), torch.tensor([expected]))
    assert phi.query(-x).sum() > 0


def test_07_clamp_before_an_exponential():
    x = torch.tensor([[-2.0, -5.0]])
    torch.testing.assert_close(Elu(2, scale=1.0).query(x), x.exp())
    torch.testing.assert_close(Exp(2, scale=1.0).query(x), x.exp())


def test_09_signed_denominators():
    q = torch.randn(1, 5, 2, 4)
    phi = TrigonometricFeatures(4, num_features=8)
    with pytest.raises(ValueError, match="feature_map: got TrigonometricFeatures"):
        linear_attention(q, q, q, feature_map=phi, normalize=True)
    for name in ("polynomial", "taylor"):
        odd = feature_map(name, head_dim=4, **{"p" if name == "polynomial" else "order": 3})
        with pytest.raises(ValueError, match="feature_map: got"):
            linear_attention(q, q, q, feature_map=odd, normalize=True)


def test_10_elu_cancelling_in_bfloat16():
    x = torch.tensor([[-3.0, -8.0, -20.0, -50.0]], dtype=torch.bfloat16)
    phi = Elu(4, scale=1.0).query(x)
    torch.testing.assert_close(phi.double(), x.double().exp(), rtol=2**-8, atol=0)


def test_11_cosformer_length_that_follows_the_sequence():
    phi = CosFormer(4, max_length=100)
    x = vectors(1, 30, 2)
    whole = phi.key(x, torch.arange(30))
    pieces = [phi.key(x[:, a:b], torch.arange(a, b)) for a, b in ((0, 1), (1, 7), (7, 30))]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-12, atol=0)


def test_12_redrawing_by_itself_and_norms_that_do_not_vary():
    for name in RANDOM:
        phi = many(name)
        x = vectors(2, 3)
        first = phi.query(x)
        assert torch.equal(phi.train().query(x), phi.eval().query(x))
        assert torch.equal(phi.query(x), first)
        phi.redraw(generator(9))
        assert not torch.equal(phi.query(x), first)
        assert phi.directions.norm(dim=-1).std() > 0.3
