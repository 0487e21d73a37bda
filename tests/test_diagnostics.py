"""The error algebra against brute force in float64, its identities, and its limits."""

import math

import pytest
import torch
from torch import Tensor

from phistate.diagnostics import (
    LogKernel,
    compare,
    effective_rank,
    evenly_spaced,
    inputs,
    predicted_variance,
    uniform_kernel,
    window_kernel,
)
from phistate.diagnostics.weights import log_product
from phistate.features.base import ExponentialFeatureMap, FeatureMap, Side


class Elu(FeatureMap):
    """elu(x) + 1 on both sides."""

    @property
    def num_features(self) -> int:
        return self.head_dim

    def features(self, x: Tensor, side: Side, positions: Tensor | None) -> Tensor:
        return torch.nn.functional.elu(x) + 1


class Signed(Elu):
    """The features themselves: κ̂ = scale · q·k, of either sign."""

    positive = False

    def features(self, x: Tensor, side: Side, positions: Tensor | None) -> Tensor:
        return x


class Positive(ExponentialFeatureMap):
    """Positive random features, i.i.d. Gaussian directions."""

    def __init__(self, head_dim: int, features: int, seed: int = 0) -> None:
        super().__init__(head_dim)
        generator = torch.Generator().manual_seed(seed)
        self.register_buffer("omega", torch.randn(features, head_dim, generator=generator, dtype=torch.float64))

    @property
    def num_features(self) -> int:
        return self.omega.shape[0]

    def log_features(self, x: Tensor, side: Side, positions: Tensor | None) -> Tensor:
        return x @ self.omega.T - x.square().sum(-1, keepdim=True) / 2 - math.log(self.num_features) / 2


class Sine(Elu):
    """A positional map: elu + 1, weighted by the key's and the query's position."""

    positional = True

    def features(self, x: Tensor, side: Side, positions: Tensor | None) -> Tensor:
        assert positions is not None
        wave = positions.to(x.dtype).sin() if side == "query" else positions.to(x.dtype).cos()
        return super().features(x, side, None) * (1.5 + wave)[..., None, None]


class PerHead(Elu):
    """A map that is another for each head, as a learned one may be."""

    def features(self, x: Tensor, side: Side, positions: Tensor | None) -> Tensor:
        return super().features(x, side, None) ** torch.arange(1, x.shape[-2] + 1)[:, None]


def sample(length: int = 23, heads: int = 4, kv_heads: int = 2, dim: int = 6, value: int = 5, spread: float = 1.0):
    generator = torch.Generator().manual_seed(7)
    q = torch.randn(2, length, heads, dim, generator=generator, dtype=torch.float64) * spread
    k = torch.randn(2, length, kv_heads, dim, generator=generator, dtype=torch.float64) * spread
    v = torch.randn(2, length, kv_heads, value, generator=generator, dtype=torch.float64)
    return q, k, v


