"""Each matrix operator as it is emitted, run by onnxruntime, against numpy doing the same arithmetic on integers.

Knows: one decided linear at a time. Does not know: the rest of any graph.
What is compared is the arithmetic, so inputs are kept away from the halves between two steps, where the last bit of a
division decides which one is taken and both are right.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from appliance.bundle.vocabulary import DOMAIN, QUANT_LINEAR
from appliance.targets.capabilities import Target
from quant import emit
from quant.ablations import pieces_of, rounded
from quant.arrays import Floats
from quant.graph import sizes, tensor_of
from quant.layers import Part
from quant.static import STATIC_BITS, range_of

_NEAR = 1e-5
"""Of the largest output: what float32 sums may differ by."""
ROWS = 8
"""Rows of inputs a matrix: a prompt's worth for the operator, little for numpy."""


@dataclass(frozen=True)
class Emulated:
    """The largest difference of an output, relative to the largest output of the matrix; NaN where the operator gave NaN."""

    name: str
    error: float


def emulate_part(part: Part, streams: Mapping[str, np.ndarray], target: Target, threads: int = 0) -> list[Emulated]:
    """Every decided linear of a part on the last rows of what really enters it, [B,S,K] by stream tag."""
    tags = {name: stream for stream, names in part.streams.items() for name in names}
    found = []
    for node in part.linears:
        if node.op_type != QUANT_LINEAR:
            continue
        q = node.inputs[1]
        assert q is not None
        x = np.asarray(streams[tags[str(q.name)]][:1, -ROWS:], np.float32)
        found.append(Emulated(str(q.name).removesuffix(".q"), difference(node, x, target, threads)))
    return found


def difference(node: ir.Node, x: Floats, target: Target, threads: int = 0) -> float:
    """Of one QuantLinear on x [1,S,K]."""
    x = away_from_halves(x, node)
    wanted = in_numpy(node, x)
    got = run_alone(node, x, target, threads)
    most = float(np.abs(wanted).max()) or 1.0
    if node.attributes["activation"].as_string() in STATIC_BITS:
        # What leaves is rounded too. A sum that lies at half a step may fall either way, in another order of operations.
        taken = range_of(node, "output")
        steps = [taken.apply((wanted + sign * _NEAR * most).astype(np.float32)) for sign in (-1, 1)]
        return float(np.minimum(*(np.abs(got - one) for one in steps)).max()) / most
    return float(np.abs(got - wanted).max()) / most


def away_from_halves(x: Floats, node: ir.Node) -> Floats:
    """x with every distance to its rounded value cut to 60%: it rounds to the same steps, and so that nobody can differ."""
    on_grid = rounded(x, node)
    found: Floats = (on_grid + np.float32(0.6) * (x - on_grid)).astype(np.float32)
    return found


def in_numpy(node: ir.Node, x: Floats) -> npt.NDArray[np.float64]:
    """rounded(x) . values of the integers + bias, in float64; not rounded to a range for what leaves."""
    bias = node.inputs[3] if len(node.inputs) > 3 else None
    entering = rounded(x, node).astype(np.float64)
    y = np.concatenate([entering @ piece.T.astype(np.float64) for piece in pieces_of(node)], axis=-1)
    if len(node.inputs) > 5 and node.inputs[5] is not None:
        y += _offset_share(x - rounded(x, node), node)
    if bias is not None:
        y = y + tensor_of(bias, node).numpy().astype(np.float64)
    return y


def _offset_share(rest: Floats, node: ir.Node) -> npt.NDArray[np.float64]:
    """What the middles of groups make of an input: their share is computed in float, so of what rounding left over too."""
    group, half = node.attributes["group"].as_int(), 1 << (node.attributes["bits"].as_int() - 1)
    scales, offsets = (tensor_of(node.inputs[index], node).numpy().astype(np.float64) for index in (2, 5))
    sums = rest.reshape(*rest.shape[:-1], -1, group).sum(-1, dtype=np.float64)
    found: npt.NDArray[np.float64] = sums @ (offsets + half * scales).T
    return found


def run_alone(node: ir.Node, x: Floats, target: Target, threads: int = 0) -> Floats:
    """The node as `quant.emit` writes it for `target`, in a graph of its own on the CPU provider: [1,S,N].

    Microscaling elements, which that has no kernels for, in onnx's own evaluator.
    """
    if "element" in node.attributes:
        from onnx.reference import ReferenceEvaluator

        told: Any = ReferenceEvaluator(ir.to_proto(_alone(node, target))).run(None, {"x": x})
        return np.asarray(told[0], np.float32)
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    for key, value in target.options.items():
        if key.startswith("session."):  # a fusion that would quantize once more, if the target's sessions did not forbid it
            options.add_session_config_entry(key, value)
    data = ir.to_proto(_alone(node, target)).SerializeToString()
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    found: Floats = session.run(None, {"x": x})[0]
    return found


def _alone(node: ir.Node, target: Target) -> ir.Model:
    columns = sizes(tensor_of(node.inputs[1], node))[1]
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([1, "rows", columns]))
    y = ir.Value(name="y", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([1, "rows", None]))
    graph = ir.Graph([x], [], nodes=[], name="alone", opset_imports={"": 21, DOMAIN: 1})
    inputs: list[ir.Value | None] = [x]
    for value in node.inputs[1:]:
        if value is None:
            inputs.append(None)
            continue
        tensor = tensor_of(value, node)
        copied = ir.Value(name=value.name, type=ir.TensorType(tensor.dtype), shape=value.shape, const_value=tensor)
        copied.metadata_props.update(value.metadata_props)
        graph.register_initializer(copied)
        inputs.append(copied)
    graph.append(ir.Node(node.domain, node.op_type, inputs, list(node.attributes.values()), outputs=[y], name=node.name))
    graph.outputs.append(y)
    model = ir.Model(graph, ir_version=10)
    emit.emit(model, target)
    return model
