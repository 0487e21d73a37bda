"""What a backend is: something that runs a checked call, or says why it cannot."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from phistate.features import FeatureMap


@dataclass(frozen=True, eq=False)
class Call:
    """One request to run the equation: arguments checked, features ready, shapes agreed.

    ``q [B,T,Hq,K]``, ``k [B,T,Hk,K]``, ``v [B,T,Hv,V]``; ``decay [Hs] | [B,T,Hs] | [B,T,Hs,K]``; ``beta [B,T,Hs]``;
    ``erase [B,T,Hk,K]`` (None: the delta write erases by k);
    initial state ``s [N,Hs,K,V]`` and ``z [N,Hs,K]`` in :attr:`accumulation`, N = B or the number of packed sequences;
    ``mask [B,T]`` bool; ``cu_seqlens [N+1]`` int64 on the CPU, whose numbers a trace cannot read
    (:mod:`phistate.ops.packing`).

    With ``log_features`` q and k are the logarithms of the features, float32 (float64 for float64 inputs), the write is
    additive, and ``log_scale [N,Hs,K]`` is the running maximum that s and z are relative to (None: no history).

    With a ``feature_map``, which has a name for :attr:`~phistate.features.FeatureMap.pointwise`, q and k have yet to go
    through it.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor | None = None
    beta: Tensor | None = None
    erase: Tensor | None = None
    write: str = "add"
    normalize: bool = False
    scale: float = 1.0
    causal: bool = True
    qk_l2norm: bool = False
    s: Tensor | None = None
    z: Tensor | None = None
    mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    form: str = "auto"
    log_features: bool = False
    log_scale: Tensor | None = None
    feature_map: FeatureMap | None = None

    def mapped(self) -> Call:
        """The same call with features for q and k."""
        phi = self.feature_map
        if phi is None:
            return self
        q, k = phi.query(without_padding(self.q, self.mask)), phi.key(without_padding(self.k, self.mask))
        return replace(self, q=q, k=k, feature_map=None)

    @property
    def state_heads(self) -> int:
        """Hs, how many states there are."""
        return max(self.k.shape[2], self.v.shape[2])

    @property
    def sequences(self) -> int:
        """N, how many independent sequences the call holds."""
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.numel() - 1

    @property
    def accumulation(self) -> torch.dtype:
        """The type of states and sums: float64 for float64 inputs, float32 for all others."""
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32


def without_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    """``x [B,T,H,D]`` with zeros in padded steps: what stands there may be NaN, and must not reach a gradient."""
    return x if mask is None else x.masked_fill(~mask[:, :, None, None], 0.0)


class Result(NamedTuple):
    """What a call gives."""

    o: Tensor
    """``[B,T,Ho,V]`` in v's dtype."""
    s: Tensor
    """``[N,Hs,K,V]``, after the last step."""
    z: Tensor | None
    """``[N,Hs,K]``; None unless normalised."""
    log_scale: Tensor | None = None
    """``[N,Hs,K]``; None unless the features came as logarithms."""


class Backend(Protocol):
    """Runs calls of :func:`phistate.linear_attention`."""

    name: str

    def reasons_against(self, call: Call) -> list[str]:
        """Why this backend cannot run ``call``; empty when it can."""
        ...

    def run(self, call: Call) -> Result:
        """Compute a call that there are no reasons against."""
        ...

    def step_(self, call: Call) -> Tensor:
        """Compute a call of one token and leave its state in the tensors ``call.s`` and ``call.z``."""
        ...