def brute(q: Tensor, k: Tensor, v: Tensor, weights: Tensor, causal: bool) -> dict[str, Tensor]:
    """Every figure from the whole matrices, ε as written; weights ``[B,H,T,T]``, results ``[B,T,H]``."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    logits = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    mask = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool)
    mask = mask.tril() if causal else mask
    kappa = logits.exp() * mask
    weights = weights * mask
    p = kappa / kappa.sum(-1, keepdim=True)
    p_hat = weights / weights.sum(-1, keepdim=True)
    eps = torch.where(mask, weights / kappa - 1, 0.0)
    delta = (p * eps).sum(-1)
    values = v.transpose(1, 2)
    o, o_hat = p @ values, p_hat @ values
    log_ratio = torch.where(p > 0, (p / p_hat).log(), 0.0)
    kl = torch.where(((p_hat <= 0) & (p > 0)).any(-1), math.inf, (p * log_ratio).nan_to_num(0.0).sum(-1))
    return {
        "delta": delta,
        "spread": (p * (eps - delta[..., None]).square()).sum(-1).sqrt(),
        "output_error": (o_hat - o).norm(dim=-1) / o.norm(dim=-1),
        "total_variation": (p_hat - p).abs().sum(-1) / 2,
        "kl": kl,
        "entropy": -(p * p.clamp(min=1e-300).log()).sum(-1),
        "negative_share": (weights < 0).double().sum(-1) / mask.sum(-1),
        "denominator_ratio": weights.sum(-1) / weights.abs().sum(-1),
        "output_error_norm": (o_hat - o).norm(dim=-1),
        "output_norm": o.norm(dim=-1),
    }


def features(phi: FeatureMap, q: Tensor, k: Tensor) -> Tensor:
    at = torch.arange(q.shape[1]) if phi.positional else None
    group = q.shape[2] // k.shape[2]
    return torch.einsum("bihf,bjhf->bhij", phi.query(q, at), phi.key(k, at).repeat_interleave(group, 2))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "phi", [Elu(6), Signed(6), Positive(6, 32), Sine(6), PerHead(6)], ids=lambda phi: type(phi).__name__
)
def test_equals_brute_force(phi: FeatureMap, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_MIN_BLOCK", 5)  # several blocks, the last one short
    monkeypatch.setattr(inputs, "_BLOCK_ELEMENTS", 1)
    q, k, v = sample()
    got = compare(q, k, v, phi, causal=causal)
    for name, want in brute(q, k, v, features(phi, q, k), causal).items():
        torch.testing.assert_close(
            getattr(got, name), want.transpose(1, 2), rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize(
    "kernel,visible",
    [
        (uniform_kernel, lambda gap, j: torch.ones_like(gap, dtype=torch.bool)),
        (window_kernel(4, sinks=2), lambda gap, j: (gap < 4) | (j < 2)),
    ],
    ids=["uniform", "window"],
)
def test_baselines_equal_brute_force(kernel: LogKernel, visible) -> None:
    q, k, v = sample()
    at = torch.arange(q.shape[1])
    seen = visible(at[:, None] - at, at[None, :])
    kappa = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) * q.shape[-1] ** -0.5
    weights = (torch.ones_like(kappa) if kernel is uniform_kernel else kappa.exp()) * seen
    got = compare(q, k, v, kernel)
    for name, want in brute(q, k, v, weights, True).items():
        torch.testing.assert_close(
            getattr(got, name), want.transpose(1, 2), rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_window_algebra() -> None:
    """What a window drops is δ = −m, and sd_p(ε) = √(m(1−m)); KL is infinite from the first dropped key
    on."""
    q, k, v = sample()
    got = compare(q, k, v, window_kernel(4))
    m = -got.delta
    torch.testing.assert_close(got.spread, (m * (1 - m)).sqrt(), rtol=1e-12, atol=1e-8)
    assert got.kl[:, :4].abs().max() < 1e-12
    assert got.kl[:, 4:].isinf().all()


def test_identities() -> None:
    q, k, v = sample()
    got = compare(q, k, v, Elu(6))
    assert (got.output_error_norm <= got.relative_spread * 10 * v.norm(dim=-1).max()).all()
    # A common factor of the kernel moves δ alone.
    scaled = compare(q, k, v, lambda logits, i, j: logits + 3.0)
    torch.testing.assert_close(scaled.delta, torch.full_like(scaled.delta, math.expm1(3.0)))
    assert scaled.spread.max() < 1e-12 * math.exp(3)
    assert scaled.output_error.max() < 1e-13
    assert scaled.kl.max() < 1e-13
    assert (scaled.top1 == 1).all()


def test_tiny_errors_keep_their_digits() -> None:
    """ε of 1e-12 is seen as 1e-12: by subtraction of rounded kernels nothing of it would be left."""
    q, k, v = sample()
    tilt = torch.linspace(0, 1e-12, q.shape[1], dtype=torch.float64)
    got = compare(q, k, v, lambda logits, i, j: logits + tilt[j])
    logits = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) * q.shape[-1] ** -0.5
    p = logits.masked_fill(torch.ones(23, 23, dtype=torch.bool).triu(1), -math.inf).softmax(-1)
    want = (p @ tilt).transpose(1, 2)
    torch.testing.assert_close(got.delta, want, rtol=1e-2, atol=0)
    variance = (p @ tilt.square()) - (p @ tilt).square()
    torch.testing.assert_close(got.spread[:, 2:], variance.sqrt().transpose(1, 2)[:, 2:], rtol=2e-2, atol=0)


@pytest.mark.parametrize("phi", [Elu(6), Signed(6), Positive(6, 64)], ids=lambda phi: type(phi).__name__)
def test_huge_logits_are_finite(phi: FeatureMap) -> None:
    q, k, v = sample(spread=14.0)
    logits = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) * 6**-0.5
    assert logits.abs().max() > 200  # beyond anything float32 could exponentiate
    got = compare(q.float(), k.float(), v.float(), phi)
    for name in (
        "delta",
        "spread",
        "output_error",
        "total_variation",
        "entropy",
        "top1",
        "denominator_ratio",
    ):
        assert getattr(got, name).isfinite().all(), name
    assert not got.kl.isnan().any()
    if phi.positive:
        assert got.kl.isfinite().all()
        assert (got.total_variation <= 1 + 1e-12).all()


def test_exponential_pairs_below_float64_are_summed_in_logarithms() -> None:
    """One key 2000 nats heavier than the rest must not turn the others to zero."""
    log_q = torch.zeros(1, 2, 3, dtype=torch.float64)
    log_k = torch.tensor([[0.0, -1, -2], [-2000, -2001, -2002], [-900, -2500, -1100]], dtype=torch.float64)
    got = log_product(log_q, log_k)
    torch.testing.assert_close(got, (log_q[:, :, None] + log_k).logsumexp(-1), rtol=1e-14, atol=0)


def test_zero_denominator_is_a_zero_row() -> None:
    q, k, v = sample(length=3)
    got = compare(q, k, v, lambda logits, i, j: torch.full_like(logits, -math.inf))
    assert (got.delta + 1).abs().max() < 1e-15
    assert (got.output_error - 1).abs().max() < 1e-12
    assert (got.denominator_ratio == 0).all()
    assert got.kl.isinf().all()


def test_ties_share_the_top() -> None:
    q, k, v = sample()
    got = compare(q, k, v, uniform_kernel)
    torch.testing.assert_close(got.top1[0, :, 0], 1 / torch.arange(1, 24, dtype=torch.float64))


def test_long_sequence_by_blocks_equals_its_queries() -> None:
    """T = 32k: whole rows never meet; a sample of queries gives what the full pass gives for them."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2**15, 1, 4, generator=generator) for _ in range(3))
    at = evenly_spaced(2**15, 24)
    got = compare(q, k, v, Elu(4), queries=at)
    assert got.delta.shape == (1, 24, 1)
    one = int(at[10])
    short = compare(q[:, : one + 1], k[:, : one + 1], v[:, : one + 1], Elu(4), queries=torch.tensor([one]))
    for name in ("delta", "spread", "output_error", "kl", "entropy"):
        torch.testing.assert_close(getattr(got, name)[:, 10], getattr(short, name)[:, 0])


