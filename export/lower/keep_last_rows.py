"""How many last positions get logits, where shapes are dynamic.

Knows: the overridable initializer. Does not know: the static form, which names one row.

    hidden [B,S,D] -- Slice(from -logits_to_keep, axis 1) --> [B,R,D]
"""

import numpy as np
import onnx_ir as ir

from appliance.bundle import vocabulary
from appliance.targets.capabilities import Flags, Target
from export.graph import Nodes, add_initializer, nodes_of, replace
from export.step import Step

STAGE = 40


def wanted(flags: Flags) -> bool:
    """The dynamic form."""
    return flags.form == "dynamic"


def run(model: ir.Model, target: Target, step: Step) -> None:
    """Rewrite every KeepLast. `logits_to_keep` is a graph input with a default of 1; more than S keeps all."""
    graph = model.graph
    found = nodes_of(graph, vocabulary.KEEP_LAST)
    if not found:
        return
    first = Nodes(graph, "/model/keep_last", graph[0]).value("Neg", [_keep(graph)])
    for node in found:
        at = Nodes(graph, "/model/keep_last", node)
        end = at.ints(np.iinfo(np.int64).max)
        replace(graph, node, [at.value("Slice", [node.inputs[0], first, end, at.ints(1)])])


def _keep(graph: ir.Graph) -> ir.Value:
    name = vocabulary.LOGITS_TO_KEEP
    value = add_initializer(graph, name, ir.tensor(np.array([1], np.int64), name=name), {})
    graph.inputs.append(value)
    return value
