"""What phistate offers under the names of mamba_ssm, at the paths they are imported from."""

from __future__ import annotations

import torch

from phistate.compat.mamba_ssm import gated, norms
from phistate.compat.mamba_ssm.inference import InferenceParams
from phistate.compat.mamba_ssm.mamba import Mamba
from phistate.compat.mamba_ssm.mamba2 import Mamba2
from phistate.compat.mamba_ssm.mamba2_simple import Mamba2Simple
from phistate.compat.mamba_ssm.selective import (
    mamba_inner_fn,
    mamba_inner_ref,
    selective_scan_fn,
    selective_scan_ref,
    selective_state_update,
    selective_state_update_ref,
)
from phistate.compat.mamba_ssm.ssd import mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined
from phistate.compat.package import Package

_NORMS = {
    "RMSNorm": norms.RMSNorm,
    "layer_norm_fn": norms.layer_norm_fn,
    "rms_norm_fn": norms.rms_norm_fn,
}


def _probe() -> None:
    from mamba_ssm.ops.selective_scan_interface import (  # type: ignore[import-not-found]
        selective_scan_fn as installed,
    )

    x, B = torch.zeros(1, 4, 2), torch.zeros(1, 4, 2)
    installed(x, x, torch.zeros(4, 4), B, B)


PACKAGE = Package(
    name="mamba_ssm",
    versions=("2.3.2.post1",),
    table={
        "mamba_ssm": {
            "Mamba": Mamba,
            "Mamba2": Mamba2,
            "mamba_inner_fn": mamba_inner_fn,
            "selective_scan_fn": selective_scan_fn,
        },
        "mamba_ssm.modules.mamba_simple": {"Mamba": Mamba},
        "mamba_ssm.modules.mamba2": {"Mamba2": Mamba2},
        "mamba_ssm.modules.mamba2_simple": {"Mamba2Simple": Mamba2Simple},
        "mamba_ssm.ops.selective_scan_interface": {
            "mamba_inner_fn": mamba_inner_fn,
            "mamba_inner_ref": mamba_inner_ref,
            "selective_scan_fn": selective_scan_fn,
            "selective_scan_ref": selective_scan_ref,
        },
        "mamba_ssm.ops.triton.selective_state_update": {
            "selective_state_update": selective_state_update,
            "selective_state_update_ref": selective_state_update_ref,
        },
        "mamba_ssm.ops.triton.ssd_combined": {
            "mamba_chunk_scan_combined": mamba_chunk_scan_combined,
            "mamba_split_conv1d_scan_combined": mamba_split_conv1d_scan_combined,
        },
        "mamba_ssm.ops.triton.layer_norm": _NORMS,
        "mamba_ssm.ops.triton.layernorm": _NORMS,  # its name in 1.x
        "mamba_ssm.ops.triton.layernorm_gated": {
            "LayerNorm": gated.LayerNorm,
            "RMSNorm": gated.RMSNorm,
            "layernorm_fn": gated.layernorm_fn,
            "rmsnorm_fn": gated.rmsnorm_fn,
        },
        "mamba_ssm.utils.generation": {"InferenceParams": InferenceParams},
    },
    file=__file__,
    probe=_probe,
)
