"""Maps that are fitted to queries and keys before they are used, and what fitting is made of."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Literal

import torch
from torch import Tensor

from phistate.features.base import MAX_FEATURES, ExponentialFeatureMap, FeatureMap, Side, check_count
from phistate.features.random import RandomFeatureMap, half_norm
from phistate.features.rows import Rows, pair_excess
from phistate.values import values

Balance = Literal["none", "diagonal", "full"]
"""How SDERF stretches queries against keys before it looks for axes."""


class FittedFeatureMap(FeatureMap):
    """A map with a part that is computed from sample queries and keys, once, before any state exists.

    A state made before a fit (or a second fit) is refused by ``linear_attention``, because the map's
    fingerprint has changed. What is fitted lies in buffers, so a state dict carries it.

    A subclass calls ``_await_fit`` in its constructor and ``_check_fitted`` where it computes features.
    """

    heads: int | None
    fitted: Tensor

    @abstractmethod
    def _fit(self, x: Tensor, y: Tensor) -> None:
        """Fill the buffers from scaled float64 queries ``[...,Hq,D]`` and keys ``[...,Hk,D]``."""

    def fit(self, q: Tensor, k: Tensor) -> FittedFeatureMap:
        """Fit the map to sample queries and keys, which need not be paired or equally many; returns the map.

        Args:
            q: queries ``[...,Hq,D]``.
            k: keys ``[...,Hk,D]``. With ``heads`` set, it divides Hq and Hk, and head h belongs to set h //
                (H / heads).

        Raises:
            ValueError: another last dimension than D, no vectors, heads that do not divide, NaN or infinite
                values.
            TypeError: a dtype that is not floating.
        """
        with torch.no_grad():
            self._fit_scaled(self._sample("q", q), self._sample("k", k))
        return self

    @property
    def is_fitted(self) -> bool:
        """Whether the map can be used."""
        return bool(self.fitted)

    def _await_fit(self, heads: int | None) -> None:
        self.heads = None if heads is None else check_count("heads", heads)
        self.register_buffer("fitted", torch.tensor(False))

    @property
    def _sets(self) -> int:
        return 1 if self.heads is None else self.heads

    def _fit_scaled(self, x: Tensor, y: Tensor) -> None:
        self._fit(x, y)
        self.fitted.fill_(True)

    def _sample(self, name: str, given: Tensor) -> Tensor:
        if not given.is_floating_point():
            raise TypeError(f"{name}: got dtype {given.dtype}; takes a floating one")
        if given.ndim < 2 or given.shape[-1] != self.head_dim or not given.numel():
            raise ValueError(f"{name}: got shape {tuple(given.shape)}; takes [...,H,D], not empty, D = {self.head_dim}")
        if given.shape[-2] % self._sets:
            raise ValueError(f"{name}: got {given.shape[-2]} heads; takes a multiple of heads = {self.heads}")
        if not given.isfinite().all():
            raise ValueError(f"{name}: got NaN or infinite values; takes finite ones")
        return given.double() * math.sqrt(self.scale)

    def _check_fitted(self) -> None:
        # A value that is read breaks a compiled graph; eager calls check, compiled ones were eager once.
        read = values(self.fitted)
        if read is not None and not read:
            raise ValueError(f"{type(self).__name__}: got a call before fit; takes fit(q, k) first")


class FavorPlusPlus(FittedFeatureMap, RandomFeatureMap, ExponentialFeatureMap):
    """Optimal positive random features (OPRF, FAVOR++): FAVOR+ damped so that every feature is bounded.

    φ(x) = m^-½ (1−4A)^{D/4} exp(A‖ω‖² + √(1−4A) ω·x − ‖x‖²/2) is unbiased, with a finite variance for A <
    1/8. With u = 1 − 8A the relative variance for independent rows is [((1+u)/2)^D u^{−D/2} exp(‖x+y‖²/u) −
    1]/m. ``fit`` takes the A that is best for r = E‖x+y‖²: u = [(D+2r) + √((D+2r)² + 8Dr)] / 2D, so A ≤ 0,
    and A = 0 (which is FAVOR+) only for r = 0.

    Args:
        head_dim: D.
        num_features: F = m.
        a: A < 1/8 for every head; None: fitted.
        heads: None: one A for all heads; n: one for each of n sets of heads (usually the key heads).
        orthogonal: rows orthogonal within blocks of D; else independent.
        generator: where the rows are drawn from; None: torch's default generator.
        scale: softmax scale, None: D ** -0.5.

    Raises:
        ValueError: ``num_features`` below 1 or above 2²⁰, ``a`` not below 1/8, a call before ``fit`` when ``a`` was not
            given.

    Paper: Likhosherstov et al. 2022, arXiv:2205.15317.

    Example:
        >>> import torch
        >>> q, k = torch.randn(2, 1, 100, 1, 8, generator=torch.Generator().manual_seed(0))
        >>> phi = FavorPlusPlus(8, num_features=16).fit(q, k)
        >>> bool(phi.a < 0)
        True
    """

    a: Tensor

    def __init__(
        self,
        head_dim: int,
        *,
        num_features: int = 256,
        a: float | None = None,
        heads: int | None = None,
        orthogonal: bool = True,
        generator: torch.Generator | None = None,
        scale: float | None = None,
    ) -> None:
        rows: Rows = "orthogonal" if orthogonal else "independent"
        super().__init__(head_dim, check_count("num_features", num_features, most=MAX_FEATURES), rows, generator, scale)
        if a is not None and not -math.inf < a < 0.125:
            raise ValueError(f"a: got {a}; takes a finite number below 1/8 or None")
        self._await_fit(heads)
        self.register_buffer("a", torch.full((self._sets,), math.nan if a is None else a))
        self.fitted.fill_(a is not None)

    @property
    def num_features(self) -> int:
        """F = m."""
        return len(self.directions)

    def log_features(self, x: Tensor, side: Side, positions: Tensor | None) -> Tensor:
        """√(1−4A) Ωx + A‖ω‖² − ‖x‖²/2 + (D/4) log(1−4A) − ½ log m."""
        self._check_fitted()
        w = self.directions.to(x.dtype)
        a = per_head(self.a.to(x.dtype).unsqueeze(-1), x)
        damped = (-4 * a).log1p()
        constant = damped * (self.head_dim / 4) - math.log(self.num_features) / 2
        log = (x * (damped / 2).exp()) @ w.mT
        return log.add_(a * w.square().sum(-1)).add_(half_norm(x) + constant)

    def _fit(self, x: Tensor, y: Tensor) -> None:
        x, y = by_set(x, self._sets), by_set(y, self._sets)
        # E‖x+y‖² over independent pairs.
        r = x.square().sum(-1).mean(-1) + y.square().sum(-1).mean(-1) + 2 * (x.mean(1) * y.mean(1)).sum(-1)
        d = self.head_dim
        u = (d + 2 * r + ((d + 2 * r).square() + 8 * d * r).sqrt()) / (2 * d)
        self.a.copy_((1 - u) / 8)

    def _relative_variance(self, x: Tensor, y: Tensor) -> Tensor:
        self._check_fitted()
        squared = (x + y).square().sum(-1)
        u = 1 - 8 * per_head(self.a.double().unsqueeze(-1), x).squeeze(-1)
        own = (self.head_dim * (((1 + u) / 2).log() - u.log() / 2) + squared / u).expm1()
        # A tilts the norms of the rows, not their directions: what two of them share is what it is for
        # FAVOR+.
        return self._of_mean(own, pair_excess(squared, self.head_dim, self.rows))

    def extra_repr(self) -> str:
        """The base's settings and the sets of heads."""
        return f"{super().extra_repr()}, heads={self.heads}"


