"""Lowering: of a static step, the one row whose logits are wanted.

Knows: KeepLast as a Gather at `last_index`. Does not know: which row that is; the runtime says it at each step.
"""

import onnx_ir as ir

from appliance.bundle.vocabulary import KEEP_LAST, LAST_INDEX
from appliance.targets.capabilities import Flags, Target
from export.graph import Nodes, nodes_of, replace
from export.step import Step

STAGE = 40


def wanted(flags: Flags) -> bool:
    """Every static graph needs it: the last row of a padded chunk is not the last token."""
    return flags.form == "static"


def run(model: ir.Model, target: Target, step: Step) -> None:
    """(hidden [1,S,D]) -> Gather along S at last_index [1] -> [1,1,D]."""
    graph = model.graph
    index = next(value for value in graph.inputs if value.name == LAST_INDEX)
    for node in nodes_of(graph, KEEP_LAST):
        write = Nodes(graph, str(node.name), node)
        replace(graph, node, [write.value("Gather", [node.inputs[0], index], {"axis": 1})])
