"""Every registered map in a small size, and how a test asks for one."""

import torch

from phistate.features import FeatureMap, feature_map, feature_map_names

D = 4
"""Head dimension of the cases."""

OPTIONS = {
    "elu": {},
    "relu": {"epsilon": 0.01},
    "relu2": {},
    "exp": {},
    "uniform": {},
    "polynomial": {"p": 2},
    "taylor": {"order": 2},
    "favor+": {"num_features": 6},
    "rff": {"num_features": 12},
    "cosformer": {"max_length": 16},
    "hedgehog": {"bias": True},
}
"""Options that make each map small; a name missing here fails ``test_every_map_is_a_case``."""

RANDOM = ["favor+", "rff"]
"""Maps that draw."""

NAMES = list(feature_map_names())


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def make(name, seed=0, head_dim=D, **options) -> FeatureMap:
    """The case's map."""
    options = {**OPTIONS[name], **options}
    if name in RANDOM:
        options["generator"] = generator(seed)
    return feature_map(name, head_dim=head_dim, **options)


def vectors(*shape, seed=0, dtype=torch.float64, size=0.5):
    """Gaussian x ``[*shape,D]``."""
    return torch.randn(*shape, D, generator=generator(seed), dtype=torch.float64).mul(size).to(dtype)


def kernel(phi, x, y, positions=None):
    """κ̂ of every pair: x ``[T,H,D]``, y ``[S,H,D]`` -> ``[H,T,S]``."""
    q, k = phi.query(x[None], positions)[0], phi.key(y[None], positions)[0]
    return torch.einsum("thf,shf->hts", q, k)