class FavorSharp(FittedFeatureMap, RandomFeatureMap, ExponentialFeatureMap):
    """Symmetric dense-exponential random features (SDERF, FAVOR#): a damping for each main axis of x + y.

    With x̃ = QᵀPx for queries and ỹ = QᵀP^{-ᵀ}y for keys (so that x̃·ỹ = x·y),
    φ(x) = m^-½ ∏_l (1−4A_l)^¼ exp(Σ_l [A_l ω_l² + √(1−4A_l) ω_l x̃_l] − ‖x̃‖²/2). Q holds the eigenvectors of
    E (Px + P^{-ᵀ}y)(Px + P^{-ᵀ}y)ᵀ over independent pairs, λ_l its eigenvalues and
    A_l = (1 − 2λ_l − √((2λ_l+1)² + 8λ_l))/16. P balances queries against keys: it minimises E‖Px + P^{-ᵀ}y‖².

    With u_l = 1 − 8A_l the relative variance for independent rows is
    [∏_l (1+u_l)/2 · u_l^-½ · exp((x̃+ỹ)_l²/u_l) − 1]/m; ``relative_variance`` gives it for orthogonal rows
    too, where no closed form is known and draws lie a little below it.

    Args:
        head_dim: D.
        num_features: F = m.
        balance: P; ``"none"``: identity; ``"diagonal"``: P_l = (E y_l² / E x_l²)^¼ (1 where either is 0);
            ``"full"``: the symmetric square root of the geometric mean of (E xxᵀ)⁻¹ and E yyᵀ, which takes
            samples that span R^D.
        heads: None: one fit for all heads; n: one for each of n sets of heads (usually the key heads).
        orthogonal: rows orthogonal within blocks of D; else independent.
        generator: where the rows are drawn from; None: torch's default generator.
        scale: softmax scale, None: D ** -0.5.

    Raises:
        ValueError: ``num_features`` below 1 or above 2²⁰, an unknown ``balance``, a call before ``fit``.

    Paper: Likhosherstov et al. 2023, arXiv:2302.00787.

    Example:
        >>> import torch
        >>> q, k = torch.randn(2, 1, 100, 1, 8, generator=torch.Generator().manual_seed(0))
        >>> phi = FavorSharp(8, num_features=16, balance="full").fit(q, k)
        >>> phi.key(k).shape
        torch.Size([1, 100, 1, 16])
    """

    spectrum: Tensor
    query_transform: Tensor
    key_transform: Tensor

    def __init__(
        self,
        head_dim: int,
        *,
        num_features: int = 256,
        balance: Balance = "diagonal",
        heads: int | None = None,
        orthogonal: bool = True,
        generator: torch.Generator | None = None,
        scale: float | None = None,
    ) -> None:
        rows: Rows = "orthogonal" if orthogonal else "independent"
        super().__init__(head_dim, check_count("num_features", num_features, most=MAX_FEATURES), rows, generator, scale)
        if balance not in ("none", "diagonal", "full"):
            raise ValueError(f"balance: got {balance!r}; takes 'none', 'diagonal' or 'full'")
        self.balance = balance
        self._await_fit(heads)
        self.register_buffer("spectrum", torch.full((self._sets, head_dim), math.nan))
        self.register_buffer("query_transform", torch.full((self._sets, head_dim, head_dim), math.nan))
        self.register_buffer("key_transform", torch.full((self._sets, head_dim, head_dim), math.nan))

    @property
    def num_features(self) -> int:
        """F = m."""
        return len(self.directions)

    def log_features(self, x: Tensor, side: Side, positions: Tensor | None) -> Tensor:
        """Σ_l [A_l ω_l² + √(1−4A_l) ω_l x̃_l] − ‖x̃‖²/2 + ¼ Σ_l log(1−4A_l) − ½ log m."""
        self._check_fitted()
        w = self.directions.to(x.dtype)
        a = self.spectrum.to(x.dtype)
        damped = (-4 * a).log1p()
        constant = damped.sum(-1, keepdim=True) / 4 - math.log(self.num_features) / 2
        x = headwise(x, self.query_transform if side == "query" else self.key_transform)
        log = (x * per_head((damped / 2).exp(), x)) @ w.mT
        return log.add_(per_head(a @ w.square().mT, x)).add_(half_norm(x) + per_head(constant, x))

    def _fit(self, x: Tensor, y: Tensor) -> None:
        x, y = by_set(x, self._sets), by_set(y, self._sets)
        stretch = _balance(_second_moment(x), _second_moment(y), self.balance)
        shrink = torch.linalg.inv(stretch).mT
        x, y = x @ stretch.mT, y @ shrink.mT
        cross = x.mean(1).unsqueeze(-1) * y.mean(1).unsqueeze(-2)
        values, axes = torch.linalg.eigh(_second_moment(x) + _second_moment(y) + cross + cross.mT)
        values = values.clamp(min=0)  # of a positive semidefinite matrix: what is below is rounding
        self.spectrum.copy_((1 - 2 * values - ((2 * values + 1).square() + 8 * values).sqrt()) / 16)
        self.query_transform.copy_(axes.mT @ stretch)
        self.key_transform.copy_(axes.mT @ shrink)

    def _relative_variance(self, x: Tensor, y: Tensor) -> Tensor:
        self._check_fitted()
        z = headwise(x, self.query_transform) + headwise(y, self.key_transform)
        u = 1 - 8 * per_head(self.spectrum.double(), z)
        own = (((1 + u) / 2).log() - u.log() / 2 + z.square() / u).sum(-1).expm1()
        return own / len(self.directions)

    def extra_repr(self) -> str:
        """The base's settings, the balance and the sets of heads."""
        return f"{super().extra_repr()}, balance={self.balance}, heads={self.heads}"


