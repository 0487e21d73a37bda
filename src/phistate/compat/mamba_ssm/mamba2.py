"""mamba_ssm's Mamba2 layer: its parameters, names and initial values, on phistate's scan."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phistate.compat.arguments import on_cpu, wide
from phistate.compat.causal_conv1d import causal_conv1d_update, causal_conv1d_varlen_states
from phistate.compat.mamba_ssm.gated import RMSNorm
from phistate.compat.mamba_ssm.inference import States, states_in
from phistate.compat.mamba_ssm.mamba import one_token, step_bias
from phistate.compat.mamba_ssm.ssd import NO_LIMIT, Limits, split_scan
from phistate.ops.mamba2 import mamba2_step_


class Mamba2(nn.Module):
    """Mamba-2's layer, with the parameters of mamba_ssm's: a checkpoint of either loads in the other.

    Args:
        d_model: width of input and output.
        d_state: N, numbers a channel keeps.
        d_conv: W, taps of the convolution.
        conv_init: its weights are uniform in ± this; None: as torch draws them.
        expand: channels are expand · d_model.
        headdim: P, channels of a head.
        d_ssm: channels that are scanned, the others pass a gated MLP; None: all are scanned.
        ngroups: G, groups of heads that share B and C.
        A_init_range: the initial rates are uniform between these two.
        D_has_hdim: the skip connection has a weight for each channel; False: for each head.
        rmsnorm: a gated norm before the last projection; False: the gate alone.
        norm_before_gate: ``norm(y) · silu(z)``; False: ``norm(y · silu(z))``.
        dt_min: smallest initial step size.
        dt_max: largest.
        dt_init_floor: no initial step size is smaller.
        dt_limit: step sizes are clamped to these two, in the decode step too (in mamba_ssm not there).
        bias: whether the projections have one.
        conv_bias: whether the convolution has one.
        chunk_size: kept as an attribute; the kernels choose their own.
        use_mem_eff_path: kept as an attribute; both paths are one here.
        layer_idx: the layer's place in a cache.
        process_group: None; a layer is not split over processes here.
        sequence_parallel: kept as an attribute.
        device: of the parameters.
        dtype: of the parameters; D stays float32.

    Raises:
        ValueError: numbers of channels, heads or groups that do not fit, or a process group.

    >>> layer = Mamba2(d_model=16, d_state=8, headdim=8)
    >>> layer(torch.zeros(2, 5, 16)).shape
    torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        d_model: int,
        d_state: int = 128,
        d_conv: int = 4,
        conv_init: float | None = None,
        expand: int = 2,
        headdim: int = 64,
        d_ssm: int | None = None,
        ngroups: int = 1,
        A_init_range: tuple[float, float] = (1, 16),
        D_has_hdim: bool = False,
        rmsnorm: bool = True,
        norm_before_gate: bool = False,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        dt_limit: Limits = NO_LIMIT,
        bias: bool = False,
        conv_bias: bool = True,
        chunk_size: int = 256,
        use_mem_eff_path: bool = True,
        layer_idx: int | None = None,
        process_group: Any = None,
        sequence_parallel: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if process_group is not None:
            raise ValueError(f"process_group: got {process_group!r}; takes None: a layer is not split over processes")
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.d_model = d_model
        self.d_state = d_state
        self.d_conv = d_conv
        self.conv_init = conv_init
        self.expand = expand
        self.process_group = process_group
        self.sequence_parallel = sequence_parallel
        self.d_inner = expand * d_model
        self.headdim = headdim
        self.d_ssm = self.d_inner if d_ssm is None else d_ssm
        if self.d_ssm > self.d_inner:
            raise ValueError(f"d_ssm: got {d_ssm}; takes at most expand · d_model = {self.d_inner}")
        self.ngroups = ngroups
        self.nheads = heads_of(self.d_ssm, headdim, ngroups)
        self.D_has_hdim = D_has_hdim
        self.rmsnorm = rmsnorm
        self.norm_before_gate = norm_before_gate
        self.dt_limit = dt_limit
        self.activation = "silu"
        self.chunk_size = chunk_size
        self.use_mem_eff_path = use_mem_eff_path
        self.layer_idx = layer_idx
        self.act = nn.SiLU()
        # In the order of the package's, so that one seed gives the same weights.
        self.in_proj = nn.Linear(d_model, 2 * self.d_inner + 2 * ngroups * d_state + self.nheads, bias=bias, **place)
        self.conv1d = short_convolution(self.d_ssm + 2 * ngroups * d_state, d_conv, conv_bias, conv_init, **place)
        self.dt_bias = nn.Parameter(step_bias(self.nheads, dt_min, dt_max, dt_init_floor, **place))
        self.A_log = nn.Parameter(log_rates(self.nheads, A_init_range, **place))
        self.D = nn.Parameter(torch.ones(self.d_ssm if D_has_hdim else self.nheads, device=device))
        for parameter in (self.dt_bias, self.A_log, self.D):
            parameter._no_weight_decay = True  # type: ignore[attr-defined]  # what training code asks for
        if rmsnorm:
            self.norm = RMSNorm(self.d_ssm, 1e-5, self.d_ssm // ngroups, norm_before_gate, **place)
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=bias, **place)

    def forward(
        self,
        u: Tensor,
        seqlen: int | None = None,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        inference_params: Any = None,
    ) -> Tensor:
        """``[B,L,d_model] -> [B,L,d_model]``; with a cache, its states are filled, or gone on from by one token.

        Args:
            u: ``[B,L,d_model]``, or ``[B·L,d_model]`` beside ``seqlen``.
            seqlen: L; None: as u has it.
            seq_idx: ``[B,L]`` a number per token, of its sequence.
            cu_seqlens: ``[N+1]`` where N sequences begin in a batch of one; a cache then has their N states. Alone it
                keeps them apart too (in mamba_ssm it does so beside seq_idx only).
            inference_params: the cache, or None.
        """
        on_cpu("mamba_ssm", "u", u, "[B,L,D], or [B·L,D] beside seqlen", 3 if seqlen is None else 2)
        rows = u if seqlen is None else u.unflatten(0, (-1, seqlen))
        if cu_seqlens is not None and rows.shape[0] != 1:
            raise ValueError(f"cu_seqlens: got it with batch {rows.shape[0]}; takes batch 1, sequences packed along L")
        states = None
        if inference_params is not None:
            batch = rows.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
            states = self._get_states_from_cache(inference_params, batch)
            if inference_params.seqlen_offset > 0:
                return self.step(rows, *states)[0].view(u.shape)
        zxbcdt = self.in_proj(rows)
        out, pack, last = split_scan(
            zxbcdt,
            self.conv1d.weight.squeeze(1),
            self.conv1d.bias,
            self.dt_bias,
            -self.A_log.to(wide(u)).exp(),
            self._skip(),
            self.chunk_size,
            None,
            seq_idx,
            cu_seqlens,
            self.dt_limit,
            self.activation,
            self.norm.weight if self.rmsnorm else None,
            self.norm.eps if self.rmsnorm else 0.0,
            self.out_proj.weight,
            self.out_proj.bias,
            self.headdim,
            self.ngroups,
            self.norm_before_gate,
        )
        if states is not None:
            with torch.no_grad():
                states[0].copy_(self._last_inputs(zxbcdt, cu_seqlens, seq_idx))
                states[1].copy_(last if pack is None or cu_seqlens is not None else pack.leave(last))
        return out if seqlen is None else out.flatten(0, 1)

    @torch.no_grad()
    def step(self, hidden_states: Tensor, conv_state: Tensor, ssm_state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One token ``[B,1,d_model]``, both states in place: its output and the states. Records no gradient.

        Raises:
            ValueError: more than one token, or states that do not fit.
        """
        one_token(hidden_states)
        gate, value, z, xBC, dt = self._split(self.in_proj(hidden_states.squeeze(1)))
        xBC = causal_conv1d_update(xBC, conv_state, self.conv1d.weight.squeeze(1), self.conv1d.bias, self.activation)
        each = self.ngroups * self.d_state
        x, B, C = xBC.split([self.d_ssm, each, each], dim=-1)
        heads = (self.nheads, self.headdim)
        y = mamba2_step_(
            ssm_state,
            x.unflatten(-1, heads),
            dt,
            -self.A_log.to(wide(x)).exp(),
            B.unflatten(-1, (self.ngroups, -1)),
            C.unflatten(-1, (self.ngroups, -1)),
            self._skip(),
            None if self.rmsnorm else z.unflatten(-1, heads),
            self.dt_bias,
            True,
            self.dt_limit,
        ).flatten(1)
        if self.rmsnorm:
            y = self.norm(y, z)
        if gate.shape[-1]:
            y = torch.cat([F.silu(gate) * value, y], dim=-1)
        return self.out_proj(y).unsqueeze(1), conv_state, ssm_state

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> States:
        """States of zeros: ``[B,HP+2GN,W]`` for the convolution, ``[B,H,P,N]`` for the scan, whatever max_seqlen is."""
        conv = self.conv1d.weight.new_zeros(batch_size, self.d_conv, self.conv1d.weight.shape[0], dtype=dtype)
        shape = (batch_size, self.nheads, self.headdim, self.d_state)
        return conv.transpose(1, 2), self.in_proj.weight.new_zeros(shape, dtype=dtype)

    def _split(self, zxbcdt: Tensor) -> tuple[Tensor, ...]:
        """Gate and value of the MLP, the gate z, what is convolved, and the step sizes."""
        mlp = self.d_inner - self.d_ssm
        return zxbcdt.split([mlp, mlp, self.d_ssm, self.conv1d.weight.shape[0], self.nheads], dim=-1)

    def _skip(self) -> Tensor:
        return self.D.view(self.nheads, self.headdim) if self.D_has_hdim else self.D

    def _last_inputs(self, zxbcdt: Tensor, cu_seqlens: Tensor | None, seq_idx: Tensor | None) -> Tensor:
        """What the convolution goes on from, ``[·,HP+2GN,W]``, zeros before the first input of the last sequence."""
        xBC = self._split(zxbcdt)[3]
        if cu_seqlens is not None:
            return causal_conv1d_varlen_states(xBC.squeeze(0), cu_seqlens, self.d_conv)
        if seq_idx is not None:
            own = (seq_idx == seq_idx[:, -1:]).flip(1).cumprod(1).flip(1)
            xBC = xBC * own.unsqueeze(-1)
        return F.pad(xBC.transpose(1, 2), (self.d_conv - xBC.shape[1], 0))

    def _get_states_from_cache(self, inference_params: Any, batch_size: int, initialize_states: bool = False) -> States:
        return states_in(
            inference_params, self.layer_idx, lambda: self.allocate_inference_cache(batch_size, 0), initialize_states
        )


def heads_of(channels: int, headdim: int, ngroups: int) -> int:
    """How many heads there are.

    Raises:
        ValueError: they do not come out whole, or not in whole groups.
    """
    if channels % headdim:
        raise ValueError(f"headdim: got {headdim}; takes a divisor of the {channels} channels")
    if (channels // headdim) % ngroups:
        raise ValueError(f"ngroups: got {ngroups}; takes a divisor of the {channels // headdim} heads")
    return channels // headdim


def short_convolution(channels: int, width: int, bias: bool, spread: float | None, **place: Any) -> nn.Conv1d:
    """The convolution's parameters, drawn as mamba_ssm draws them."""
    conv = nn.Conv1d(channels, channels, width, groups=channels, padding=width - 1, bias=bias, **place)
    if spread is not None:
        nn.init.uniform_(conv.weight, -spread, spread)
    return conv


def log_rates(heads: int, between: tuple[float, float], device: Any, dtype: Any) -> Tensor:
    """``[heads]`` logarithms of rates that are uniform between two.

    Raises:
        ValueError: the two are no range of positive rates.
    """
    low, high = between
    if not 0 < low <= high:
        raise ValueError(f"A_init_range: got {between}; takes two rates, 0 < the first ≤ the second")
    return torch.empty(heads, device=device).uniform_(low, high).log().to(dtype)
