"""A candidate's weights log|κ̂| on pairs of queries and keys, however small."""

from __future__ import annotations

import torch
from torch import Tensor

from phistate.diagnostics.kernels import LogKernel
from phistate.features.base import ExponentialFeatureMap, FeatureMap

_PAIRS_AT_ONCE = 2**22  # exact log-sum-exp of underflowed pairs: 32 MB of float64


class Weights:
    """log|κ̂| and sign of a candidate, a block of queries at a time; the keys' features are made once."""

    def __init__(self, candidate: FeatureMap | LogKernel, k: Tensor) -> None:
        self.candidate = candidate
        self.phi_k: Tensor | None = None
        if isinstance(candidate, FeatureMap):
            side = candidate.log_key if isinstance(candidate, ExponentialFeatureMap) else candidate.key
            at = torch.arange(k.shape[1], device=k.device) if candidate.positional else None
            self.phi_k = side(k.transpose(0, 1)[None], at)[0].transpose(0, 1)

    def queries(self, rows: Tensor, at: Tensor) -> Tensor | None:
        """Features (or their logarithms) of a block of queries: ``[Q,Hq,D] -> [Hk,G,Q,F]``."""
        if self.phi_k is None:
            return None
        assert isinstance(self.candidate, FeatureMap)
        side = self.candidate.log_query if isinstance(self.candidate, ExponentialFeatureMap) else self.candidate.query
        phi_q = side(rows[None], at if self.candidate.positional else None)[0]
        return phi_q.transpose(0, 1).unflatten(0, (self.phi_k.shape[0], -1))

    def of(
        self, head: int, phi_q: Tensor | None, logits: Tensor, at: Tensor, keys: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Of one key head: log|κ̂| ``[G,Q,J]`` and its sign (None: nowhere negative)."""
        if phi_q is None or self.phi_k is None:
            assert not isinstance(self.candidate, FeatureMap)
            return self.candidate(logits, at, keys), None
        assert isinstance(self.candidate, FeatureMap)
        phi_k = self.phi_k[head, : keys.numel()]
        if isinstance(self.candidate, ExponentialFeatureMap):
            return log_product(phi_q[head], phi_k), None
        weight = phi_q[head] @ phi_k.T
        if self.candidate.positive:
            # A map that is positive in exact arithmetic may round to −1e-20; that is a zero, not a negative weight.
            return weight.clamp_(min=0).log(), None
        return weight.abs().log(), weight.sign()


def log_product(log_q: Tensor, log_k: Tensor) -> Tensor:
    """log Σ_r exp(log_q_ir + log_k_jr), ``[G,Q,F]`` and ``[J,F]`` → ``[G,Q,J]``, by one matrix product.

    C_r = max_j log_k_jr and m_i = max_r(log_q_ir + C_r) keep every exponential at most 1. Pairs so far below
    their row's maximum that the product underflows float64 are summed again in logarithms.
    """
    peak = log_k.amax(0)
    shifted = log_q + peak
    row = shifted.amax(-1, keepdim=True)
    product = (shifted - row).exp() @ (log_k - peak).exp().T
    out = product.log() + row
    lost = (product == 0).nonzero()
    for g, i, j in (pairs.unbind(1) for pairs in lost.split(max(1, _PAIRS_AT_ONCE // log_k.shape[1]))):
        out[g, i, j] = (log_q[g, i] + log_k[j]).logsumexp(-1)
    return out
