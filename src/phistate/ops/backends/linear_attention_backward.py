"""Linear attention's backward kernel as a torch operator, and the derivatives of ``phistate::linear_attention``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from phistate.features import feature_map
from phistate.ops.backends import abi, derivatives, native
from phistate.ops.backends.base import Call
from phistate.ops.backends.linear_attention import HEAD, SCHEMA, contiguous, dense, dense_side, head, library, sizes
from phistate.ops.backends.torch import TorchBackend

_BACKWARD = abi.form(
    abi.LinearAttention,
    f"{HEAD} o s z checkpoints denominators d_o d_s d_z d_q d_k d_v d_decay d_beta d_s0 d_z0 qk_l2norm map map_scale "
    "erase d_erase",
)

library.define(
    f"linear_attention_backward({SCHEMA}, Tensor d_o, Tensor? d_s, Tensor? d_z, Tensor o, Tensor final_s, "
    "Tensor final_z, Tensor checkpoints, Tensor denominators, bool wants_decay, bool wants_beta, bool wants_erase, "
    "bool wants_s, bool wants_z) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
    erase: Tensor | None,
    s: Tensor | None,
    z: Tensor | None,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    normalize: bool,
    causal: bool,
    delta: bool,
    qk_l2norm: bool,
    map: str | None,
    map_scale: float,
    d_o: Tensor,
    d_s: Tensor | None,
    d_z: Tensor | None,
    o: Tensor,
    final_s: Tensor,
    final_z: Tensor,
    checkpoints: Tensor,
    denominators: Tensor,
    wants_decay: bool,
    wants_beta: bool,
    wants_erase: bool,
    wants_s: bool,
    wants_z: bool,
) -> tuple[Tensor, ...]:
    q, k, v, d_o, o = dense(q), dense(k), dense(v), dense(d_o), dense(o)
    decay, erase = dense_side(decay), dense_side(erase)
    s, z = contiguous(s), contiguous(z)
    d_s, d_z = contiguous(d_s), contiguous(d_z)
    final_s, final_z = final_s.contiguous(), final_z.contiguous()
    outputs = _gradients(q, k, v, decay, beta, erase, s, z, wants_decay, wants_beta, wants_erase, wants_s, wants_z)
    d_q, d_k, d_v, d_decay, d_beta, d_erase, d_s0, d_z0 = outputs
    # Heads whose gradient gathers over several states or readers do so in float32.
    N, Hs, Ho = sizes(q, k, v, cu_seqlens)
    gathered = (d_q, d_k, d_v, *((d_erase,) if wants_erase else ()))
    wide = [
        x.new_empty(x.shape, dtype=torch.float32) if x.shape[2] != Ho and x.dtype != torch.float32 else x
        for x in gathered
    ]
    d_heads = d_decay
    if wants_decay and decay is not None and decay.ndim == 1:
        d_heads = q.new_empty(N, Hs, dtype=torch.float32)
    fields = (
        *head(q, k, v, decay, beta, s, z, mask, cu_seqlens, scale, normalize, causal),
        *abi.view(o),
        final_s.data_ptr(),
        final_z.data_ptr() if normalize else 0,
        checkpoints.data_ptr() if checkpoints.numel() else 0,
        denominators.data_ptr() if denominators.numel() else 0,
        *abi.view(d_o),
        abi.address(d_s),
        abi.address(d_z) if normalize else 0,
        *abi.view(wide[0]),
        *abi.view(wide[1]),
        *abi.view(wide[2]),
        *(
            (abi.view(d_heads) if d_heads.ndim > 2 else (d_heads.data_ptr(), 0, 0, 0, 1))
            if wants_decay
            else abi.ABSENT_VIEW
        ),
        *(abi.view(d_beta) if wants_beta else abi.ABSENT_VIEW),
        d_s0.data_ptr() if wants_s else 0,
        d_z0.data_ptr() if wants_z else 0,
        qk_l2norm,
        *(abi.MAPS[map], map_scale),
        *abi.view(erase),
        *(abi.view(wide[3]) if wants_erase else abi.ABSENT_VIEW),
    )
    if native.kernel("delta_backward" if delta else "additive_backward")(_BACKWARD.pack(*fields)):
        native.check(-1)
    for x, y in zip(gathered, wide, strict=True):
        if x is not y:
            x.copy_(y)
    if d_heads is not d_decay:
        d_decay.copy_(d_heads.sum(0))
    return outputs


def _gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
    erase: Tensor | None,
    s: Tensor | None,
    z: Tensor | None,
    wants_decay: bool,
    wants_beta: bool,
    wants_erase: bool,
    wants_s: bool,
    wants_z: bool,
) -> tuple[Tensor, ...]:
    def like(x: Tensor | None, wanted: bool = True) -> Tensor:
        return q.new_empty(0) if x is None or not wanted else x.new_empty(x.shape)

    return (
        like(q),
        like(k),
        like(v),
        like(decay, wants_decay),
        like(beta, wants_beta),
        like(erase, wants_erase),
        like(s, wants_s),
        like(z, wants_z),
    )


def _fake(*arguments: Any) -> tuple[Tensor, ...]:
    return _gradients(*arguments[:8], *arguments[-5:])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, decay, beta, erase, s, z, mask, cu_seqlens, *options, _keep = inputs
    o, final_s, final_z, checkpoints, denominators = output
    _scale, normalize, causal, *_ = options
    # The output is read again only where it was a quotient, the final state only where every query read it.
    void = q.new_empty(0)
    held = (o if normalize else void, void if causal else final_s, void if causal else final_z)
    ctx.save_for_backward(*(q, k, v, decay, beta, erase, s, z, mask, cu_seqlens), *held, checkpoints, denominators)
    ctx.options = options
    ctx.mark_non_differentiable(checkpoints, denominators)
    ctx.set_materialize_grads(False)  # zeros for the checkpoints' would be as large as they


def _backward(
    ctx: Any, d_o: Tensor | None, d_s: Tensor | None, d_z: Tensor | None, *_: None
) -> tuple[Tensor | None, ...]:
    *inputs, mask, cu_seqlens, o, final_s, final_z, checkpoints, denominators = ctx.saved_tensors
    q, k, v, *_ = inputs
    if torch.is_grad_enabled():  # create_graph=True: what is computed here will be differentiated
        form = functools.partial(_torch_form, mask, cu_seqlens, ctx.options)
        found = derivatives.gradients(form, inputs, ctx.needs_input_grad[:8], (d_o, d_s, d_z))
        return (*found, *(None,) * 10)
    wanted = ctx.needs_input_grad[3:8]
    if d_o is None:
        d_o = q.new_zeros(*q.shape[:2], sizes(q, k, v, cu_seqlens)[2], v.shape[3])
    if o.numel() == 0:
        o = d_o
    d_q, d_k, d_v, *side = torch.ops.phistate.linear_attention_backward(
        *(*inputs, mask, cu_seqlens),
        *ctx.options,
        *(d_o, d_s, d_z, o, final_s, final_z, checkpoints, denominators),
        *wanted,
    )
    side = [x if want else None for x, want in zip(side, wanted, strict=True)]
    return (d_q, d_k, d_v, *side, *(None,) * 10)


def _torch_form(
    mask: Tensor | None, cu_seqlens: Tensor | None, options: Sequence[Any], *inputs: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """o, s and z of the call whose options these are, in plain PyTorch."""
    scale, normalize, causal, delta, qk_l2norm, map, map_scale = options
    q, k, v, decay, beta, erase, s, z = inputs
    assert q is not None
    assert k is not None
    assert v is not None
    call = Call(
        q,
        k,
        v,
        decay,
        beta,
        erase,
        write="delta" if delta else "add",
        normalize=normalize,
        scale=scale,
        causal=causal,
        qk_l2norm=qk_l2norm,
        s=s,
        z=z,
        mask=mask,
        cu_seqlens=cu_seqlens,
        feature_map=None if map is None else feature_map(map, head_dim=q.shape[3], scale=map_scale**2),
    )
    return TorchBackend().run(call)[:3]


library.impl("linear_attention_backward", _run, "CPU")
torch.library.register_fake("phistate::linear_attention_backward", _fake, lib=library)
torch.library.register_autograd("phistate::linear_attention", _backward, setup_context=_setup, lib=library)

linear_attention = torch.ops.phistate.linear_attention
"""The forward operator, differentiable."""
