"""Linears and embeddings that stayed float, as MatMul and Gather.

Knows: both forms. Does not know: quantized ones (`quant.emit` writes those).

    x, weight [N,K], bias [N]?  ->  MatMul(x, weight^T) [+ Add bias]
    ids, weight [V,D]           ->  Gather
"""

import onnx_ir as ir

from appliance.bundle import vocabulary
from appliance.targets.capabilities import Flags, Target
from export.graph import Nodes, add_initializer, nodes_of, replace, transposed
from export.step import Step

STAGE = 40


def wanted(flags: Flags) -> bool:
    """Every target."""
    return True


def run(model: ir.Model, target: Target, step: Step) -> None:
    """Rewrite every Linear and Embedding."""
    graph = model.graph
    for node in nodes_of(graph, vocabulary.EMBEDDING):
        ids, weight = node.inputs
        value = Nodes(graph, _path(node), node).value("Gather", [weight, ids], {"axis": 0})
        replace(graph, node, [value])
    for node in nodes_of(graph, vocabulary.LINEAR):
        at = Nodes(graph, _path(node), node)
        value = at.value("MatMul", [node.inputs[0], _turned(graph, node)])
        if len(node.inputs) > 2 and node.inputs[2] is not None:
            value = at.value("Add", [value, node.inputs[2]])
        replace(graph, node, [value])


def _turned(graph: ir.Graph, node: ir.Node) -> ir.Value:
    """The weight as MatMul wants it, [K,N], with the tags of the original."""
    weight = node.inputs[1]
    assert weight is not None and weight.const_value is not None and weight.name is not None
    name = f"{weight.name}.transposed"
    known = graph.initializers.get(name)
    if known is not None:
        return known
    return add_initializer(graph, name, transposed(name, weight.const_value), weight.metadata_props)


def _path(node: ir.Node) -> str:
    return (node.name or "").rpartition("/")[0]
