"""mamba_ssm's Mamba2Simple: Mamba2 without its options, with initial states that can be learned."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from phistate.compat.arguments import on_cpu, wide
from phistate.compat.mamba_ssm.gated import RMSNorm
from phistate.compat.mamba_ssm.mamba import step_bias
from phistate.compat.mamba_ssm.mamba2 import heads_of, log_rates, short_convolution
from phistate.compat.mamba_ssm.ssd import NO_LIMIT, Limits, mamba_split_conv1d_scan_combined


class Mamba2Simple(nn.Module):
    """Mamba-2's layer without a cache, with the parameters of mamba_ssm's.

    Args:
        d_model: width of input and output.
        d_state: N, numbers a channel keeps.
        d_conv: W, taps of the convolution.
        conv_init: its weights are uniform in ± this; None: as torch draws them.
        expand: channels are expand · d_model.
        headdim: P, channels of a head.
        ngroups: G, groups of heads that share B and C; the norm has as many (in mamba_ssm on the fused path only).
        A_init_range: the initial rates are uniform between these two.
        dt_min: smallest initial step size.
        dt_max: largest.
        dt_init_floor: no initial step size is smaller.
        dt_limit: step sizes are clamped to these two.
        learnable_init_states: ``init_states [H,P,N]``, zeros at first, is a parameter.
        activation: of the convolution, ``"swish"`` or ``"silu"``, the same.
        bias: whether the projections have one.
        conv_bias: whether the convolution has one.
        chunk_size: kept as an attribute; the kernels choose their own.
        use_mem_eff_path: kept as an attribute; both paths are one here.
        layer_idx: kept as an attribute.
        device: of the parameters.
        dtype: of the parameters; D stays float32.

    Raises:
        ValueError: numbers of channels, heads or groups that do not fit.

    >>> Mamba2Simple(d_model=16, d_state=8, headdim=8)(torch.zeros(2, 5, 16)).shape
    torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        d_model: int,
        d_state: int = 64,
        d_conv: int = 4,
        conv_init: float | None = None,
        expand: int = 2,
        headdim: int = 128,
        ngroups: int = 1,
        A_init_range: tuple[float, float] = (1, 16),
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        dt_limit: Limits = NO_LIMIT,
        learnable_init_states: bool = False,
        activation: str = "swish",
        bias: bool = False,
        conv_bias: bool = True,
        chunk_size: int = 256,
        use_mem_eff_path: bool = True,
        layer_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.d_model = d_model
        self.d_state = d_state
        self.d_conv = d_conv
        self.conv_init = conv_init
        self.expand = expand
        self.d_inner = expand * d_model
        self.headdim = headdim
        self.ngroups = ngroups
        self.nheads = heads_of(self.d_inner, headdim, ngroups)
        self.dt_limit = dt_limit
        self.learnable_init_states = learnable_init_states
        self.activation = activation
        self.chunk_size = chunk_size
        self.use_mem_eff_path = use_mem_eff_path
        self.layer_idx = layer_idx
        self.act = nn.SiLU()
        self.in_proj = nn.Linear(d_model, 2 * self.d_inner + 2 * ngroups * d_state + self.nheads, bias=bias, **place)
        self.conv1d = short_convolution(self.d_inner + 2 * ngroups * d_state, d_conv, conv_bias, conv_init, **place)
        if learnable_init_states:
            self.init_states = nn.Parameter(torch.zeros(self.nheads, headdim, d_state, **place))
            self.init_states._no_weight_decay = True  # type: ignore[attr-defined]
        self.dt_bias = nn.Parameter(step_bias(self.nheads, dt_min, dt_max, dt_init_floor, **place))
        self.A_log = nn.Parameter(log_rates(self.nheads, A_init_range, **place))
        self.D = nn.Parameter(torch.ones(self.nheads, device=device))
        for parameter in (self.dt_bias, self.A_log, self.D):
            parameter._no_weight_decay = True  # type: ignore[attr-defined]  # what training code asks for
        self.norm = RMSNorm(self.d_inner, 1e-5, norm_before_gate=False, **place)
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=bias, **place)

    def forward(self, u: Tensor, seq_idx: Tensor | None = None) -> Tensor:
        """``[B,L,d_model] -> [B,L,d_model]``; ``seq_idx [B,L]`` numbers packed sequences."""
        on_cpu("mamba_ssm", "u", u, "[B,L,D]", 3)
        begin = None
        if self.learnable_init_states:
            begin = self.init_states.expand(u.shape[0], -1, -1, -1)
        out = mamba_split_conv1d_scan_combined(
            self.in_proj(u),
            self.conv1d.weight.squeeze(1),
            self.conv1d.bias,
            self.dt_bias,
            -self.A_log.to(wide(u)).exp(),
            self.D,
            self.chunk_size,
            initial_states=begin,
            seq_idx=seq_idx,
            dt_limit=self.dt_limit,
            activation=self.activation,
            rmsnorm_weight=self.norm.weight,
            rmsnorm_eps=self.norm.eps,
            outproj_weight=self.out_proj.weight,
            outproj_bias=self.out_proj.bias,
            headdim=self.headdim,
            ngroups=self.ngroups,
            norm_before_gate=False,
        )
        assert isinstance(out, Tensor)
        return out
