"""What a case computes: its inputs, our call, the same in float64, and what it costs by formula.

Costs are of one forward pass. ``needed`` is what the recurrence itself costs; ``performed`` adds what working in chunks
of C tokens adds (a C×C matrix of scores a head, half of it used), and is what a share of the peak is taken of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

import phistate
from phistate.features import FeatureMap, feature_map
from phistate.ops.state import State

Inputs = dict[str, Tensor]
Outputs = tuple[Tensor, ...]

ADDITIVE_CHUNK = 32
"""Tokens a chunk of csrc/additive_forward.cpp."""

DELTA_CHUNK = 32
"""Tokens a chunk of the delta kernels."""


@dataclass(frozen=True)
class Cost:
    """Operations (a multiply-add is two) and bytes of one forward pass.

    Args:
        needed: operations of the recurrence as written.
        performed: operations of the chunked algorithm.
        elements: numbers of the inputs' type read or written once.
        wide: numbers of float32 read or written once: states, and what the models keep in float32.
    """

    needed: float
    performed: float
    elements: float
    wide: float = 0.0

    def bytes(self, dtype: torch.dtype) -> float:
        """Bytes that must move when the inputs are of ``dtype``."""
        return self.elements * dtype.itemsize + 4 * self.wide


class Work(Protocol):
    """One thing to compute, at one size."""

    @property
    def T(self) -> int:
        """Tokens."""
        ...

    @property
    def backward(self) -> float:
        """Operations of the backward pass over those of the forward pass."""
        ...

    def shorter(self, T: int) -> Work:
        """The same work over the first T tokens."""
        ...

    def cost(self) -> Cost:
        """What a forward pass costs."""
        ...

    def inputs(self, dtype: torch.dtype) -> Inputs:
        """Seeded inputs, rounded to ``dtype``; ``state`` and what models keep in float32 stay float32."""
        ...

    def ours(self, inputs: Inputs, *, backend: str = "auto") -> Outputs:
        """The output, ``[B,T,...]``, and the state where the inputs hold one."""
        ...

    def exact(self, inputs: Inputs) -> Outputs:
        """What :meth:`ours` should give: the recurrence, in the inputs' own type."""
        ...


def runs_on(work: Work, inputs: Inputs) -> str:
    """Which backend ``auto`` gives our call: ``cpu``, or another with the reasons against ``cpu``."""
    try:
        work.ours(inputs, backend="cpu")
    except ValueError as error:
        return f"torch, for: {error}"
    return "cpu"


