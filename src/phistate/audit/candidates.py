"""What may stand in for softmax attention: a feature map by name, or the window baseline."""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from phistate.audit.capture import Attend
from phistate.audit.errors import BadInput
from phistate.diagnostics import LogKernel, window_kernel
from phistate.features import FeatureMap, FittedFeatureMap, feature_map, feature_map_names
from phistate.mixer import PRESETS
from phistate.ops.linear_attention import linear_attention
from phistate.ops.softmax_attention import softmax_attention

DEFAULT_MIXERS = "uniform,window:window=64:sinks=4,elu,taylor:order=2,favor+:num_features=256,cosformer"
"""Two baselines (one looks at nothing, one only nearby) and four linear maps."""

Sample = tuple[Tensor, Tensor]
"""Queries ``[B,T,Hq,D]`` and keys ``[B,T,Hk,D]``."""

_FLOAT32 = 4
_SEED_STRIDE = 1_000_003  # a prime, so that (seed, layer) pairs of one audit never share a draw


@dataclass(frozen=True)
class Mixing:
    """A candidate made for one layer."""

    attend: Attend
    kernel: FeatureMap | LogKernel
    """The same weights, for `phistate.diagnostics.compare`."""


@dataclass(frozen=True)
class Candidate(ABC):
    """A way to attend, by the name and options a person gave."""

    label: str
    options: Mapping[str, object]

    @property
    @abstractmethod
    def baseline(self) -> bool:
        """Whether it stands here for comparison: it needs no linear attention."""

    @abstractmethod
    def make(self, *, head_dim: int, scale: float, length: int, seed: int, layer: int, sample: Sample | None) -> Mixing:
        """The candidate for one layer.

        Args:
            head_dim: D.
            scale: softmax's.
            length: of the text.
            seed: with ``layer``, what random maps are drawn from.
            layer: its index.
            sample: queries and keys that a map is fitted to, where it has to be; None: leave it unfitted.
        """

    @abstractmethod
    def state_bytes(self, mixing: Mixing, *, length: int, kv_heads: int, head_dim: int, value_dim: int) -> int:
        """Bytes of one layer that decoding must keep after ``length`` tokens, in float32."""


@dataclass(frozen=True)
class Window(Candidate):
    """Exact softmax on a window and sinks: the baseline any linear map has to beat."""

    @property
    def baseline(self) -> bool:
        """It is one."""
        return True

    def make(self, *, head_dim: int, scale: float, length: int, seed: int, layer: int, sample: Sample | None) -> Mixing:
        """`softmax_attention` with the window and sinks."""
        window, sinks = self._sizes

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return softmax_attention(q, k, v, scale=scale, window=window, sinks=sinks)

        return Mixing(attend, window_kernel(window, sinks))

    def state_bytes(self, mixing: Mixing, *, length: int, kv_heads: int, head_dim: int, value_dim: int) -> int:
        """K and V of the window and the sinks."""
        window, sinks = self._sizes
        return min(length, window + sinks) * kv_heads * (head_dim + value_dim) * _FLOAT32

    @property
    def _sizes(self) -> tuple[int, int]:
        sizes = {"window": 64, "sinks": 4, **self.options}
        if unknown := sizes.keys() - {"window", "sinks"}:
            raise TypeError(f"{min(unknown)}: got an unknown option of 'window'; takes window, sinks")
        window, sinks = sizes["window"], sizes["sinks"]
        for name, size, least in (("window", window, 1), ("sinks", sinks, 0)):
            if isinstance(size, bool) or not isinstance(size, int) or size < least:
                raise ValueError(f"{name}: got {size!r}; takes an integer ≥ {least}")
        assert isinstance(window, int)
        assert isinstance(sinks, int)
        return window, sinks


@dataclass(frozen=True)
class Mapped(Candidate):
    """Linear attention by a feature map, normalised; what a preset of the mixer table fixes is fixed here
    too."""

    name: str

    @property
    def baseline(self) -> bool:
        """The uniform average looks at nothing, so a map that loses to it is no map."""
        return self.name == "uniform"

    def make(self, *, head_dim: int, scale: float, length: int, seed: int, layer: int, sample: Sample | None) -> Mixing:
        """The map with the model's softmax scale, and `linear_attention` by it."""
        preset = PRESETS.get(self.name)
        fixed = {} if preset is None else dict(preset.feature_options)
        name = self.name if preset is None or preset.feature_map is None else preset.feature_map
        options = {"scale": scale, **fixed, **self.options}
        if name == "cosformer":
            options.setdefault("max_length", length)
        # A map draws from torch's default generator; the caller's is left as it was.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed * _SEED_STRIDE + layer)
            phi = feature_map(name, head_dim=head_dim, **options).requires_grad_(False)
            if isinstance(phi, FittedFeatureMap) and sample is not None:
                phi.fit(*sample)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return linear_attention(q, k, v, feature_map=phi, normalize=True, signed="allow")

        return Mixing(attend, phi)

    def state_bytes(self, mixing: Mixing, *, length: int, kv_heads: int, head_dim: int, value_dim: int) -> int:
        """S and z, whatever the length."""
        assert isinstance(mixing.kernel, FeatureMap)
        return kv_heads * mixing.kernel.num_features * (value_dim + 1) * _FLOAT32


def accepted() -> list[str]:
    """The names that ``--mixers`` takes.

    Example:
        >>> {"window", "uniform", "favor+", "performer"} <= set(accepted())
        True
    """
    presets = [name for name, preset in PRESETS.items() if preset.normalizer == "sum" and preset.decay == "none"]
    return sorted({"window", *feature_map_names(), *presets})


def parse(text: str) -> list[Candidate]:
    """Candidates from ``name[:option=value…]`` separated by commas.

    Raises:
        BadInput: nothing, an unknown name (with the list of names), an option that is not taken, or a
        repetition.

    Example:
        >>> [candidate.label for candidate in parse("window:window=32, elu")]
        ['window:window=32', 'elu']
    """
    found: list[Candidate] = []
    for part in (part.strip() for part in text.split(",")):
        name, *pairs = part.split(":")
        if name not in accepted():
            raise BadInput(f"--mixers: got {name!r}; takes {', '.join(accepted())}")
        options: dict[str, object] = {}
        for pair in pairs:
            key, equals, value = pair.partition("=")
            if not equals or not key.isidentifier() or key in options:
                raise BadInput(f"--mixers: got {part!r}; takes name:option=value, each option once")
            options[key] = _value(value)
        if "generator" in options:
            raise BadInput(f"--mixers: got {part!r}; a generator is not given here: --seed fixes the draw")
        candidate = Window(part, options) if name == "window" else Mapped(part, options, name)
        try:
            # Small heads: only the options are at stake here, and Taylor-4 of a real head takes a while to make.
            candidate.make(head_dim=8, scale=8**-0.5, length=1, seed=0, layer=0, sample=None)
        except (TypeError, ValueError) as error:
            raise BadInput(f"--mixers: got {part!r}; {error}") from None
        if part in (other.label for other in found):
            raise BadInput(f"--mixers: got {part!r} twice; takes each once")
        found.append(candidate)
    return found


def _value(text: str) -> object:
    """A number, True or False, or else the text itself."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value if isinstance(value, bool | int | float) else text
