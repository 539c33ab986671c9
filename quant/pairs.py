"""Two linears with nothing between them that minds a channel's scale: found by structure in a canonical graph.

Knows: operators that are linear in one input. Does not know: what is done with a pair (`quant.rotate`, `quant.equalize`).
"""

import onnx_ir as ir

from appliance.bundle.vocabulary import DOMAIN, LINEAR


def linear_before(value: ir.Value | None) -> ir.Node | None:
    """The linear that makes a value for one reader alone, with a weight of its own; None when there is none such."""
    node = value.producer() if value is not None else None
    if value is None or node is None or len(value.uses()) > 1 or value.is_graph_output():
        return None
    return node if _own_linear(node) else None


def linear_after(value: ir.Value) -> ir.Node | None:
    """The linear that is the only reader of a value, with a weight of its own; None when there is none such."""
    uses = list(value.uses())
    if len(uses) != 1 or uses[0].idx != 0 or value.is_graph_output():
        return None
    return uses[0].node if _own_linear(uses[0].node) else None


def linear_factor_of(node: ir.Node) -> tuple[ir.Node, ir.Node] | None:
    """(up, down) when `node` multiplies something computed by up's output, for down alone.

    act(gate) - Mul - down: the product is linear in what up gives. Where both sides are linears the first one is taken.
    """
    if node.domain != "" or node.op_type != "Mul":
        return None
    leaving = linear_after(node.outputs[0])
    if leaving is None or any(value is None or value.const_value is not None for value in node.inputs):
        return None
    if node.inputs[0] is node.inputs[1]:
        return None
    for value in node.inputs:
        entering = linear_before(value)
        if entering is not None:
            return entering, leaving
    return None


def _own_linear(node: ir.Node) -> bool:
    weight = node.inputs[1] if node.domain == DOMAIN and node.op_type == LINEAR else None
    return weight is not None and len(weight.uses()) == 1
