"""What the lowerings of Attention share: its inputs by name, and keys and values in int8 with plain ONNX operators.

Knows: the order of the inputs and the rounding (`appliance.bundle.vocabulary.ATTENTION`). Does not know: buffers, kernels.
"""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from export.graph import Nodes, add_initializer


@dataclass(frozen=True)
class Operands:
    """Inputs of one Attention. No tables: no rotary positions. No scales: keys and values are kept in float."""

    q: ir.Value
    k: ir.Value
    v: ir.Value
    past_key: ir.Value
    past_value: ir.Value
    tables: tuple[ir.Value, ir.Value] | None
    scales: tuple[ir.Value, ir.Value] | None


def operands(node: ir.Node) -> Operands:
    """The inputs of the Attention `node`."""
    inputs = [*node.inputs, *[None] * (9 - len(node.inputs))]
    q, k, v, past_key, past_value = (_there(value, node) for value in inputs[:5])
    return Operands(q, k, v, past_key, past_value, _pair(inputs[5], inputs[6], node), _pair(inputs[7], inputs[8], node))


def _pair(first: ir.Value | None, second: ir.Value | None, node: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    return None if first is None and second is None else (_there(first, node), _there(second, node))


def _there(value: ir.Value | None, node: ir.Node) -> ir.Value:
    assert value is not None, f"{node.name} lacks an input"
    return value


def quantized(at: Nodes, x: ir.Value, scale: ir.Value) -> ir.Value:
    """Keys or values [B,Hkv,S,d] as integers, int8. Divided first: a scale a head and channel is more than an axis has.

    x - Div (scale [Hkv,1,d]) - QuantizeLinear (1) --> int8, half to even, -128..127
    """
    return at.value("QuantizeLinear", [at.value("Div", [x, scale]), at.number(1.0), _no_offset(at)])


def integers(at: Nodes, x: ir.Value) -> ir.Value:
    """int8 keys or values as float32, still to be multiplied by their scales."""
    return at.value("DequantizeLinear", [x, at.number(1.0), _no_offset(at)])


def _no_offset(at: Nodes) -> ir.Value:
    name = "int8.0"
    known = at.graph.initializers.get(name)
    return known if known is not None else add_initializer(at.graph, name, ir.tensor(np.array(0, np.int8), name=name), {})
