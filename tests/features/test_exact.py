"""Maps that claim to be exact for the kernel they name, and the counts they claim."""

import math

import pytest
import torch

from phistate.features import CosFormer, Elu, Exp, Hedgehog, Polynomial, ReBased, Taylor, Uniform
from tests.features.cases import generator, vectors


def dots(x, y):
    return torch.einsum("thd,shd->hts", x, y)


def kernel(phi, x, y):
    return torch.einsum("thf,shf->hts", phi.query(x), phi.key(y))


@pytest.mark.parametrize("tokens", [5, 140])  # fewer and more vectors than where blocks take over
@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_polynomial(p, tokens):
    phi = Polynomial(4, p=p, scale=0.7)
    x, y = vectors(tokens, 2), vectors(tokens, 2, seed=1)
    assert phi.num_features == math.comb(4 + p - 1, p) == phi.query(x).shape[-1]
    torch.testing.assert_close(kernel(phi, x, y), (0.7 * dots(x, y)) ** p)


@pytest.mark.parametrize("tokens", [5, 140])
@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_taylor(order, tokens):
    phi = Taylor(4, order=order, scale=0.7)
    x, y = vectors(tokens, 2), vectors(tokens, 2, seed=1)
    assert phi.num_features == math.comb(4 + order, order) == phi.query(x).shape[-1]
    logits = 0.7 * dots(x, y)
    expected = sum(logits**n / math.factorial(n) for n in range(order + 1))
    torch.testing.assert_close(kernel(phi, x, y), expected)


def test_taylor_of_one_dimension():
    phi = Taylor(1, order=3, scale=1.0)
    x = torch.tensor([[2.0]], dtype=torch.float64)
    expected = torch.tensor([[1, 2, 4 / math.sqrt(2), 8 / math.sqrt(6)]], dtype=torch.float64)
    torch.testing.assert_close(phi.query(x), expected)


def test_taylor_order_2_is_at_least_a_half():
    x = vectors(200, 1, size=3)
    assert kernel(Taylor(4, order=2), x, x.flip(0)).min() >= 0.5


@pytest.mark.parametrize(
    "phi",
    [Taylor(3, order=4), Polynomial(3, p=1), Polynomial(3, p=2), Polynomial(3, p=4)],
    ids=lambda phi: phi.extra_repr(),
)
def test_blocks_and_table_are_the_same_map(phi):
    """Values, gradients, gradients of gradients, and under vmap, on both sides of where blocks take over."""
    x = torch.randn(2, 260, 1, 3, generator=generator(), dtype=torch.float64).requires_grad_()
    slope = torch.linspace(-1, 1, phi.num_features, dtype=torch.float64)

    def by_rows(x):
        return torch.cat([phi.query(rows) for rows in x.split(100, dim=1)], 1)

    def gradient(features, x):
        return torch.autograd.grad((features(x) * slope).sin().sum(), x, create_graph=True)[0]

    torch.testing.assert_close(phi.query(x), by_rows(x))
    torch.testing.assert_close(torch.func.vmap(phi.query)(x), by_rows(x))
    slow, fast = gradient(by_rows, x), gradient(phi.query, x)
    torch.testing.assert_close(fast, slow)
    torch.testing.assert_close(torch.autograd.grad((phi.query(x) * slope).sin().sum(), x)[0], slow)
    torch.testing.assert_close(torch.func.grad(lambda x: (phi.query(x) * slope).sin().sum())(x), slow)
    again = [torch.autograd.grad((first * x.detach().cos()).sum(), x)[0] for first in (fast, slow)]
    torch.testing.assert_close(*again)


def test_uniform_is_the_average():
    phi = Uniform(4)
    assert phi.num_features == 1
    assert (kernel(phi, vectors(3, 1), vectors(5, 1)) == 1).all()


def test_exp_features():
    x = vectors(3, 2)
    torch.testing.assert_close(Exp(4, scale=1.0).query(x), x.exp())
    softmax = Exp(4, scale=1.0, softmax=True).key(x)
    torch.testing.assert_close(softmax, torch.softmax(x, -1))


def test_elu():
    x = vectors(7, 2, size=3)
    torch.testing.assert_close(Elu(4, scale=1.0).query(x), torch.nn.functional.elu(x) + 1)
    at_zero = torch.zeros(1, 4, dtype=torch.float64, requires_grad=True)
    Elu(4, scale=1.0).query(at_zero).sum().backward()
    assert (at_zero.grad == 1).all()


def test_cosformer_kernel():
    phi = CosFormer(4, max_length=10, scale=1.0)
    x, y = vectors(1, 10, 2), vectors(1, 10, 2, seed=1)
    at = torch.arange(10)
    got = torch.einsum("bthf,bshf->hts", phi.query(x, at), phi.key(y, at))
    turn = torch.cos(math.pi * (at[:, None] - at[None, :]) / 20).double()
    torch.testing.assert_close(got, dots(x[0].relu(), y[0].relu()) * turn, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("positions", [[-1, 0], [0, 10]])
def test_cosformer_refuses_positions_out_of_range(positions):
    phi = CosFormer(4, max_length=10)
    with pytest.raises(ValueError, match=f"positions: got {positions[0]} to {positions[1]}; takes 0 to 9"):
        phi.key(vectors(1, 2, 1), torch.tensor(positions))


def test_hedgehog():
    phi = Hedgehog(4, scale=1.0).double()
    x = vectors(3, 2)
    expected = torch.cat((torch.softmax(x, -1), torch.softmax(-x, -1)), -1)
    torch.testing.assert_close(phi.query(x), expected)
    torch.testing.assert_close(phi.key(x), expected)


def test_hedgehog_with_weights_for_each_head():
    torch.manual_seed(0)
    phi = Hedgehog(4, scale=1.0, bias=True, query_heads=3, key_heads=1).double()
    torch.nn.init.normal_(phi.query_projection.weight)
    torch.nn.init.normal_(phi.query_projection.bias)
    x = vectors(2, 5, 3)
    for head in range(3):
        projected = x[:, :, head] @ phi.query_projection.weight[head].T + phi.query_projection.bias[head]
        expected = torch.cat((torch.softmax(projected, -1), torch.softmax(-projected, -1)), -1)
        torch.testing.assert_close(phi.query(x)[:, :, head], expected)
    with pytest.raises(ValueError, match=r"takes \[\.\.\.,H,D\] with query_heads = 3"):
        phi.query(x[:, :, :2])
    with pytest.raises(ValueError, match="with key_heads = 1"):
        phi.key(x)


def test_rebased_kernel():
    torch.manual_seed(0)
    phi = ReBased(4, scale=0.7, eps=1e-3).double()
    for parameter in phi.parameters():
        torch.nn.init.normal_(parameter)
    x, y = vectors(140, 2), vectors(140, 2, seed=1)

    def normal(z, gain, shift):
        centred = 0.7**0.5 * (z - z.mean(-1, keepdim=True))
        return gain * centred / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt() + shift

    logits = dots(normal(x, phi.query_gain, phi.query_shift), normal(y, phi.key_gain, phi.key_shift))
    assert phi.num_features == 10
    torch.testing.assert_close(kernel(phi, x, y), logits**2)
