"""Feature maps φ, one family a file, and their registry by name."""

from __future__ import annotations

import inspect

from phistate.features.base import ExponentialFeatureMap, FeatureMap, Side
from phistate.features.centred import Centred
from phistate.features.fitted import FavorPlusPlus, FavorSharp, FittedFeatureMap
from phistate.features.landmark import Nystrom
from phistate.features.learned import Hedgehog, ReBased
from phistate.features.pointwise import DPFP, Elu, Exp, Relu, ReluSquared, Uniform
from phistate.features.polynomial import Polynomial, Taylor
from phistate.features.positional import CosFormer
from phistate.features.random import FavorPlus, Hyperbolic, RandomFeatureMap, Simplex, TrigonometricFeatures
from phistate.features.sketch import PolySketch

__all__ = [
    "DPFP",
    "Centred",
    "CosFormer",
    "Elu",
    "Exp",
    "ExponentialFeatureMap",
    "FavorPlus",
    "FavorPlusPlus",
    "FavorSharp",
    "FeatureMap",
    "FittedFeatureMap",
    "Hedgehog",
    "Hyperbolic",
    "Nystrom",
    "PolySketch",
    "Polynomial",
    "RandomFeatureMap",
    "ReBased",
    "Relu",
    "ReluSquared",
    "Side",
    "Simplex",
    "Taylor",
    "TrigonometricFeatures",
    "Uniform",
    "feature_map",
    "feature_map_names",
]

_MAPS: dict[str, type[FeatureMap]] = {
    "elu": Elu,
    "relu": Relu,
    "relu2": ReluSquared,
    "exp": Exp,
    "uniform": Uniform,
    "polynomial": Polynomial,
    "taylor": Taylor,
    "favor+": FavorPlus,
    "rff": TrigonometricFeatures,
    "cosformer": CosFormer,
    "hedgehog": Hedgehog,
    "dpfp": DPFP,
    "rebased": ReBased,
    "hyperbolic": Hyperbolic,
    "oprf": FavorPlusPlus,
    "sderf": FavorSharp,
    "simplex": Simplex,
    "nystrom": Nystrom,
    "polysketch": PolySketch,
}


def feature_map(name: str, *, head_dim: int, **options: object) -> FeatureMap:
    """A feature map by its registry name.

    Args:
        name: one of ``feature_map_names()``.
        head_dim: D, the size of one head's query and key.
        options: what the map's class takes, by keyword (``scale``, ``num_features``, …).

    Raises:
        ValueError: an unknown name, or an option's value that the map does not take.
        TypeError: an option the map does not have.

    Example:
        >>> feature_map("taylor", head_dim=64, order=2).num_features
        2145
        >>> feature_map("taylor", head_dim=64, degree=2)
        Traceback (most recent call last):
        TypeError: degree: got an unknown option of feature map 'taylor'; takes order, scale
    """
    if name not in _MAPS:
        raise ValueError(f"name: got {name!r}; takes one of {', '.join(_MAPS)}")
    taken = [option for option in inspect.signature(_MAPS[name]).parameters if option != "head_dim"]
    for option in options:
        if option not in taken:
            raise TypeError(f"{option}: got an unknown option of feature map {name!r}; takes {', '.join(taken)}")
    return _MAPS[name](head_dim, **options)  # type: ignore[arg-type]


def feature_map_names() -> tuple[str, ...]:
    """The names ``feature_map`` takes.

    Example:
        >>> "favor+" in feature_map_names()
        True
    """
    return tuple(_MAPS)
