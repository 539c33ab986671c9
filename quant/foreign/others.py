"""What of a graph is no matrix of a product: norms, biases, tables of positions; and what cannot be read at all.

Knows: operators that hold weights, and which of their inputs. Does not know: roles of matrices (`quant.foreign.infer`).
"""

from collections.abc import Callable, Collection

import onnx_ir as ir

from appliance.errors import BadInput
from quant.foreign.products import behind, computed
from quant.graph import sizes

QUANTIZED = frozenset(
    {
        "MatMulNBits", "GatherBlockQuantized", "QMoE", "DequantizeLinear", "QuantizeLinear", "DynamicQuantizeLinear",
        "MatMulInteger", "QLinearMatMul", "MatMulBnb4", "DynamicQuantizeMatMul",
    }
)  # fmt: skip
HOLDS_WEIGHTS = frozenset({"MatMul", "Gemm", "FusedMatMul", "Einsum", "Conv", "ConvTranspose", "MoE", "LSTM", "GRU", "RNN"})
"""Operators that multiply by what they are given, in ways that `quant.foreign.products` does not read."""
INPUTS = {
    "LayerNormalization": {1: "norm", 2: "bias"},
    "SimplifiedLayerNormalization": {1: "norm"},
    "RMSNormalization": {1: "norm"},
    "SkipSimplifiedLayerNormalization": {2: "norm", 3: "bias"},
    "SkipLayerNormalization": {2: "norm", 3: "bias", 4: "bias"},
    "GroupQueryAttention": {7: "rope", 8: "rope"},
    "RotaryEmbedding": {1: "rope", 2: "rope", 3: "rope"},
    "Gemm": {2: "bias"},
    "Add": {0: "bias", 1: "bias"},
    "Mul": {0: "norm", 1: "norm"},
}
"""Operator -> input -> role, for constants that are no matrices."""


def refuse_unreadable(graph: ir.Graph) -> None:
    """`BadInput` for a graph that is quantized already or holds its weights in another type than float32."""
    for node in graph:
        if node.op_type in QUANTIZED or node.domain == "appliance":
            raise BadInput(f"{_name(node)} ({node.op_type}): the graph is quantized already", "give the float model it came from")
        for value in node.inputs:
            tensor = value.const_value if value is not None else None
            if tensor is None or node.op_type not in HOLDS_WEIGHTS | {"Gather"} or len(tensor.shape) < 2:
                continue
            if tensor.dtype.is_floating_point() and tensor.dtype != ir.DataType.FLOAT:
                raise BadInput(
                    f"{_name(node)}: weight {value.name if value else ''} is {tensor.dtype.name}, float32 is read",
                    "export the model in float32, float16 or bfloat16",
                )


def unread(graph: ir.Graph, products: Collection[int]) -> list[tuple[str, str, str]]:
    """(weight, node, why) of every matrix that no reader understands, those inside branches and loops too."""
    found = []
    for node in graph:
        for inner in _inside(node):
            held = _matrices(inner)
            if held:
                found.append((held[0], _name(node), f"it stands inside a branch ({inner.op_type})"))
        packs = node.op_type == "Attention" and node.domain == "com.microsoft"
        if id(node) in products or not (node.op_type in HOLDS_WEIGHTS or packs):
            continue
        found += [(name, _name(node), f"{node.op_type} holds it in a way that is not read") for name in _matrices(node)]
    return found


def _inside(node: ir.Node) -> list[ir.Node]:
    graphs = [one.as_graph() for one in node.attributes.values() if one.type == ir.AttributeType.GRAPH]
    return [inner for graph in graphs for inner in ir.traversal.RecursiveGraphIterator(graph) if inner.op_type in HOLDS_WEIGHTS]


def _matrices(node: ir.Node) -> list[str]:
    """Names of the float constants with two real dimensions that a node is given, or that an input is made of alone."""
    found = []
    for value in node.inputs:
        for leaf in _leaves(value) if value is not None else []:
            tensor = leaf.const_value
            if tensor is not None and tensor.dtype.is_floating_point() and sum(size > 1 for size in sizes(tensor)) > 1:
                found.append(str(leaf.name))
    return found


def _leaves(value: ir.Value) -> list[ir.Value]:
    """The constants that a value is made of; none where anything else goes into it."""
    if value.const_value is not None:
        return [value]
    nodes = behind([value], set())
    entering = [one for node in nodes for one in node.inputs if one is not None]
    outside = any(one.producer() is None and one.const_value is None for node in nodes for one in computed(node))
    return [] if outside or not nodes else [one for one in entering if one.const_value is not None]


def roles_of_others(
    graph: ir.Graph, matrices: Collection[int], width: int | None, fed: Callable[[ir.Value], bool]
) -> dict[str, str]:
    """Role of every other float initializer that has one: norm, bias, rope, position.

    Args:
        matrices: ids of the initializers that are matrices with roles.
        width: of the hidden state; a table of other rows is one of angles.
        fed: whether a value comes from tokens; what is added to or multiplied with another one is no bias and no norm.
    """
    found = {}
    for name, value in graph.initializers.items():
        tensor = value.const_value
        if id(value) in matrices or tensor is None or not tensor.dtype.is_floating_point() or tensor.size < 2:
            continue
        for use in value.uses():
            role = INPUTS.get(use.node.op_type, {}).get(use.idx)
            if use.node.op_type == "Gather" and use.idx == 0 and len(tensor.shape) == 2:
                role = "position" if sizes(tensor)[1] == width else "rope"
            elif role in ("norm", "bias"):
                alone = use.node.op_type in ("Add", "Mul") and not any(fed(other) for other in computed(use.node))
                role = None if alone or sum(size > 1 for size in sizes(tensor)) != 1 else role
            if role is not None:
                found[name] = role
                break
    return found


def _name(node: ir.Node) -> str:
    return node.name or str(node.outputs[0].name)
