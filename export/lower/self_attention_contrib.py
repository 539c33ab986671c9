"""An encoder's attention as com.microsoft MultiHeadAttention.

Knows: that operator's inputs. Does not know: what else is around it.
Source: onnxruntime, ContribOperators.md, MultiHeadAttention; its key_padding_mask [B,S] int32 has a one for every real key.
"""

import onnx_ir as ir

from appliance.bundle import vocabulary
from appliance.targets.capabilities import Flags, Target
from export.graph import Nodes, attribute_float, attribute_int, nodes_of, replace
from export.step import Step

STAGE = 20


def wanted(flags: Flags) -> bool:
    """Targets with the contrib attention."""
    return flags.attention == "contrib"


def run(model: ir.Model, target: Target, step: Step) -> None:
    """Rewrite every SelfAttention."""
    graph = model.graph
    found = nodes_of(graph, vocabulary.SELF_ATTENTION)
    if not found:
        return
    first = Nodes(graph, "/model/attention", graph[0])
    mask = first.value("Cast", [found[0].inputs[3]], {"to": int(ir.DataType.INT32)}, name="key_padding_mask")
    for node in found:
        at = Nodes(graph, (node.name or "").rpartition("/")[0], node)
        attributes = {"num_heads": attribute_int(node, "heads"), "scale": attribute_float(node, "scale")}
        inputs = [*node.inputs[:3], None, mask]
        replace(graph, node, [at.value("MultiHeadAttention", inputs, attributes, domain="com.microsoft")])
