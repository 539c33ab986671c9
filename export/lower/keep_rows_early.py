"""Drop the rows whose logits nobody wants as early as possible: right behind the last attention.

Knows: which operators work on each row alone. Does not know: which rows are wanted (`keep_last_rows`, `static_keep_last`).
In prefill it saves the last layer's output projection and feed-forward block for all rows but one: 2.8 % of the
multiplications of a 30-layer model.

    Attention -- Linear -(+)- norm - mlp -(+)- KeepLast - norm - head
                          |                |
                        hidden ------------+              =>  KeepLast on Attention's output and on the hidden state
"""

import onnx_ir as ir

from appliance.bundle import vocabulary
from appliance.targets.capabilities import Flags, Target
from export.graph import nodes_of
from export.step import Step

STAGE = 12

_ROW_BY_ROW = {
    *(("", op) for op in ("Add", "Sub", "Mul", "Div", "Sigmoid", "Tanh", "Gelu", "Relu")),
    *((vocabulary.DOMAIN, op) for op in (vocabulary.LINEAR, vocabulary.QUANT_LINEAR, vocabulary.RMS_NORM)),
}


def wanted(flags: Flags) -> bool:
    """Every target."""
    return True


def run(model: ir.Model, target: Target, step: Step) -> None:
    """Move every KeepLast up through operators that work row by row, as long as nothing else reads their output."""
    graph = model.graph
    made = {id(node.inputs[0]): node for node in nodes_of(graph, vocabulary.KEEP_LAST)}
    while any([_move(graph, keep, made) for keep in list(made.values())]):
        pass


def _move(graph: ir.Graph, keep: ir.Node, made: dict[int, ir.Node]) -> bool:
    """One step up: the producer works on kept rows, and `keep` is gone. Whether that could be done."""
    value = keep.inputs[0]
    assert value is not None
    producer = value.producer()
    if producer is None or (producer.domain, producer.op_type) not in _ROW_BY_ROW or value.is_graph_output():
        return False
    if any(use.node is not keep for use in value.uses()):
        return False
    for index, entering in enumerate(producer.inputs):
        if entering is not None and not entering.is_initializer():
            producer.replace_input_with(index, _kept(graph, entering, made))
    del made[id(value)]
    ir.convenience.replace_all_uses_with(keep.outputs[0], value, replace_graph_outputs=True)
    graph.remove(keep, safe=True)
    return True


def _kept(graph: ir.Graph, value: ir.Value, made: dict[int, ir.Node]) -> ir.Value:
    """The kept rows of `value`, taken right where it is made."""
    if id(value) not in made:
        output = ir.Value(name=f"{value.name}.kept")
        node = ir.node(vocabulary.KEEP_LAST, [value], {}, domain=vocabulary.DOMAIN, name=f"{value.name}.kept", outputs=[output])
        producer = value.producer()
        if producer is None:
            graph.insert_before(graph[0], node)
        else:
            graph.insert_after(producer, node)
        made[id(value)] = node
    return made[id(value)].outputs[0]
