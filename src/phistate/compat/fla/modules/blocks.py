"""fla's modules beside its norms, for machines that cannot import it: same constructors, parameters and calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from phistate.compat.causal_conv1d import ACTIVATIONS
from phistate.compat.fla.modules import activations, conv, losses
from phistate.compat.fla.modules.rotary import rotary_embedding
from phistate.ops.checks import check_choice


class ShortConvolution(nn.Conv1d):
    """Each channel filtered by its own few taps and activated, with a cache ``[N,D,W]`` of the last inputs.

    ``backend`` names fla's, all of which are this one here.
    """

    def __init__(
        self,
        hidden_size: int,
        kernel_size: int,
        bias: bool = False,
        activation: str | None = "silu",
        backend: str | None = "triton",
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs.pop("use_fast_conv1d", None)  # an old name of a backend
        if kwargs:
            raise TypeError(f"{next(iter(kwargs))}: got an argument that ShortConvolution does not have")
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation: got {activation!r}; takes 'silu', 'swish' or None")
        check_choice("backend", str(backend), ("cuda", "triton"))
        super().__init__(
            hidden_size,
            hidden_size,
            kernel_size,
            padding=kernel_size - 1,
            groups=hidden_size,
            bias=bias,
            device=device,
            dtype=dtype,
        )
        self.hidden_size = hidden_size
        self.activation = activation
        self.backend = backend

    @property
    def state_size(self) -> int:
        """How many numbers the cache of one sequence holds."""
        return self.hidden_size * self.kernel_size[0]

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        residual: Tensor | None = None,
        mask: Tensor | None = None,
        cache: Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
        chunk_indices: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """``x [B,T,D]`` filtered, and the cache if asked; one token a sequence without gradients updates it in place.

        Raises:
            ValueError: both ``mask [B,T]``, which sets padded inputs to 0, and ``cu_seqlens``.
        """
        if mask is not None:
            if cu_seqlens is not None:
                raise ValueError("mask: got one beside cu_seqlens; takes one of them")
            x = x * mask.unsqueeze(-1).to(x.dtype)
        one_each = x.shape[1] == 1 if cu_seqlens is None else bool((cu_seqlens.diff() == 1).all())
        if one_each and not torch.is_grad_enabled():
            return self.step(x, residual, cache, output_final_state, cu_seqlens)
        return conv.causal_conv1d(
            *(x, self.weight.squeeze(1), self.bias, residual, cache, output_final_state, self.activation),
            cu_seqlens=cu_seqlens,
            **kwargs,
        )

    def step(
        self,
        x: Tensor,
        residual: Tensor | None,
        cache: Tensor | None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """One token a sequence, ``[N,1,D]`` or packed ``[1,N,D]``, with the cache, or one of zeros, in place."""
        if cache is None:
            cache = x.new_zeros(x.shape[0] * x.shape[1], *self.weight.squeeze(1).shape)
        y, cache = conv.causal_conv1d_update(x, cache, residual, self.weight.squeeze(1), self.bias, self.activation)
        return y, cache if output_final_state else None


class RotaryEmbedding(nn.Module):
    """Queries and keys turned by their positions; with ``scale_base`` also scaled by them (XPos, arXiv:2212.10554)."""

    inv_freq: Tensor

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        scale_base: float | None = None,
        interleaved: bool = False,
        pos_idx_in_fp32: bool = True,
        device: torch.device | None = None,
    ) -> None:
        if dim % 2:
            raise ValueError(f"dim: got {dim}; takes an even number")
        super().__init__()
        self.dim = dim
        self.base = float(base)
        self.scale_base = scale_base
        self.interleaved = interleaved
        self.pos_idx_in_fp32 = pos_idx_in_fp32
        self.register_buffer("inv_freq", self._frequencies(device), persistent=False)
        self._tables: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    def _frequencies(self, device: torch.device | None) -> Tensor:
        return self.base ** -(torch.arange(0, self.dim, 2, dtype=torch.float32, device=device) / self.dim)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        seqlen_offset: int | Tensor = 0,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        chunk_indices: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """``q, k [B,T,H,D]`` turned, from position ``seqlen_offset`` on, by tables of ``max_seqlen`` or more."""
        length = q.shape[1] + int(torch.as_tensor(seqlen_offset).max())
        cos, sin, cos_k, sin_k = self._at_least(max(length, int(max_seqlen or 0)), q)
        at: dict[str, Any] = {"seqlen_offsets": seqlen_offset, "cu_seqlens": cu_seqlens}
        turned = rotary_embedding(q, cos, sin, self.interleaved, **at)
        return turned, rotary_embedding(k, cos_k, sin_k, self.interleaved, **at)

    def _at_least(self, length: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Cosines and sines of positions 0 to ``length`` or further: for queries, then for keys."""
        held = self._tables
        if (
            held is not None
            and len(held[0]) >= length
            and held[0].dtype == like.dtype
            and held[0].device == like.device
        ):
            return held
        # A model in bfloat16 has turned the buffer into it, which is too coarse for large positions.
        frequencies = self._frequencies(like.device) if self.pos_idx_in_fp32 else self.inv_freq
        position = torch.arange(length, device=like.device, dtype=frequencies.dtype)
        angles = torch.outer(position, frequencies)
        scale = torch.ones_like(angles)
        if self.scale_base is not None:
            pair = torch.arange(0, self.dim, 2, dtype=torch.float32, device=like.device)
            power = (position.float() - length // 2) / self.scale_base
            scale = ((pair + 0.4 * self.dim) / (1.4 * self.dim)) ** power.unsqueeze(1)
        cos, sin = angles.cos(), angles.sin()
        dtype = like.dtype
        self._tables = (
            (cos * scale).to(dtype),
            (sin * scale).to(dtype),
            (cos / scale).to(dtype),
            (sin / scale).to(dtype),
        )
        return self._tables


class FusedCrossEntropyLoss(nn.Module):
    """:func:`~phistate.compat.fla.modules.losses.cross_entropy_loss`, reduced over the targets that count."""

    def __init__(
        self,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        logit_scale: float = 1.0,
        lse_square_scale: float = 0.0,
        logit_softcapping: float | None = None,
        inplace_backward: bool = False,
        process_group: Any = None,
        return_z_loss: bool = False,
    ) -> None:
        check_choice("reduction", reduction, ("mean", "sum", "none"))
        super().__init__()
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.logit_scale = logit_scale
        self.lse_square_scale = lse_square_scale
        self.logit_softcapping = logit_softcapping
        self.inplace_backward = inplace_backward
        self.process_group = process_group
        self.return_z_loss = return_z_loss

    forward = losses.cross_entropy_module


class FusedLinearCrossEntropyLoss(nn.Module):
    """:func:`~phistate.compat.fla.modules.losses.fused_linear_cross_entropy_loss` of ``x [B,T,H]``."""

    def __init__(
        self,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        logit_scale: float = 1.0,
        logit_softcapping: float | None = None,
        num_chunks: int = 8,
        reduction: str = "mean",
        use_l2warp: bool = False,
        l2_penalty_factor: float = 1e-4,
        accumulate_grad_in_fp32: bool = True,
        process_group: Any = None,
    ) -> None:
        check_choice("reduction", reduction, ("mean", "sum"))
        super().__init__()
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.logit_scale = logit_scale
        self.logit_softcapping = logit_softcapping
        self.num_chunks = num_chunks
        self.reduction = reduction
        self.use_l2warp = use_l2warp
        self.l2_penalty_factor = l2_penalty_factor
        self.accumulate_grad_in_fp32 = accumulate_grad_in_fp32
        self.process_group = process_group

    def forward(self, x: Tensor, target: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The loss of ``x [B,T,H]`` projected by ``weight [V,H]`` against ``target [B,T]``."""
        return losses.fused_linear_cross_entropy_loss(
            *(x.flatten(0, -2), target.flatten(), weight, bias, self.ignore_index, self.label_smoothing),
            *(self.logit_scale, self.logit_softcapping, self.num_chunks, self.reduction, self.use_l2warp),
            *(self.l2_penalty_factor, self.accumulate_grad_in_fp32, self.process_group),
        )


class FusedKLDivLoss(nn.Module):
    """:func:`~phistate.compat.fla.modules.losses.fused_kl_div_loss` as a module."""

    def __init__(self, reduction: str = "batchmean", accumulate_grad_in_fp32: bool = True) -> None:
        check_choice("reduction", reduction, ("batchmean",))
        super().__init__()
        self.reduction = reduction
        self.accumulate_grad_in_fp32 = accumulate_grad_in_fp32

    def forward(self, x: Tensor, target_x: Tensor, weight: Tensor, target_weight: Tensor) -> Tensor:
        """The divergence of the student ``x weightᵀ`` from the teacher."""
        return losses.fused_kl_div_loss(
            x, target_x, weight, target_weight, self.reduction, self.accumulate_grad_in_fp32
        )


class GatedMLP(nn.Module):
    """``down(act(gate(x)) up(x))`` with ``hidden_act`` ``"swish"`` or ``"powlu"``."""

    def __init__(
        self,
        hidden_size: int,
        hidden_ratio: int | None = None,
        intermediate_size: int | None = None,
        hidden_act: str = "swish",
        fuse_swiglu: bool = True,
        powglu_power: float = 3.0,
    ) -> None:
        check_choice("hidden_act", hidden_act, ("swish", "powlu"))
        super().__init__()
        self.hidden_size = hidden_size
        self.hidden_ratio = 4 if hidden_ratio is None else hidden_ratio
        # As many parameters as hidden_ratio · D², in whole blocks of 256 channels.
        blocks = -(-int(hidden_size * self.hidden_ratio * 2 / 3) // 256)
        self.intermediate_size = 256 * blocks if intermediate_size is None else intermediate_size
        self.hidden_act = hidden_act
        self.fuse_swiglu = fuse_swiglu
        self.powglu_power = powglu_power
        self.gate_proj = nn.Linear(hidden_size, self.intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        """Of ``x [...,D]``; a block of fla's hands on arguments that are not for it."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self.hidden_act == "powlu":
            return self.down_proj(activations.powglu(gate, up, self.powglu_power))
        return self.down_proj(activations.swiglu(gate, up))
