"""An encoder's attention of plain ONNX operators.

Knows: the mask of real tokens. Does not know: fused kernels.

    q -- heads ------------- MatMul(k^T) - Mul(scale) - Add(bias) - Softmax - MatMul -- y
    k -- heads - transposed ---+                                                |
    v -- heads -----------------------------------------------------------------+
"""

import onnx_ir as ir

from appliance.bundle import vocabulary
from appliance.targets.capabilities import Flags, Target
from export.graph import Nodes, attribute_float, attribute_int, nodes_of, replace
from export.step import Step

STAGE = 20


def wanted(flags: Flags) -> bool:
    """Targets without the contrib attention."""
    return flags.attention != "contrib"


def run(model: ir.Model, target: Target, step: Step) -> None:
    """Rewrite every SelfAttention."""
    graph = model.graph
    found = nodes_of(graph, vocabulary.SELF_ATTENTION)
    if not found:
        return
    bias = _bias(Nodes(graph, "/model/attention", graph[0]), found[0].inputs[3])
    for node in found:
        _rewrite(graph, node, bias)


def _bias(at: Nodes, mask: ir.Value | None) -> ir.Value:
    """[B,1,1,S] added to the scores: 0 where the mask has a one, `vocabulary.MASKED` elsewhere."""
    real = at.value("Cast", [at.value("Unsqueeze", [mask, at.ints(1, 2)])], {"to": int(ir.DataType.BOOL)})
    return at.value("Where", [real, at.number(0.0), at.number(vocabulary.MASKED)], name="bias")


def _rewrite(graph: ir.Graph, node: ir.Node, bias: ir.Value) -> None:
    heads, size = attribute_int(node, "heads"), attribute_int(node, "head_dim")
    at = Nodes(graph, (node.name or "").rpartition("/")[0], node)
    q, k, v = (at.value("Reshape", [value, at.ints(0, 0, heads, size)]) for value in node.inputs[:3])
    q, v = (at.value("Transpose", [value], {"perm": [0, 2, 1, 3]}) for value in (q, v))
    k = at.value("Transpose", [k], {"perm": [0, 2, 3, 1]})
    scores = at.value("Mul", [at.value("MatMul", [q, k]), at.number(attribute_float(node, "scale"))])
    weights = at.value("Softmax", [at.value("Add", [scores, bias])], {"axis": -1})
    joined = at.value("Transpose", [at.value("MatMul", [weights, v])], {"perm": [0, 2, 1, 3]})
    replace(graph, node, [at.value("Reshape", [joined, at.ints(0, 0, heads * size)])])
