"""Attention as a kernel, history as a state: linear attention that tells you what it costs."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phistate.features import FeatureMap as FeatureMap
    from phistate.features import feature_map as feature_map
    from phistate.features import feature_map_names as feature_map_names
    from phistate.mixer import PRESETS as PRESETS
    from phistate.mixer import Mixer as Mixer
    from phistate.mixer import preset as preset
    from phistate.ops.causal_conv1d import causal_conv1d as causal_conv1d
    from phistate.ops.causal_conv1d import causal_conv1d_step_ as causal_conv1d_step_
    from phistate.ops.linear_attention import linear_attention as linear_attention
    from phistate.ops.linear_attention import linear_attention_step_ as linear_attention_step_
    from phistate.ops.mamba2 import mamba2_scan as mamba2_scan
    from phistate.ops.mamba2 import mamba2_step_ as mamba2_step_
    from phistate.ops.selective_scan import selective_scan as selective_scan
    from phistate.ops.selective_scan import selective_scan_step_ as selective_scan_step_
    from phistate.ops.softmax_attention import softmax_attention as softmax_attention
    from phistate.ops.state import State as State

__version__ = "0.1.0"

_HOME = {
    "FeatureMap": "phistate.features",
    "feature_map": "phistate.features",
    "feature_map_names": "phistate.features",
    "Mixer": "phistate.mixer",
    "PRESETS": "phistate.mixer",
    "preset": "phistate.mixer",
    "State": "phistate.ops.state",
    "causal_conv1d": "phistate.ops.causal_conv1d",
    "causal_conv1d_step_": "phistate.ops.causal_conv1d",
    "linear_attention": "phistate.ops.linear_attention",
    "linear_attention_step_": "phistate.ops.linear_attention",
    "mamba2_scan": "phistate.ops.mamba2",
    "mamba2_step_": "phistate.ops.mamba2",
    "selective_scan": "phistate.ops.selective_scan",
    "selective_scan_step_": "phistate.ops.selective_scan",
    "softmax_attention": "phistate.ops.softmax_attention",
}
__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'phistate' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
