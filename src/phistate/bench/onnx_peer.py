"""onnxruntime's fused kernels as one-node graphs, bound to torch's memory so that nothing is copied."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phistate.bench.ready import Missing, Ready
from phistate.bench.work import Conv, Inputs, Linear, Mamba2, Outputs, Work


def prepare(work: Work, inputs: Inputs, threads: int) -> Ready:
    """The work as onnxruntime's ``com.microsoft`` operator does it, in float32.

    Raises:
        Missing: onnxruntime or onnx is not installed, or it has no such operator.
    """
    inputs = {name: tensor.float() for name, tensor in inputs.items()}
    if isinstance(work, Linear):
        return _linear(work, inputs, work.K**-0.5, threads)
    if isinstance(work, Mamba2):
        return _mamba2(work, inputs, threads)
    if isinstance(work, Conv):
        return _conv(work, inputs, threads)
    raise Missing("onnxruntime has no such operator")


def _linear(work: Linear, inputs: Inputs, scale: float, threads: int, note: str = "") -> Ready:
    if work.normalize or not work.causal:
        raise Missing("onnxruntime neither normalises nor reads all keys")
    rule = {"add": ("linear", "gated"), "delta": ("delta", "gated_delta")}[work.write][work.decay != "none"]
    q, k, v = (inputs[name].flatten(2).contiguous() for name in "qkv")
    state = inputs.get("state", torch.zeros(1, work.heads, work.K, work.V))
    bound = {"q": q, "k": k, "v": v, "state": state.contiguous()}
    if "decay" in inputs:
        bound["decay"] = inputs["decay"].flatten(2).contiguous()
    if "beta" in inputs:
        bound["beta"] = inputs["beta"].contiguous()
    outputs = {"o": torch.empty(1, work.T, work.heads * work.V), "present": torch.empty_like(state)}
    slots = ["q", "k", "v", "state", "decay" if "decay" in bound else "", "beta" if "beta" in bound else ""]
    attributes: dict[str, Any] = {
        "q_num_heads": work.query_heads or work.key_heads,
        "kv_num_heads": work.heads,
        "update_rule": rule,
        "scale": scale,
    }
    session = _Session("LinearAttention", slots, attributes, bound, outputs, threads)

    def read() -> Outputs:
        session.run()
        o = outputs["o"].unflatten(-1, (work.heads, work.V)).clone()
        return (o, outputs["present"].clone()) if work.state else (o,)

    return Ready(session.run, read, note=_also(note, "the peer computes in float32"))


def _mamba2(work: Mamba2, inputs: Inputs, threads: int) -> Ready:
    """The scan alone: Δ = softplus, x·Δ and Δ·A are made before, the skip is added after, neither is timed."""
    dt = torch.nn.functional.softplus(inputs["dt"] + inputs["dt_bias"])
    spread = {name: inputs[name].repeat_interleave(work.H // work.G, 2) for name in "BC"}
    linear = Linear(work.T, work.H, work.H, work.N, work.P, decay="scalar")
    given = {"q": spread["C"], "k": spread["B"], "v": inputs["x"] * dt.unsqueeze(-1), "decay": dt * inputs["A"]}
    scan = _linear(linear, given, 1.0, threads)
    skip = inputs["D"][:, None] * inputs["x"]
    assert scan.read is not None
    read_scan = scan.read
    return Ready(
        scan.run,
        lambda: (read_scan()[0] + skip,),
        note="the peer computes in float32; its Δ, x·Δ and skip are not timed",
    )


def _conv(work: Conv, inputs: Inputs, threads: int) -> Ready:
    x = inputs["x"] if work.channels_last else inputs["x"].mT
    bound = {"x": x.contiguous(), "weight": inputs["weight"].unsqueeze(1).contiguous(), "bias": inputs["bias"]}
    state = torch.empty(1, work.W - 1, work.C) if work.channels_last else torch.empty(1, work.C, work.W - 1)
    outputs = {"o": torch.empty_like(bound["x"]), "present": state}
    attributes: dict[str, Any] = {"activation": "silu", "channels_last": int(work.channels_last)}
    session = _Session("CausalConvWithState", list(bound), attributes, bound, outputs, threads)

    def read() -> Outputs:
        session.run()
        return ((outputs["o"] if work.channels_last else outputs["o"].mT).clone(),)

    return Ready(session.run, read, note="the peer computes in float32")


class _Session:
    """One operator as a graph, its inputs and outputs bound to the memory of float32 tensors."""

    def __init__(
        self,
        operator: str,
        slots: list[str],
        attributes: dict[str, Any],
        inputs: Inputs,
        outputs: dict[str, Tensor],
        threads: int,
    ) -> None:
        try:
            import onnx
            import onnxruntime
        except ImportError as error:
            raise Missing(f"{error.name} is not installed (extra 'bench')") from None
        while slots[-1] == "":  # an absent input in the middle keeps its place, one at the end has none
            slots.pop()
        helper, kind = onnx.helper, onnx.TensorProto.FLOAT
        node = helper.make_node(operator, slots, list(outputs), domain="com.microsoft", **attributes)
        graph = helper.make_graph(
            [node],
            operator,
            [helper.make_tensor_value_info(name, kind, list(tensor.shape)) for name, tensor in inputs.items()],
            [helper.make_tensor_value_info(name, kind, list(tensor.shape)) for name, tensor in outputs.items()],
        )
        domains = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=domains, ir_version=10)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        # Its workers spin while it runs, as they do for its users, and stop at the end of each run: else they would
        # take the cores from torch's, whose turn is next.
        options.add_session_config_entry("session.intra_op.allow_spinning", "1")
        options.add_session_config_entry("session.force_spinning_stop", "1")
        try:
            self._session = onnxruntime.InferenceSession(
                model.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # its errors share no base class but Exception
            raise Missing(f"onnxruntime {onnxruntime.__version__} refuses: {str(error).splitlines()[0]}") from None
        self._binding = self._session.io_binding()
        for name, tensor in inputs.items():
            self._binding.bind_input(name, "cpu", 0, kind, list(tensor.shape), tensor.data_ptr())
        for name, tensor in outputs.items():
            self._binding.bind_output(name, "cpu", 0, kind, list(tensor.shape), tensor.data_ptr())
        self._kept = (inputs, outputs)  # the binding holds addresses only

    def run(self) -> None:
        self._session.run_with_iobinding(self._binding)


def _also(first: str, second: str) -> str:
    return f"{first}; {second}" if first else second
