"""Root-mean-square norms as onnxruntime's fused operators, joined with the residual sum before them where there is one.

Knows: those operators. Does not know: plain forms (`norm_plain`).
Source: onnxruntime, ContribOperators.md, SkipSimplifiedLayerNormalization; SimplifiedLayerNormalization stands in the
default domain, though ONNX does not define it.

    a -+- Add -+------- sum        a -+- SkipSimplifiedLayerNormalization -+- normed
    b -+       +- RMSNorm - normed  =>  b -+                                    +- sum
"""

import onnx_ir as ir

from appliance.bundle import vocabulary
from appliance.targets.capabilities import Flags, Target
from export.graph import Nodes, attribute_float, nodes_of, replace
from export.step import Step

STAGE = 30


def wanted(flags: Flags) -> bool:
    """Targets with contrib operators."""
    return flags.contrib_ops


def run(model: ir.Model, target: Target, step: Step) -> None:
    """Rewrite every RMSNorm."""
    graph = model.graph
    for node in nodes_of(graph, vocabulary.RMS_NORM):
        x, weight = node.inputs
        assert x is not None
        path, epsilon = (node.name or "").rpartition("/")[0], attribute_float(node, "epsilon")
        add = x.producer()
        if add is None or not _residual(add):
            attributes = {"axis": -1, "epsilon": epsilon, "stash_type": 1}
            value = Nodes(graph, path, node).value("SimplifiedLayerNormalization", [x, weight], attributes)
            replace(graph, node, [value])
            continue
        fused = Nodes(graph, path, add).node(
            "SkipSimplifiedLayerNormalization",
            [*add.inputs, weight],
            {"epsilon": epsilon},
            domain="com.microsoft",
            outputs=4,
        )
        fused.outputs[1].name = fused.outputs[2].name = ""
        replace(graph, node, [fused.outputs[0]])
        replace(graph, add, [fused.outputs[3]])
        if not fused.outputs[3].uses():
            fused.outputs[3].name = ""  # nobody reads the sum: the kernel need not write it


def _residual(node: ir.Node) -> bool:
    """A sum of two hidden states; a sum with an initializer is a bias."""
    return (
        node.op_type == "Add"
        and node.domain == ""
        and not any(value is None or value.is_initializer() for value in node.inputs)
        and not node.outputs[0].is_graph_output()
    )
