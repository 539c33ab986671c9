"""The float model with one thing quantized alone, part by part: what each of them costs by itself.

Knows: how a part of the float graph takes over weights, activations or keys and values of the decided one.
Does not know: how parts are run (`quant.side_by_side`), or what is measured on them.

    weights       the integers' values in place of the float weights, products in float
    activations   float weights; what enters each linear is rounded as the bundle does it
    kv            all float but keys and values, which are kept in integers
"""

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from appliance.bundle.vocabulary import ATTENTION, EMBEDDING, LAYER, LINEAR, QUANT_EMBEDDING, QUANT_LINEAR
from quant import kv, mx
from quant.affine import dequantize_affine
from quant.arrays import Floats, dequantize, group_size, groups_of
from quant.graph import Writer, canonical, lazy, sizes, tensor_of
from quant.keep import dequantize_stored
from quant.layers import Part
from quant.static import STATIC_BITS, Range, range_of

WEIGHTS, ACTIVATIONS, KV = "weights", "activations", "KV"
SAID = {
    WEIGHTS: "the quantized weights, all else float",
    ACTIVATIONS: "float weights, what enters each product rounded as in the bundle",
    "head": "the quantized head on the float model's last hidden state",
    KV: "keys and values kept in integers, all else float",
}
_PIECE = 1 << 20
"""Weights that are made at once: dequantizing needs four times their memory, and a table has a hundred times as many."""
_NO_BLOCK = 1e-30  # stands for the maximum of a block of zeros, as in quant.emit.qdq


def model_of(name: str, plain: Part, decided: Part) -> ir.Model:
    """The canonical graph of the part `plain`, with what `name` says taken over from `decided`."""
    model = plain.build(streams=False, head=False)
    nodes = {str(node.name): node for node in decided.nodes}
    if name == WEIGHTS:
        _take_weights(model, nodes)
    elif name == ACTIVATIONS:
        _round_activations(model, nodes)
    else:
        kv.rewrite(model, kv_scales(decided))
    return model


def values_of(node: ir.Node) -> Floats:
    """What a QuantLinear's or QuantEmbedding's integers stand for: [N,K] float32."""
    found, first = np.empty(sizes(tensor_of(node.inputs[1], node)), np.float32), 0
    for piece in pieces_of(node):
        found[first : first + len(piece)] = piece
        first += len(piece)
    return found


