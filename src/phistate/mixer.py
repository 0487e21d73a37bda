"""The equation, and the table of mixers that are points in it.

Per head, after the feature map has been applied to q and k (a_t = exp(decay_t), decay_t ≤ 0):

    S'_t = Diag(a_t) S_{t-1}                              forget
    S_t  = S'_t + β_t k_t v_tᵀ                            write="add"
    S_t  = S'_t + β_t k_t (v_t − S'_tᵀ e_t)ᵀ              write="delta"; e = k unless an erase key is given
    o_t  = scale · S_tᵀ q_t                               read, after the write
    o_t  = o_t / (scale · z_tᵀ q_t)                       normaliser "sum"; z is S with v ≡ 1

A mixer is four independent choices: feature map × decay × write × normaliser.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from phistate.features import FeatureMap, feature_map
from phistate.ops.linear_attention import linear_attention
from phistate.ops.state import State

_NOTHING: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True)
class Mixer:
    """A line of the table: feature map × decay × write × normaliser.

    Args:
        name: the preset's name.
        feature_map: a name for :func:`phistate.feature_map`; ``"l2norm"``: q and k are L2-normalised; None: identity.
        decay: ``"none"``, ``"head"`` (a constant per head), ``"scalar"`` (per token), ``"vector"`` (per token and
            feature): the decay :meth:`attend` takes.
        write: ``"add"`` or ``"delta"``.
        normalizer: ``"sum"`` (divide by z·q), ``"output_norm"`` (RMS norm of each head's output) or ``"none"``.
        scale: of the read; None: K ** -0.5.
        feature_options: options of the feature map.
        source: the paper.
    """

    name: str
    feature_map: str | None = None
    decay: str = "none"
    write: str = "add"
    normalizer: str = "none"
    scale: float | None = None
    feature_options: Mapping[str, object] = field(default_factory=lambda: _NOTHING)
    source: str = ""

    def make_feature_map(self, head_dim: int, **options: object) -> FeatureMap | None:
        """The mixer's φ for heads of ``head_dim``, its own options overridden by ``options``; None: identity."""
        if self.feature_map is None or self.feature_map == "l2norm":
            if options:
                raise TypeError(f"{next(iter(options))}: got an option; {self.name!r} has no feature map to take it")
            return None
        return feature_map(self.feature_map, head_dim=head_dim, **{**self.feature_options, **options})

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        phi: FeatureMap | None = None,
        decay: Tensor | None = None,
        beta: Tensor | None = None,
        initial_state: State | None = None,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        form: str = "auto",
        backend: str = "auto",
    ) -> tuple[Tensor, State]:
        """:func:`phistate.linear_attention` with this mixer's choices; ``phi`` is what :meth:`make_feature_map` made.

        Raises:
            ValueError: ``phi`` or ``decay`` missing where the mixer has one, or given where it has none.

        >>> import torch, phistate
        >>> gla = phistate.preset("gla")
        >>> q, k, v = torch.rand(3, 1, 5, 2, 4).unbind()
        >>> o, state = gla.attend(q, k, v, decay=-torch.rand(1, 5, 2, 4))
        >>> o.shape, state.tokens.tolist()
        (torch.Size([1, 5, 2, 4]), [5])
        """
        wants_phi = self.feature_map not in (None, "l2norm")
        if wants_phi != (phi is not None):
            raise ValueError(f"phi: got {phi}; {self.name!r} takes {self.feature_map if wants_phi else None}")
        if (self.decay == "none") != (decay is None):
            raise ValueError(
                f"decay: got {None if decay is None else tuple(decay.shape)}; {self.name!r} takes {self.decay}"
            )
        if decay is not None and decay.ndim != {"head": 1, "scalar": 3, "vector": 4}[self.decay]:
            raise ValueError(f"decay: got shape {tuple(decay.shape)}; {self.name!r} takes one per {self.decay}")
        o, state = linear_attention(
            q,
            k,
            v,
            decay=decay,
            beta=beta,
            write=self.write,
            normalize=self.normalizer == "sum",
            feature_map=phi,
            scale=self.scale,
            initial_state=initial_state,
            return_state=True,
            mask=mask,
            cu_seqlens=cu_seqlens,
            qk_l2norm=self.feature_map == "l2norm",
            form=form,
            backend=backend,
        )
        if self.normalizer == "output_norm":
            o = F.rms_norm(o, o.shape[-1:])
        return o, state


def retention_decay(heads: int) -> Tensor:
    """RetNet's constant decay per head, log(1 − 2^(−5−h)): ``[heads]`` (arXiv:2307.08621, equation 8).

    >>> retention_decay(2)
    tensor([-0.0317, -0.0157])
    """
    return torch.log1p(-torch.exp2(-5.0 - torch.arange(heads)))


def _table(*rows: Mixer) -> Mapping[str, Mixer]:
    return MappingProxyType({row.name: row for row in rows})


PRESETS: Mapping[str, Mixer] = _table(
    Mixer("linear", "elu", normalizer="sum", feature_options={"scale": 1.0}, source="arXiv:2006.16236"),
    Mixer("performer", "favor+", normalizer="sum", source="arXiv:2009.14794"),
    Mixer("cosformer", "cosformer", normalizer="sum", source="arXiv:2202.08791"),
    Mixer("taylor", "taylor", normalizer="sum", feature_options={"order": 2}, source="arXiv:2402.18668"),
    Mixer("polynomial", "polynomial", normalizer="sum", source="arXiv:2310.01655"),
    Mixer("hedgehog", "hedgehog", normalizer="sum", source="arXiv:2402.04347"),
    Mixer("retnet", decay="head", normalizer="output_norm", source="arXiv:2307.08621"),
    Mixer("mamba2", decay="scalar", scale=1.0, source="arXiv:2405.21060"),
    Mixer("gla", decay="vector", normalizer="output_norm", source="arXiv:2312.06635"),
    Mixer("deltanet", "l2norm", write="delta", normalizer="output_norm", source="arXiv:2406.06484"),
    Mixer(
        "gated_deltanet",
        "l2norm",
        decay="scalar",
        write="delta",
        normalizer="output_norm",
        source="arXiv:2412.06464",
    ),
    Mixer("kda", "l2norm", decay="vector", write="delta", normalizer="output_norm", source="arXiv:2510.26692"),
)
"""Every system this library is about, one line each (``retnet``'s decay: :func:`retention_decay`)."""


def preset(name: str) -> Mixer:
    """The preset called ``name``.

    Raises:
        ValueError: an unknown name.

    >>> preset("gated_deltanet").write
    'delta'
    """
    if name not in PRESETS:
        raise ValueError(f"name: got {name!r}; takes {', '.join(PRESETS)}")
    return PRESETS[name]