def by_set(x: Tensor, sets: int) -> Tensor:
    """Vectors ``[...,H,D]`` by the set their head belongs to: ``[sets, N, D]``."""
    x = x.reshape(-1, sets, x.shape[-2] // sets, x.shape[-1])
    return x.transpose(0, 1).reshape(sets, -1, x.shape[-1])


def per_head(parameter: Tensor, x: Tensor) -> Tensor:
    """A parameter ``[sets,...]`` to go with x ``[...,H,D]``: ``[...]`` if one set, else ``[H,...]``."""
    sets = len(parameter)
    if sets == 1:
        return parameter[0]
    if x.ndim < 2 or x.shape[-2] % sets:
        raise ValueError(f"x: got shape {tuple(x.shape)}; takes [...,H,D] with H a multiple of heads = {sets}")
    return parameter.repeat_interleave(x.shape[-2] // sets, dim=0)


def headwise(x: Tensor, matrix: Tensor) -> Tensor:
    """Each head's x ``[...,H,D]`` times its set's matrix ``[sets,D,D]``."""
    matrix = per_head(matrix.to(x.dtype), x)
    return x @ matrix.mT if matrix.ndim == 2 else torch.einsum("...hi,hoi->...ho", x, matrix)


def _second_moment(x: Tensor) -> Tensor:
    return x.mT @ x / x.shape[1]


def _balance(xx: Tensor, yy: Tensor, balance: Balance) -> Tensor:
    """P ``[sets,D,D]``, symmetric, that minimises E‖Px + P^{-ᵀ}y‖² among the matrices ``balance`` allows."""
    if balance == "none":
        return torch.eye(xx.shape[-1], dtype=xx.dtype, device=xx.device).expand_as(xx)
    if balance == "diagonal":
        of_x, of_y = xx.diagonal(dim1=-2, dim2=-1), yy.diagonal(dim1=-2, dim2=-1)
        return torch.diag_embed(torch.where((of_x > 0) & (of_y > 0), of_y / of_x, 1.0) ** 0.25)
    for name, moment in (("q", xx), ("k", yy)):
        values = torch.linalg.eigvalsh(moment)
        if (values[..., 0] <= values[..., -1] * moment.shape[-1] * torch.finfo(moment.dtype).eps).any():
            raise ValueError(f"{name}: got vectors that do not span R^D; balance='full' takes some that do")
    # S = PᵀP solves S·E[xxᵀ]·S = E[yyᵀ]: the geometric mean of E[xxᵀ]⁻¹ and E[yyᵀ].
    root = _power(xx, 0.5)
    inverse = _power(xx, -0.5)
    return _power(inverse @ _power(root @ yy @ root, 0.5) @ inverse, 0.5)


def _power(matrix: Tensor, exponent: float) -> Tensor:
    """A power of a symmetric positive definite matrix."""
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.unsqueeze(-2) ** exponent) @ vectors.mT