def test_effective_rank() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 16, 2, 4, generator=generator)
    k = torch.randn(1, 16, 1, 4, generator=generator)
    sharp = effective_rank(q, q[:, :, :1], scale=1e4)
    assert (sharp <= 16).all()
    logits = torch.einsum("bihd,bjhd->bhij", q.double(), k.double().repeat_interleave(2, 2)) / 2
    p = logits.masked_fill(torch.ones(16, 16, dtype=torch.bool).triu(1), -math.inf).softmax(-1)
    s = torch.linalg.svdvals(p)
    s = s / s.sum(-1, keepdim=True)
    torch.testing.assert_close(effective_rank(q, k), (-(s * s.log()).sum(-1)).exp())
    # Each query finds itself alone: the identity matrix, of full rank.
    eye = torch.eye(8)[None, :, None]
    assert effective_rank(eye, eye, scale=1e3).item() == pytest.approx(8)


@pytest.mark.parametrize("causal", [True, False])
def test_predicted_variance_is_what_draws_show(causal: bool) -> None:
    """E δ² over 600 draws of i.i.d. features within four standard errors of (pᵀGp − 1)/m, and the formula
    as written."""
    q, k, v = sample(length=5, heads=2, kv_heads=1, dim=3, spread=0.35)
    q, k, v = q[:1], k[:1], v[:1]
    predicted = predicted_variance(q, k, 8, causal=causal)
    x, y = q[0].transpose(0, 1) * 3**-0.25, k[0, :, 0] * 3**-0.25
    logits = x @ y.T
    if causal:
        logits = logits.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -math.inf)
    p = logits.softmax(-1)
    total = x[:, :, None] + y
    g = (total @ total.transpose(-1, -2)).exp()
    written = (torch.einsum("hij,hijl,hil->hi", p, g, p) - 1) / 8
    torch.testing.assert_close(predicted[0].T, written)
    squares = torch.stack([compare(q, k, v, Positive(3, 8, seed), causal=causal).delta.square() for seed in range(600)])
    error = squares.std(0) / 600**0.5
    assert ((squares.mean(0) - predicted).abs() < 4 * error).all()


def test_predicted_variance_of_huge_inputs_is_not_nan() -> None:
    q, k, _ = sample(spread=30.0)
    assert not predicted_variance(q, k, 64).isnan().any()


def test_evenly_spaced() -> None:
    assert evenly_spaced(3, 5).tolist() == [0, 1, 2]
    assert evenly_spaced(1000, 3)[-1] == 999


@pytest.mark.parametrize(
    "change,argument",
    [
        ({"q": torch.zeros(2, 3, 4)}, "q"),
        ({"k": torch.zeros(1, 3, 3, 4)}, "k"),
        ({"k": torch.zeros(1, 2, 2, 4)}, "k"),
        ({"v": torch.zeros(1, 3, 1, 4)}, "v"),
        ({"queries": torch.tensor([3])}, "queries"),
        ({"queries": torch.tensor([1, 0])}, "queries"),
        ({"queries": torch.tensor([0.5])}, "queries"),
    ],
)
def test_bad_input_names_the_argument(change: dict[str, Tensor], argument: str) -> None:
    good = {"q": torch.zeros(1, 3, 4, 4), "k": torch.zeros(1, 3, 2, 4), "v": torch.zeros(1, 3, 2, 4)}
    call = {**good, **change}
    with pytest.raises(ValueError, match=f"^{argument}: got"):
        compare(call["q"], call["k"], call["v"], uniform_kernel, queries=call.get("queries"))


def test_empty_and_bad_baselines() -> None:
    none = torch.zeros(1, 0, 1, 4)
    with pytest.raises(ValueError, match="T = 0"):
        compare(none, none, none, uniform_kernel)
    with pytest.raises(ValueError, match="window"):
        window_kernel(0)
    with pytest.raises(ValueError, match="sinks"):
        window_kernel(1, sinks=-1)
    with pytest.raises(ValueError, match="num_features"):
        predicted_variance(torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4), 0)