@dataclass(frozen=True)
class Linear:
    """:func:`phistate.linear_attention` at batch 1.

    Recurrence, a token and state head: 2KV to write and 2KV to read, and under delta 2KV to read what the key holds.
    Chunks add C(2K + V) a token and head, the scores and half of them times the values; under delta C(2K + 2V), half of
    Q Kᵀ, half of K Kᵀ, the triangular system and half of the scores times what it solves for. The backward pass
    recomputes the states and takes, as products of the same size, five where the forward takes two (delta: eight where
    it takes three).

    Args:
        key_heads: of k; ``query_heads`` None: as many.
        value_heads: of v.
        decay: ``none``, ``head``, ``scalar`` or ``vector``.
        phi: name of a feature map applied inside the op.
        state: starts from a state and returns the next, as a decode step does.
        in_place: by :func:`phistate.linear_attention_step_`, which overwrites the state.
    """

    T: int
    key_heads: int
    value_heads: int
    K: int
    V: int
    query_heads: int | None = None
    decay: str = "none"
    write: str = "add"
    normalize: bool = False
    phi: str | None = None
    causal: bool = True
    state: bool = False
    in_place: bool = False

    @property
    def heads(self) -> int:
        """How many states there are."""
        return max(self.key_heads, self.value_heads)

    @property
    def backward(self) -> float:
        """See :class:`Work`."""
        return 2.5 if self.write == "add" else 8 / 3

    def shorter(self, T: int) -> Linear:
        """See :class:`Work`."""
        return replace(self, T=min(T, self.T))

    def cost(self) -> Cost:
        """See :class:`Work`."""
        tokens, K, V = self.T * self.heads, self.K, self.V
        delta = self.write == "delta"
        needed = tokens * K * V * (6 if delta else 4)
        chunk = min(DELTA_CHUNK if delta else ADDITIVE_CHUNK, self.T) if self.causal and self.T > 1 else 0
        inside = chunk * (2 * K + 2 * V if delta else 2 * K + V)
        decays = {"none": 0, "head": 0, "scalar": 1, "vector": K}[self.decay] + delta
        queries = self.query_heads or self.key_heads
        elements = self.T * (self.heads * V + self.value_heads * V + (queries + self.key_heads) * K)
        states = self.heads * K * V * 2 if self.state else 0
        return Cost(needed, needed + tokens * inside, elements, tokens * decays + states)

    def inputs(self, dtype: torch.dtype) -> Inputs:
        """See :class:`Work`; keys are of unit length under delta, as in every model that writes so."""
        g = torch.Generator().manual_seed(self.T)
        T, Hs = self.T, self.heads
        q = torch.randn(1, T, self.query_heads or self.key_heads, self.K, generator=g)
        k = torch.randn(1, T, self.key_heads, self.K, generator=g)
        if self.write == "delta":
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        inputs = {"q": q, "k": k, "v": torch.randn(1, T, self.value_heads, self.V, generator=g)}
        inputs = {name: tensor.to(dtype) for name, tensor in inputs.items()}
        shape = {"none": None, "head": (Hs,), "scalar": (1, T, Hs), "vector": (1, T, Hs, self.K)}[self.decay]
        if shape is not None:
            inputs["decay"] = -0.2 * torch.rand(shape, generator=g)
        if self.write == "delta":
            inputs["beta"] = torch.rand(1, T, Hs, generator=g)
        if self.state:
            inputs["state"] = torch.randn(1, Hs, self.K, self.V, generator=g)
        return inputs

    def ours(self, inputs: Inputs, *, backend: str = "auto") -> Outputs:
        """See :class:`Work`."""
        return self._step(inputs, backend) if self.in_place else self.call(inputs, backend=backend)

    def _step(self, inputs: Inputs, backend: str) -> Outputs:
        o = phistate.linear_attention_step_(
            State(s=inputs["state"], tokens=_SEEN),
            inputs["q"],
            inputs["k"],
            inputs["v"],
            decay=inputs.get("decay"),
            beta=inputs.get("beta"),
            write=self.write,
            backend=backend,
        )
        return o, inputs["state"]

    def call(self, inputs: Inputs, *, backend: str = "auto", form: str = "auto") -> Outputs:
        """:meth:`ours` by one backend, in one form."""
        start = inputs.get("state")
        result = _attend(
            inputs["q"],
            inputs["k"],
            inputs["v"],
            decay=inputs.get("decay"),
            beta=inputs.get("beta"),
            write=self.write,
            normalize=self.normalize,
            feature_map=self._map(),
            causal=self.causal,
            initial_state=None if start is None else State(s=start, tokens=_ZERO),
            return_state=self.state,
            backend=backend,
            form=form,
        )
        return (result,) if isinstance(result, Tensor) else (result[0], result[1].s)

    def exact(self, inputs: Inputs) -> Outputs:
        """See :class:`Work`."""
        return self.call(inputs, backend="torch", form="recurrent" if self.causal else "parallel")

    def _map(self) -> FeatureMap | None:
        if self.phi is None:
            return None
        key = (self.phi, self.K)
        if key not in _MAPS:
            _MAPS[key] = feature_map(self.phi, head_dim=self.K, scale=1.0)
        return _MAPS[key]


_attend: Callable[..., Tensor | tuple[Tensor, State]] = phistate.linear_attention
_ZERO = torch.zeros(1, dtype=torch.int64)
_SEEN = torch.zeros(1, dtype=torch.int64)  # counts the steps taken in place
_MAPS: dict[tuple[str, int], FeatureMap] = {}


@dataclass(frozen=True)
class Scan:
    """Mamba-1's selective scan: ``D`` channels of ``N`` state entries, with its softplus, skip and gate.

    A token, channel and entry: h = e^{ΔA} h + (Δx) B; y = C·h: two products, an exponential counted as one operation,
    and two multiply-adds. The backward pass recomputes h and takes about twice the operations besides.
    """

    T: int
    D: int
    N: int

    @property
    def backward(self) -> float:
        """See :class:`Work`."""
        return 3.0

    def shorter(self, T: int) -> Scan:
        """See :class:`Work`."""
        return replace(self, T=min(T, self.T))

    def cost(self) -> Cost:
        """See :class:`Work`."""
        operations = self.T * self.D * (7 * self.N + 12)
        return Cost(operations, operations, self.T * (4 * self.D + 2 * self.N), self.D * (self.N + 2))

    def inputs(self, dtype: torch.dtype) -> Inputs:
        """See :class:`Work`."""
        g = torch.Generator().manual_seed(self.T)
        shapes = {"x": self.D, "delta": self.D, "B": self.N, "C": self.N, "z": self.D}
        inputs = {name: torch.randn(1, self.T, size, generator=g).to(dtype) for name, size in shapes.items()}
        inputs["A"] = -torch.arange(1, self.N + 1).float().repeat(self.D, 1)
        inputs["D"] = torch.randn(self.D, generator=g)
        inputs["delta_bias"] = torch.randn(self.D, generator=g) - 3.0
        return inputs

    def ours(self, inputs: Inputs, *, backend: str = "auto") -> Outputs:
        """See :class:`Work`."""
        from phistate.ops.selective_scan import selective_scan

        y = selective_scan(
            inputs["x"],
            inputs["delta"],
            inputs["A"],
            inputs["B"],
            inputs["C"],
            inputs["D"],
            inputs["z"],
            inputs["delta_bias"],
            delta_softplus=True,
            backend=backend,
        )
        return (y,)

    def exact(self, inputs: Inputs) -> Outputs:
        """See :class:`Work`; written out here, token by token."""
        x, B, C = inputs["x"], inputs["B"], inputs["C"]
        delta = F.softplus(inputs["delta"] + inputs["delta_bias"])
        h = x.new_zeros(x.shape[0], self.D, self.N)
        rows = []
        for t in range(x.shape[1]):
            step = delta[:, t, :, None]
            h = (step * inputs["A"]).exp() * h + step * B[:, t, None] * x[:, t, :, None]
            rows.append((h * C[:, t, None]).sum(-1))
        y = torch.stack(rows, 1) + inputs["D"] * x
        return (y * F.silu(inputs["z"]),)


