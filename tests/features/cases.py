"""Every registered map in a small size, and how a test asks for one."""

import torch

from phistate.features import FeatureMap, FittedFeatureMap, feature_map, feature_map_names

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
    "dpfp": {"nu": 2},
    "rebased": {},
    "hyperbolic": {"num_features": 12},
    "oprf": {"num_features": 6},
    "sderf": {"num_features": 6},
    "simplex": {"num_features": 6},
    "nystrom": {"num_features": 8},
    "polysketch": {"sketch_size": 5},
}
"""Options that make each map small; a name missing here fails ``test_every_map_is_a_case``."""

RANDOM = ["favor+", "rff", "hyperbolic", "oprf", "sderf", "simplex", "polysketch"]
"""Maps that draw."""

NAMES = list(feature_map_names())


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def make(name, seed=0, head_dim=D, **options) -> FeatureMap:
    """The case's map, drawn and fitted with ``seed``."""
    options = {**OPTIONS[name], **options}
    if name in RANDOM:
        options["generator"] = generator(seed)
    phi = feature_map(name, head_dim=head_dim, **options)
    return phi.fit(*sample(seed, head_dim)) if isinstance(phi, FittedFeatureMap) else phi


def sample(seed=0, head_dim=D):
    """Queries and keys ``[2,30,6,D]`` that differ in mean and spread, to fit a map to."""
    q, k = torch.randn(2, 2, 30, 6, head_dim, generator=generator(seed), dtype=torch.float64)
    return q * torch.linspace(0.3, 0.8, head_dim) + 0.2, k * torch.linspace(0.9, 0.4, head_dim) - 0.1


def vectors(*shape, seed=0, dtype=torch.float64, size=0.5):
    """Gaussian x ``[*shape,D]``."""
    return torch.randn(*shape, D, generator=generator(seed), dtype=torch.float64).mul(size).to(dtype)


def kernel(phi, x, y, positions=None):
    """κ̂ of every pair: x ``[T,H,D]``, y ``[S,H,D]`` -> ``[H,T,S]``."""
    q, k = phi.query(x[None], positions)[0], phi.key(y[None], positions)[0]
    return torch.einsum("thf,shf->hts", q, k)
