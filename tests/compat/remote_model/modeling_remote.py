"""A model whose code comes with its checkpoint and is written for mamba_ssm: it imports what it needs at the top."""

import torch
import torch.nn.functional as F
from causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from mamba_ssm.ops.selective_scan_interface import mamba_inner_fn, selective_scan_fn
from mamba_ssm.ops.triton.layer_norm import RMSNorm
from mamba_ssm.ops.triton.layernorm_gated import rmsnorm_fn
from mamba_ssm.ops.triton.selective_state_update import selective_state_update
from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from .configuration_remote import RemoteConfig

STATE, HEAD, WIDTH = 8, 16, 4


class FirstMixer(nn.Module):
    """Mamba-1 by its functions."""

    def __init__(self, config):
        super().__init__()
        dim, self.rank = 2 * config.hidden_size, 4
        self.in_proj = nn.Linear(config.hidden_size, 2 * dim, bias=False)
        self.conv1d = nn.Conv1d(dim, dim, WIDTH, groups=dim, padding=WIDTH - 1)
        self.x_proj = nn.Linear(dim, self.rank + 2 * STATE, bias=False)
        self.dt_proj = nn.Linear(self.rank, dim)
        self.A_log = nn.Parameter(torch.arange(1.0, STATE + 1).log().repeat(dim, 1))
        self.D = nn.Parameter(torch.ones(dim))
        self.out_proj = nn.Linear(dim, config.hidden_size, bias=False)

    def forward(self, hidden, states=None):
        A, bias = -torch.exp(self.A_log.float()), self.dt_proj.bias.float()
        weight = self.conv1d.weight.squeeze(1)
        if states is None:
            return mamba_inner_fn(
                self.in_proj(hidden).transpose(1, 2),
                self.conv1d.weight,
                self.conv1d.bias,
                self.x_proj.weight,
                self.dt_proj.weight,
                self.out_proj.weight,
                None,
                A,
                None,
                None,
                self.D.float(),
                delta_bias=bias,
                delta_softplus=True,
            )
        if hidden.shape[1] > 1:
            x, z = self.in_proj(hidden).transpose(1, 2).chunk(2, 1)
            states[0].copy_(F.pad(x, (WIDTH - x.shape[-1], 0)))
            x = causal_conv1d_fn(x, weight, self.conv1d.bias, activation="silu")
            dt, B, C = self.x_proj(x.transpose(1, 2)).split([self.rank, STATE, STATE], -1)
            dt = (self.dt_proj.weight @ dt.transpose(1, 2)).contiguous()
            B, C = B.transpose(1, 2).contiguous(), C.transpose(1, 2).contiguous()
            y, last = selective_scan_fn(x, dt, A, B, C, self.D.float(), z, bias, True, return_last_state=True)
            states[1].copy_(last)
            return self.out_proj(y.transpose(1, 2))
        x, z = self.in_proj(hidden[:, 0]).chunk(2, -1)
        x = causal_conv1d_update(x, states[0], weight, self.conv1d.bias, "silu")
        dt, B, C = self.x_proj(x).split([self.rank, STATE, STATE], -1)
        dt = F.linear(dt, self.dt_proj.weight)
        y = selective_state_update(states[1], x, dt, A, B, C, self.D, z=z, dt_bias=bias, dt_softplus=True)
        return self.out_proj(y)[:, None]

    def empty(self, batch):
        dim = self.D.shape[0]
        return torch.zeros(batch, dim, WIDTH), torch.zeros(batch, dim, STATE)


