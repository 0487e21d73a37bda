"""mamba_ssm's Mamba layer: its parameters, names and initial values, on phistate's scan."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phistate.compat.arguments import on_cpu, wide
from phistate.compat.causal_conv1d import causal_conv1d_update
from phistate.compat.mamba_ssm.inference import States, states_in
from phistate.compat.mamba_ssm.selective import selective_state_update
from phistate.ops.causal_conv1d import causal_conv1d
from phistate.ops.selective_scan import selective_scan


def step_bias(count: int, low: float, high: float, floor: float, **place: Any) -> Tensor:
    """``[count]`` biases whose softplus is uniform in the logarithm from ``low`` to ``high``, and ``floor`` or more."""
    dt = (torch.rand(count, **place) * (math.log(high) - math.log(low)) + math.log(low)).exp().clamp(min=floor)
    return dt + torch.log(-torch.expm1(-dt))  # softplus turned round


class Mamba(nn.Module):
    """Mamba-1's layer, with the parameters of mamba_ssm's: a checkpoint of either loads in the other.

    Args:
        d_model: width of input and output.
        d_state: N, numbers a channel keeps.
        d_conv: W, taps of the convolution.
        expand: channels are expand · d_model.
        dt_rank: R, numbers the step sizes are made of; ``"auto"``: d_model / 16, rounded up.
        dt_min: smallest initial step size.
        dt_max: largest.
        dt_init: ``"random"`` or ``"constant"``: weights of the step sizes.
        dt_scale: of these weights.
        dt_init_floor: no initial step size is smaller.
        conv_bias: whether the convolution has a bias.
        bias: whether the projections have one.
        use_fast_path: kept as an attribute; both paths are one here.
        layer_idx: the layer's place in a cache.
        device: of the parameters.
        dtype: of the parameters; A_log and D stay float32.

    Raises:
        ValueError: an unknown dt_init.

    >>> layer = Mamba(d_model=16)
    >>> layer(torch.zeros(2, 5, 16)).shape
    torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        d_model: int,
        d_state: int = 16,
        d_conv: int = 4,
        expand: int = 2,
        dt_rank: int | str = "auto",
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init: str = "random",
        dt_scale: float = 1.0,
        dt_init_floor: float = 1e-4,
        conv_bias: bool = True,
        bias: bool = False,
        use_fast_path: bool = True,
        layer_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.d_model = d_model
        self.d_state = d_state
        self.d_conv = d_conv
        self.expand = expand
        self.d_inner = int(expand * d_model)
        if isinstance(dt_rank, str) and dt_rank != "auto":
            raise ValueError(f"dt_rank: got {dt_rank!r}; takes a number or 'auto'")
        self.dt_rank = math.ceil(d_model / 16) if isinstance(dt_rank, str) else dt_rank
        self.use_fast_path = use_fast_path
        self.layer_idx = layer_idx
        self.activation = "silu"
        self.act = nn.SiLU()
        # In the order of the package's, so that one seed gives the same weights.
        self.in_proj = nn.Linear(d_model, 2 * self.d_inner, bias=bias, **place)
        self.conv1d = nn.Conv1d(
            self.d_inner, self.d_inner, d_conv, groups=self.d_inner, padding=d_conv - 1, bias=conv_bias, **place
        )
        self.x_proj = nn.Linear(self.d_inner, self.dt_rank + 2 * d_state, bias=False, **place)
        self.dt_proj = nn.Linear(self.dt_rank, self.d_inner, **place)
        spread = self.dt_rank**-0.5 * dt_scale
        if dt_init == "constant":
            nn.init.constant_(self.dt_proj.weight, spread)
        elif dt_init == "random":
            nn.init.uniform_(self.dt_proj.weight, -spread, spread)
        else:
            raise ValueError(f"dt_init: got {dt_init!r}; takes 'random' or 'constant'")
        with torch.no_grad():
            self.dt_proj.bias.copy_(step_bias(self.d_inner, dt_min, dt_max, dt_init_floor, **place))
        rates = torch.arange(1, d_state + 1, dtype=torch.float32, device=device)
        self.A_log = nn.Parameter(rates.log().repeat(self.d_inner, 1))
        self.D = nn.Parameter(torch.ones(self.d_inner, device=device))
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=bias, **place)
        # What training code asks parameters for.
        self.dt_proj.bias._no_reinit = True  # type: ignore[attr-defined]
        self.A_log._no_weight_decay = True  # type: ignore[attr-defined]
        self.D._no_weight_decay = True  # type: ignore[attr-defined]

    def forward(self, hidden_states: Tensor, inference_params: Any = None) -> Tensor:
        """``[B,L,d_model] -> [B,L,d_model]``; with a cache, its states are filled, or gone on from by one token."""
        on_cpu("mamba_ssm", "hidden_states", hidden_states, "[B,L,D]", 3)
        states = None
        if inference_params is not None:
            states = self._get_states_from_cache(inference_params, hidden_states.shape[0])
            if inference_params.seqlen_offset > 0:
                return self.step(hidden_states, *states)[0]
        x, z = self.in_proj(hidden_states).chunk(2, dim=-1)
        if states is not None:
            # Zeros stand before the first of fewer tokens than it keeps; of more, the last are kept.
            states[0].copy_(F.pad(x.detach().transpose(1, 2), (self.d_conv - x.shape[1], 0)))
        x = causal_conv1d(x, self.conv1d.weight.squeeze(1), self.conv1d.bias, "silu")
        delta, B, C = self.x_proj(x).split([self.dt_rank, self.d_state, self.d_state], dim=-1)
        delta = F.linear(delta, self.dt_proj.weight)
        y, last = selective_scan(
            x,
            delta,
            self._rates(x),
            B,
            C,
            self.D.to(wide(x)),
            z,
            self.dt_proj.bias.to(wide(x)),
            delta_softplus=True,
            return_state=True,
        )
        if states is not None:
            states[1].copy_(last.detach())
        return self.out_proj(y)

    @torch.no_grad()
    def step(self, hidden_states: Tensor, conv_state: Tensor, ssm_state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One token ``[B,1,d_model]``, both states in place: its output and the states. Records no gradient.

        Raises:
            ValueError: more than one token, or states that do not fit.
        """
        one_token(hidden_states)
        x, z = self.in_proj(hidden_states.squeeze(1)).chunk(2, dim=-1)
        x = causal_conv1d_update(x, conv_state, self.conv1d.weight.squeeze(1), self.conv1d.bias, "silu")
        delta, B, C = self.x_proj(x).split([self.dt_rank, self.d_state, self.d_state], dim=-1)
        delta = F.linear(delta, self.dt_proj.weight)
        bias = self.dt_proj.bias
        y = selective_state_update(ssm_state, x, delta, self._rates(x), B, C, self.D, z, bias, dt_softplus=True)
        return self.out_proj(y).unsqueeze(1), conv_state, ssm_state

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> States:
        """States of zeros: ``[B,D,W]`` for the convolution, ``[B,D,N]`` for the scan, whatever max_seqlen is."""
        conv = self.conv1d.weight.new_zeros(batch_size, self.d_inner, self.d_conv, dtype=dtype)
        return conv, self.dt_proj.weight.new_zeros(batch_size, self.d_inner, self.d_state, dtype=dtype)

    def _rates(self, x: Tensor) -> Tensor:
        return -self.A_log.to(wide(x)).exp()

    def _get_states_from_cache(self, inference_params: Any, batch_size: int, initialize_states: bool = False) -> States:
        return states_in(
            inference_params, self.layer_idx, lambda: self.allocate_inference_cache(batch_size, 0), initialize_states
        )


def one_token(hidden_states: Tensor) -> None:
    """``hidden_states`` is ``[B,1,D]`` in memory.

    Raises:
        ValueError: it is not.
    """
    on_cpu("mamba_ssm", "hidden_states", hidden_states, "[B,1,D]", 3)
    if hidden_states.shape[1] != 1:
        raise ValueError(f"hidden_states: got {hidden_states.shape[1]} tokens after a cache; takes one at a time")