def pieces_of(node: ir.Node) -> Iterator[Floats]:
    """The same, some rows at a time."""
    inputs = [tensor_of(value, node).numpy() if value is not None else None for value in node.inputs[1:]]
    q, scales, zeros, offsets = inputs[0], inputs[1], *(inputs[at] if len(inputs) > at else None for at in (3, 4))
    assert q is not None and scales is not None
    bits, group = node.attributes["bits"].as_int(), node.attributes["group"].as_int()
    step = max(1, _PIECE // q.shape[1])
    for start in range(0, len(q), step):
        rows = slice(start, start + step)
        if offsets is not None:
            yield dequantize_stored(q[rows], scales[rows], offsets[rows], bits, group)
        elif zeros is not None:
            yield dequantize_affine(q[rows], scales[rows], zeros[rows], bits, group)
        else:
            yield dequantize(q[rows], scales[rows], group)


def rounded(x: Floats, node: ir.Node) -> Floats:
    """What a QuantLinear's integers are multiplied with when `x` [...,K] enters it."""
    activation = node.attributes["activation"].as_string()
    if activation == "float":
        return x
    if activation in STATIC_BITS:
        return range_of(node, "input").apply(x)
    if activation == "mxfp8":
        return mx.quantize_activations(x)
    columns = x.shape[-1]
    group = group_size(columns, node.attributes["group"].as_int()) if activation == "block-dynamic" else columns
    padded = np.zeros((*x.shape[:-1], groups_of(columns, group) * group), np.float32)
    padded[..., :columns] = x
    blocks = padded.reshape(*x.shape[:-1], -1, group)
    scale = np.maximum(np.abs(blocks).max(-1, keepdims=True), np.float32(_NO_BLOCK)) / np.float32(127)
    found: Floats = (np.rint(blocks / scale) * scale).reshape(padded.shape)[..., :columns].astype(np.float32)
    return found


def kv_scales(part: Part) -> dict[int, kv.KvScales]:
    """By layer, of a decided part whose attention keeps integers; empty when it does not."""
    found = {}
    for node in part.nodes:
        if node.op_type == ATTENTION and len(node.inputs) > 8 and node.inputs[7] is not None:
            key, value = (tensor_of(node.inputs[at], node).numpy() for at in (7, 8))
            found[node.attributes[LAYER].as_int()] = kv.KvScales(key, value)
    return found


def _take_weights(model: ir.Model, decided: dict[str, ir.Node]) -> None:
    for node in canonical(model.graph, LINEAR, EMBEDDING):
        quantized = decided.get(str(node.name))
        weight = node.inputs[1]
        if quantized is None or quantized.op_type not in (QUANT_LINEAR, QUANT_EMBEDDING) or weight is None:
            continue
        shape = sizes(tensor_of(weight, node))
        weight.const_value = lazy(str(weight.name), ir.DataType.FLOAT, shape, lambda node=quantized: values_of(node))  # type: ignore[misc]
        weight.type = ir.TensorType(ir.DataType.FLOAT)


def _round_activations(model: ir.Model, decided: dict[str, ir.Node]) -> None:
    made: dict[tuple[object, ...], ir.Value] = {}
    for node in canonical(model.graph, LINEAR):
        quantized = decided.get(str(node.name))
        x = node.inputs[0]
        if quantized is None or quantized.op_type != QUANT_LINEAR or x is None:
            continue
        columns = sizes(tensor_of(node.inputs[1], node))[1]
        activation = quantized.attributes["activation"].as_string()
        if activation in STATIC_BITS:
            node.replace_input_with(0, _static(Writer(node), x, range_of(quantized, "input"), "entering"))
            _round_output(node, range_of(quantized, "output"))
        elif activation in ("block-dynamic", "token-dynamic"):
            group = group_size(columns, quantized.attributes["group"].as_int()) if activation == "block-dynamic" else columns
            if (key := (id(x), group)) not in made:
                made[key] = _blocks(Writer(node), x, columns, group)
            node.replace_input_with(0, made[key])


def _blocks(at: Writer, x: ir.Value, columns: int, group: int) -> ir.Value:
    """x [B,S,K] on the grid of int8 with one scale for each `group` of a row; as `rounded` computes it.

    x - (Pad) - Reshape [B,S,G,g] -+- Abs - ReduceMax - Max - Div 127 -+- scale
                                   +- Div (scale) - Round - Mul (scale) - Reshape - (Slice)
    """
    count = groups_of(columns, group)
    value = x
    if count * group != columns:
        value = at.value("Pad", [value, at.constant(np.array([0, 0, 0, 0, 0, count * group - columns]))], name="round/Pad")
    blocks = at.value("Reshape", [value, at.constant(np.array([0, 0, count, group]))], name="round/Reshape_blocks")
    most = at.value("ReduceMax", [at.value("Abs", [blocks], name="round/Abs"), at.constant(np.array([-1]))], {"keepdims": 1},
                    name="round/ReduceMax")  # fmt: skip
    most = at.value("Max", [most, at.constant(np.float32(_NO_BLOCK))], name="round/Max")
    scale = at.value("Div", [most, at.constant(np.float32(127))], name="round/Div_scale")
    steps = at.value("Round", [at.value("Div", [blocks, scale], name="round/Div")], name="round/Round")
    value = at.value("Mul", [steps, scale], name="round/Mul")
    value = at.value("Reshape", [value, at.constant(np.array([0, 0, count * group]))], name="round/Reshape")
    return value if count * group == columns else at.cut(value, columns)


def _static(at: Writer, x: ir.Value, over: Range, name: str) -> ir.Value:
    """x through unsigned integers of a calibrated range and back."""
    kind = np.uint8 if over.bits == 8 else np.uint16
    parts = [at.constant(np.float32(over.scale)), at.constant(np.array(over.zero_point, kind))]
    steps = at.value("QuantizeLinear", [x, *parts], name=f"{name}/QuantizeLinear")
    return at.value("DequantizeLinear", [steps, *parts], name=f"{name}/DequantizeLinear")


def _round_output(node: ir.Node, over: Range) -> None:
    output = node.outputs[0]
    readers = [(usage.node, usage.idx) for usage in output.uses()]
    if not readers or output.is_graph_output():
        return
    value = _static(Writer(readers[0][0]), output, over, f"{node.name}/leaving")
    for reader, index in readers:
        reader.replace_input_with(index, value)