class SecondMixer(nn.Module):
    """Mamba-2 by its functions."""

    def __init__(self, config):
        super().__init__()
        self.dim = 2 * config.hidden_size
        self.heads = self.dim // HEAD
        self.in_proj = nn.Linear(config.hidden_size, 2 * self.dim + 2 * STATE + self.heads, bias=False)
        self.conv1d = nn.Conv1d(self.dim + 2 * STATE, self.dim + 2 * STATE, WIDTH, groups=self.dim + 2 * STATE)
        self.dt_bias = nn.Parameter(torch.zeros(self.heads))
        self.A_log = nn.Parameter(torch.zeros(self.heads))
        self.D = nn.Parameter(torch.ones(self.heads))
        self.norm_weight = nn.Parameter(torch.ones(self.dim))
        self.out_proj = nn.Linear(self.dim, config.hidden_size, bias=False)

    def forward(self, hidden, states=None):
        A, weight = -torch.exp(self.A_log.float()), self.conv1d.weight.squeeze(1)
        zxbcdt = self.in_proj(hidden)
        if states is None:
            return mamba_split_conv1d_scan_combined(
                zxbcdt,
                weight,
                self.conv1d.bias,
                self.dt_bias,
                A,
                D=self.D,
                chunk_size=256,
                activation="swish",
                rmsnorm_weight=self.norm_weight,
                rmsnorm_eps=1e-5,
                outproj_weight=self.out_proj.weight,
                headdim=HEAD,
                norm_before_gate=False,
            )
        batch, length, _ = hidden.shape
        z, xBC, dt = zxbcdt.split([self.dim, self.dim + 2 * STATE, self.heads], -1)
        if length > 1:
            states[0].copy_(F.pad(xBC.transpose(1, 2), (WIDTH - length, 0)))
            xBC = causal_conv1d_fn(xBC.transpose(1, 2), weight, self.conv1d.bias, activation="swish").transpose(1, 2)
            x, B, C = xBC.split([self.dim, STATE, STATE], -1)
            y, last = mamba_chunk_scan_combined(
                x.view(batch, length, self.heads, HEAD),
                dt,
                A,
                B.view(batch, length, 1, STATE),
                C.view(batch, length, 1, STATE),
                chunk_size=256,
                D=self.D,
                dt_bias=self.dt_bias,
                dt_softplus=True,
                return_final_states=True,
            )
            states[1].copy_(last)
            y = y.view(batch, length, self.dim)
        else:
            xBC = causal_conv1d_update(xBC[:, 0], states[0], weight, self.conv1d.bias, "swish")
            x, B, C = xBC.split([self.dim, STATE, STATE], -1)
            y = selective_state_update(
                states[1],
                x.view(batch, self.heads, HEAD),
                dt[:, 0, :, None].expand(-1, -1, HEAD),
                A[:, None, None].expand(-1, HEAD, STATE),
                B[:, None],
                C[:, None],
                self.D[:, None].expand(-1, HEAD),
                dt_bias=self.dt_bias[:, None].expand(-1, HEAD),
                dt_softplus=True,
            ).view(batch, 1, self.dim)
        return self.out_proj(rmsnorm_fn(y, self.norm_weight, None, z, 1e-5, norm_before_gate=False))

    def empty(self, batch):
        return torch.zeros(batch, self.dim + 2 * STATE, WIDTH), torch.zeros(batch, self.heads, HEAD, STATE)


class RemoteForCausalLM(PreTrainedModel):
    config_class = RemoteConfig

    def __init__(self, config):
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.mixers = nn.ModuleList(
            (FirstMixer, SecondMixer)[number % 2](config) for number in range(config.num_hidden_layers)
        )
        self.norms = nn.ModuleList(RMSNorm(config.hidden_size) for _ in self.mixers)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids, labels=None, states=None):
        hidden, residual = self.embedding(input_ids), None
        for number, (norm, mixer) in enumerate(zip(self.norms, self.mixers, strict=True)):
            hidden, residual = norm(hidden, residual=residual, prenorm=True, residual_in_fp32=True)
            hidden = mixer(hidden, None if states is None else states[number])
        logits = self.head(hidden + residual)
        loss = None if labels is None else F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)

    def empty(self, batch):
        return [mixer.empty(batch) for mixer in self.mixers]
