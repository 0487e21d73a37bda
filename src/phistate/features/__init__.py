"""Feature maps φ, one family a file."""

from phistate.features.base import ExponentialFeatureMap, FeatureMap


def feature_map(name: str, *, head_dim: int, **options: object) -> FeatureMap:
    raise NotImplementedError
