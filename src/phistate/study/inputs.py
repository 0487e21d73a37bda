"""What is attended with: queries, keys and values, drawn or captured."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Inputs:
    """One layer's attention, and a second sample for maps that are fitted.

    ``q [1,T,Hq,D]``, ``k [1,T,Hk,D]``, ``v [1,T,Hk,V]`` in float32; ``fit_q``, ``fit_k`` are of other tokens.
    """

    source: str
    q: Tensor
    k: Tensor
    v: Tensor
    fit_q: Tensor
    fit_k: Tensor
    scale: float

    @property
    def length(self) -> int:
        """T."""
        return self.q.shape[1]

    @property
    def head_dim(self) -> int:
        """D."""
        return self.q.shape[-1]

    @property
    def logit_std(self) -> float:
        """Standard deviation of scale · q·k over all pairs of a query and a key of its head."""
        groups = self.q.shape[2] // self.k.shape[2]
        total, square, count = 0.0, 0.0, 0
        for head in range(self.k.shape[2]):
            q = self.q[0, :, head * groups : (head + 1) * groups].double().flatten(0, 1)
            k = self.k[0, :, head].double()
            # Σ_ij (q_i·k_j)² = tr(QᵀQ KᵀK), so the pairs need not be formed.
            total += float(q.sum(0) @ k.sum(0)) * self.scale
            square += float(((q.mT @ q) * (k.mT @ k)).sum()) * self.scale**2
            count += len(q) * len(k)
        return math.sqrt(max(square / count - (total / count) ** 2, 0.0))


def gaussian(*, length: int, head_dim: int, logit_std: float, heads: int = 2, seed: int = 0) -> Inputs:
    """Independent q, k ~ N(0, σ² I) whose logits q·k/√D have standard deviation σ² = ``logit_std``, and v ~ N(0, I).

    The expected squared norm of a query is D · ``logit_std``. All lengths and deviations share one draw of directions.

    Args:
        length: T.
        head_dim: D, of values too.
        logit_std: σ².
        heads: independent repetitions.
        seed: of the draw.

    Raises:
        ValueError: a count below 1, or a deviation that is not positive and finite.

    Example:
        >>> inputs = gaussian(length=512, head_dim=16, logit_std=2.0)
        >>> inputs.q.shape, abs(inputs.logit_std - 2) < 0.1
        (torch.Size([1, 512, 2, 16]), True)
    """
    for name, count in (("length", length), ("head_dim", head_dim), ("heads", heads)):
        if count < 1:
            raise ValueError(f"{name}: got {count}; takes an integer ≥ 1")
    if not (logit_std > 0 and math.isfinite(logit_std)):
        raise ValueError(f"logit_std: got {logit_std}; takes a positive finite number")
    generator = torch.Generator().manual_seed(seed)
    v, q, k, fit_q, fit_k = torch.randn(5, 1, length, heads, head_dim, generator=generator).unbind()
    q, k, fit_q, fit_k = (x * math.sqrt(logit_std) for x in (q, k, fit_q, fit_k))
    return Inputs("Gaussian", q, k, v, fit_q, fit_k, head_dim**-0.5)
