"""Backend ``cpu``: the native kernels, for tensors in memory."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from phistate.ops.backends import abi, derivatives, native
from phistate.ops.backends.base import Call, Result, without_padding
from phistate.ops.backends.linear_attention_backward import linear_attention
from phistate.ops.log_space import by_vector_decay
from phistate.values import overwritten

# Asked once, at import: a compiler's trace cannot ask a library. A PHISTATE_ISA that cannot be honoured raises here.
_MISSING = native.why_not()


class CpuBackend:
    """Runs both writes in float32, bfloat16 and float16, on whatever instruction set the machine has."""

    name = "cpu"

    def reasons_against(self, call: Call) -> list[str]:
        """Why the kernels cannot run ``call``; empty when they can."""
        reasons = [] if _MISSING is None else [_MISSING]
        if call.q.device.type != "cpu":
            reasons.append(f"tensors are on {call.q.device}, the kernels read memory")
        if call.q.dtype not in abi.DTYPES:
            reasons.append(f"{call.q.dtype}: the kernels compute in float32")
        if call.form not in ("auto", "chunked"):
            reasons.append(f"form={call.form!r}: the kernels are chunked")
        if 0 in (call.q.shape[0], *call.q.shape[2:], *call.k.shape[2:], *call.v.shape[2:]):
            reasons.append("a dimension other than time is empty")
        reasons += derivatives.reasons_against(*_inputs(call))
        return reasons

    def run(self, call: Call) -> Result:
        """See :class:`~phistate.ops.backends.base.Backend`."""
        if call.log_features:
            return self._run_log(call)
        delta, phi = call.write == "delta", call.feature_map
        if phi is not None and (delta or call.qk_l2norm or phi.pointwise not in abi.MAPS):  # no kernel maps on the way
            call, phi = call.mapped(), None
        if call.qk_l2norm and not delta:  # the delta kernels do it themselves
            call = replace(call, q=_l2norm(call.q, call.mask), k=_l2norm(call.k, call.mask))
        inputs = _inputs(call)
        keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
        o, s, z, _, _ = linear_attention(
            *inputs,
            *(
                call.mask,
                call.cu_seqlens,
                call.scale,
                call.normalize,
                call.causal,
                delta,
                call.qk_l2norm and delta,
                None if phi is None else phi.pointwise,
                0.0 if phi is None else phi.scale**0.5,
                keep,
            ),
        )
        return Result(o, s, z if call.normalize else None)

    def _run_log(self, call: Call) -> Result:
        """Log features: in one kernel, or with gradients or a decay of their own as a vector decay."""
        inputs = (call.v, call.beta, call.s, call.z)
        learns = any(x is not None and x.requires_grad for x in (call.q, call.k, *inputs))
        if (torch.is_grad_enabled() and learns) or call.decay is not None or not call.causal:
            return by_vector_decay(call, self.run)
        o, s, z, log_scale = torch.ops.phistate.linear_attention_log(
            call.q, call.k, *inputs, call.log_scale, call.mask, call.cu_seqlens, call.scale, call.normalize
        )
        return Result(o, s, z if call.normalize else None, log_scale)

    def step_(self, call: Call) -> Tensor:
        """See :class:`~phistate.ops.backends.base.Backend`."""
        held = [x for x in (call.s, call.z) if x is not None]
        dense = [x.contiguous() for x in held]
        o = step_(
            call.q,
            call.k,
            call.v,
            *dense,
            decay=call.decay,
            beta=call.beta,
            erase=call.erase,
            scale=call.scale,
            write=call.write,
            qk_l2norm=call.qk_l2norm,
        )
        for x, y in zip(held, dense, strict=True):
            if x is not y:
                x.copy_(y)
        overwritten(*held)
        return o


def step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    z: Tensor | None = None,
    *,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
    erase: Tensor | None = None,
    scale: float = 1.0,
    write: str = "add",
    qk_l2norm: bool = False,
) -> Tensor:
    """One token: updates the dense float32 states ``s [B,Hs,K,V]`` and ``z [B,Hs,K]`` in place, gives ``[B,1,Ho,V]``.

    Shapes as in :func:`phistate.linear_attention` with T = 1; normalised where there is a z. Not differentiable.
    """
    delta = write == "delta"
    if qk_l2norm and not delta:
        q, k = _l2norm(q, None), _l2norm(k, None)
    return torch.ops.phistate.linear_attention_step_(
        q, k, v, decay, beta, erase, s, z, scale, delta, qk_l2norm and delta
    )


def _inputs(call: Call) -> tuple[Tensor | None, ...]:
    """What gradients run through, in the operator's order."""
    return call.q, call.k, call.v, call.decay, call.beta, call.erase, call.s, call.z


def _l2norm(x: Tensor, mask: Tensor | None) -> Tensor:
    wide = without_padding(x, mask).float()
    # 1e-6 is part of the models' definition of this norm, not a guard of ours.
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)
