"""A graph in float16 or bfloat16, or with islands of them, read as float32: what decides and is written is float32 alone.

Knows: where a type stands in a graph: tensors, constants, attributes, inputs and outputs. Does not know: decoders, quantization.

    initializer, Constant, ConstantOfShape    its numbers, each read when it is asked for; float32 holds all of them exactly
    Cast(to=narrow)                           Cast(to=float32); left out where float32 enters it
    inputs, outputs, caches                   float32 under the same names
    other attributes that name a type         float32

Steps in between are rounded less than the narrow graph rounds them, so logits are those of the same weights computed in float32.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from appliance.errors import BadInput
from quant.graph import lazy, sizes

NARROW = {ir.DataType.FLOAT16: "float16", ir.DataType.BFLOAT16: "bfloat16"}

TYPES = frozenset({"to", "dtype", "output_dtype", "stash_type", "softmax_precision"})
"""Attributes whose number is a type."""

DOMAINS = frozenset({"", "ai.onnx", "com.microsoft"})
"""Domains whose operators take float32 wherever they take a narrower type, but for those below."""

NEED_NARROW = frozenset({"BitCast", "PagedAttention"})
"""Operators that look at the bits, or take no float32 at all."""


@dataclass(frozen=True)
class Widened:
    """What was not float32 and is now.

    Attributes:
        tensors: how many, by type: weights and constants.
        casts: that named a narrow type.
        inputs, outputs: of the graph, by name.
    """

    tensors: Mapping[str, int] = field(default_factory=dict)
    casts: int = 0
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()

    @property
    def runs_here(self) -> bool:
        """Whether onnxruntime runs the original on a processor: it has hardly an operator for bfloat16 there."""
        return "bfloat16" not in self.tensors

    def told(self) -> dict[str, object] | None:
        """For the record; None where all was float32."""
        if not (self.tensors or self.casts or self.inputs or self.outputs):
            return None
        return {"tensors": dict(self.tensors), "casts": self.casts, "inputs": list(self.inputs), "outputs": list(self.outputs)}


def widen(model: ir.Model) -> Widened:
    """Make every narrow float of a graph float32, in place; numbers stay where they are until they are read.

    Raises:
        BadInput: an operator that needs the narrow type, or may; it is named.
    """
    graphs = [model.graph, *model.graph.subgraphs()]
    nodes = [node for graph in graphs for node in graph]
    for node in nodes:
        _refuse(node)
    tensors: Counter[str] = Counter()
    for graph in graphs:
        for value in graph.initializers.values():
            tensor = value.const_value
            if tensor is not None and tensor.dtype in NARROW:
                tensors[NARROW[tensor.dtype]] += 1
                value.const_value = _wide(tensor)
    casts = 0
    for node in nodes:
        for name, attribute in list(node.attributes.items()):
            if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype in NARROW:
                tensors[NARROW[attribute.as_tensor().dtype]] += 1
                node.attributes[name] = ir.AttrTensor(name, _wide(attribute.as_tensor()))
            elif name in TYPES and attribute.type == ir.AttributeType.INT and attribute.as_int() in NARROW:
                casts += node.op_type == "Cast"
                node.attributes[name] = ir.AttrInt64(name, int(ir.DataType.FLOAT))
    inputs = tuple(str(value.name) for value in model.graph.inputs if value.dtype in NARROW)
    outputs = tuple(str(value.name) for value in model.graph.outputs if value.dtype in NARROW)
    for value in _values(graphs):
        if value.dtype in NARROW:
            value.dtype = ir.DataType.FLOAT
    if tensors or casts or inputs or outputs:
        _drop_casts(nodes)
    return Widened(dict(sorted(tensors.items())), casts, inputs, outputs)


def _wide(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    return lazy(str(tensor.name), ir.DataType.FLOAT, sizes(tensor), lambda: np.asarray(tensor.numpy()).astype(np.float32))


def _values(graphs: list[ir.Graph]) -> Iterator[ir.Value]:
    for graph in graphs:
        yield from (*graph.inputs, *graph.outputs, *graph.initializers.values())
        for node in graph:
            yield from node.outputs


def _refuse(node: ir.Node) -> None:
    """`BadInput` for an operator that a narrow type enters or leaves and that may not do with float32."""
    values = [value for value in (*node.inputs, *node.outputs) if value is not None]
    kinds = {value.dtype if value.const_value is None else value.const_value.dtype for value in values}
    if "to" in node.attributes:
        kinds.add(ir.DataType(node.attributes["to"].as_int()))
    narrow = sorted(NARROW[kind] for kind in kinds if kind in NARROW)
    if narrow and (node.domain not in DOMAINS or node.op_type in NEED_NARROW):
        name = node.name or str(node.outputs[0].name)
        raise BadInput(f"{name} ({node.op_type}) takes {narrow[0]} and may not take float32", "export the model in float32")


def _drop_casts(nodes: list[ir.Node]) -> None:
    """Casts of float32 to float32: a weight behind one is a weight."""
    for node in nodes:
        value = node.inputs[0] if node.op_type == "Cast" and node.domain == "" else None
        if value is None or value.dtype != ir.DataType.FLOAT or node.attributes["to"].as_int() != ir.DataType.FLOAT:
            continue
        if isinstance(node.graph, ir.Graph) and not node.outputs[0].is_graph_output():
            ir.convenience.replace_all_uses_with(node.outputs[0], value)
            node.graph.remove(node, safe=True)
