"""Root-mean-square norms for targets without contrib operators.

Knows: ai.onnx's RMSNormalization (opset 23) and its parts. Does not know: fused forms.

    x -+- Mul(x,x) - ReduceMean - Add(eps) - Sqrt - Div(x, .) - Mul(weight) --> y
"""

import onnx_ir as ir

from appliance.bundle import vocabulary
from appliance.targets.capabilities import Flags, Target
from export.graph import Nodes, attribute_float, nodes_of, replace
from export.step import Step

STAGE = 30


def wanted(flags: Flags) -> bool:
    """Targets without contrib operators."""
    return not flags.contrib_ops


def run(model: ir.Model, target: Target, step: Step) -> None:
    """Rewrite every RMSNorm, as one node where the target has the operator."""
    graph = model.graph
    for node in nodes_of(graph, vocabulary.RMS_NORM):
        x, weight = node.inputs
        epsilon = attribute_float(node, "epsilon")
        at = Nodes(graph, (node.name or "").rpartition("/")[0], node)
        if target.flags.rms_normalization:
            graph.opset_imports[""] = max(graph.opset_imports[""], 23)
            value = at.value("RMSNormalization", [x, weight], {"axis": -1, "epsilon": epsilon})
        else:
            square = at.value("ReduceMean", [at.value("Mul", [x, x]), at.ints(-1)], {"keepdims": 1})
            root = at.value("Sqrt", [at.value("Add", [square, at.number(epsilon)])])
            value = at.value("Mul", [at.value("Div", [x, root]), weight])
        replace(graph, node, [value])