@dataclass(frozen=True)
class Conv:
    """The short causal convolution of ``C`` channels and width ``W``, then SiLU; counted as eight operations.

    Args:
        channels_last: x is dense over channels, as a layer's projection leaves it; False: dense over time.
    """

    T: int
    C: int
    W: int
    channels_last: bool

    @property
    def backward(self) -> float:
        """See :class:`Work`."""
        return 2.0

    def shorter(self, T: int) -> Conv:
        """See :class:`Work`."""
        return replace(self, T=min(T, self.T))

    def cost(self) -> Cost:
        """See :class:`Work`."""
        operations = self.T * self.C * (2 * self.W + 8)
        return Cost(operations, operations, self.T * self.C * 2 + self.C * (self.W + 1))

    def inputs(self, dtype: torch.dtype) -> Inputs:
        """See :class:`Work`; x is ``[B,T,C]``, in time-major memory unless ``channels_last``."""
        g = torch.Generator().manual_seed(self.T)
        x = torch.randn(1, self.T, self.C, generator=g).to(dtype)
        if not self.channels_last:
            x = x.mT.contiguous().mT
        weight = torch.randn(self.C, self.W, generator=g).to(dtype)
        return {"x": x, "weight": weight, "bias": torch.randn(self.C, generator=g).to(dtype)}

    def ours(self, inputs: Inputs, *, backend: str = "auto") -> Outputs:
        """See :class:`Work`."""
        from phistate.ops.causal_conv1d import causal_conv1d

        return (causal_conv1d(inputs["x"], inputs["weight"], inputs["bias"], activation="silu", backend=backend),)

    def exact(self, inputs: Inputs) -> Outputs:
        """See :class:`Work`."""
        x, weight = inputs["x"], inputs["weight"]
        padded = F.pad(x, (0, 0, self.W - 1, 0))
        taps = (padded[:, w : w + x.shape[1]] * weight[:, w] for w in range(self.W))
        return (F.silu(sum(taps, inputs["bias"])),)


@dataclass(frozen=True)
class Mamba2:
    """Mamba-2's scan with its own arguments: ``H`` heads of ``P``, ``G`` groups of ``N``, softplus, bias and skip.

    It is the additive recurrence with K = N, V = P and a decay per token.
    """

    T: int
    H: int
    P: int
    N: int
    G: int = 1

    @property
    def backward(self) -> float:
        """See :class:`Work`."""
        return 2.5

    def shorter(self, T: int) -> Mamba2:
        """See :class:`Work`."""
        return replace(self, T=min(T, self.T))

    def cost(self) -> Cost:
        """See :class:`Work`."""
        as_linear = Linear(self.T, self.G, self.H, self.N, self.P, decay="scalar").cost()
        return replace(as_linear, wide=as_linear.wide + 3 * self.H)

    def inputs(self, dtype: torch.dtype) -> Inputs:
        """See :class:`Work`."""
        g = torch.Generator().manual_seed(self.T)
        shapes = {"x": (self.H, self.P), "B": (self.G, self.N), "C": (self.G, self.N), "dt": (self.H,)}
        inputs = {name: torch.randn(1, self.T, *shape, generator=g).to(dtype) for name, shape in shapes.items()}
        inputs["A"] = -torch.arange(1, self.H + 1).float()
        inputs["D"] = torch.randn(self.H, generator=g)
        inputs["dt_bias"] = torch.randn(self.H, generator=g) - 3.0
        return inputs

    def ours(self, inputs: Inputs, *, backend: str = "auto") -> Outputs:
        """See :class:`Work`."""
        from phistate.ops.mamba2 import mamba2_scan

        y = mamba2_scan(
            inputs["x"],
            inputs["dt"],
            inputs["A"],
            inputs["B"],
            inputs["C"],
            D=inputs["D"],
            dt_bias=inputs["dt_bias"],
            dt_softplus=True,
            backend=backend,
        )
        return (y,)

    def exact(self, inputs: Inputs) -> Outputs:
        """See :class:`Work`; as linear attention, which is what the paper shows it to be."""
        x, dt = inputs["x"], F.softplus(inputs["dt"] + inputs["dt_bias"])
        y = phistate.linear_attention(
            inputs["C"],
            inputs["B"],
            x * dt.unsqueeze(-1),
            decay=dt * inputs["A"],
            scale=1.0,
            backend="torch",
            form="recurrent",
        )
        return (y + inputs["D"][:, None] * x,)
