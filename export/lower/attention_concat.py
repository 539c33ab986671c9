"""Attention of plain ONNX operators over a past that grows by joining: the float reference.

Knows: rotary embedding, causality, windows, softcap, grouped heads. Does not know: buffers or fused kernels.
Every sequence of a batch has the same past here, so columns of the joined keys are positions.

    q -- heads -- rope ---------------------------+
    k -- heads -- rope -- Concat(past) = present -- MatMul^T - scale [- softcap] + bias - Softmax -- MatMul -- y
    v -- heads --------- Concat(past) = present -----------------------------------------------------+

H queries share Hkv keys by shape: [B,Hkv,H/Hkv,S,d] x [B,Hkv,1,d,T].

With scales, new keys and values are rounded to int8 before they are joined, and what is joined is read as integer x scale.
"""

from dataclasses import dataclass

import onnx_ir as ir

from appliance.bundle import vocabulary
from appliance.targets.capabilities import Flags, Target
from export.attention import integers, operands, quantized
from export.blocks import UPDATE
from export.graph import Nodes, attribute_float, attribute_int, nodes_of, replace
from export.step import Step

STAGE = 20


def wanted(flags: Flags) -> bool:
    """The dynamic form without the contrib attention."""
    return flags.form == "dynamic" and flags.attention != "contrib"


@dataclass(frozen=True)
class _Shared:
    """Values that all layers share: positions [B,S], cosines and sines [B,1,S,d/2], score biases by window."""

    positions: ir.Value
    rope: dict[str, ir.Value]
    bias: dict[int, ir.Value]


def run(model: ir.Model, target: Target, step: Step) -> None:
    """Rewrite every Attention; the output state is the next step's input as it is."""
    graph = model.graph
    found = nodes_of(graph, vocabulary.ATTENTION)
    if not found:
        return
    at = Nodes(graph, "/model/attention", graph[0])
    shared = _Shared(_positions(at, graph), {}, {})
    for node in found:
        _rewrite(graph, node, at, shared)
    for value in graph.inputs:
        if value.metadata_props.get("state", "").startswith("kv."):
            value.metadata_props[UPDATE] = "replace"


def _input(graph: ir.Graph, name: str) -> ir.Value:
    return next(value for value in graph.inputs if value.name == name)


def _positions(at: Nodes, graph: ir.Graph) -> ir.Value:
    """[B,S]: tokens in the mask, less the new ones, plus 0..S-1."""
    ids, mask = _input(graph, vocabulary.INPUT_IDS), _input(graph, vocabulary.ATTENTION_MASK)
    fresh = at.value("Squeeze", [at.value("Shape", [ids], {"start": 1, "end": 2})])
    past = at.value("Sub", [at.value("ReduceSum", [mask, at.ints(1)], {"keepdims": 1}), fresh])
    return at.value("Add", [past, at.value("Range", [at.integer(0), fresh, at.integer(1)])], name="positions")


def _bias(at: Nodes, graph: ir.Graph, shared: _Shared, window: int) -> ir.Value:
    """[B,1,1,S,T] added to the scores: 0 where a token may look, `vocabulary.MASKED` elsewhere."""
    if window in shared.bias:
        return shared.bias[window]
    mask = _input(graph, vocabulary.ATTENTION_MASK)
    total = at.value("Squeeze", [at.value("Shape", [mask], {"start": 1, "end": 2})])
    columns = at.value("Range", [at.integer(0), total, at.integer(1)])
    rows = at.value("Unsqueeze", [shared.positions, at.ints(2)])
    seen = at.value("LessOrEqual", [columns, rows])
    if window:
        seen = at.value("And", [seen, at.value("Greater", [columns, at.value("Sub", [rows, at.integer(window)])])])
    real = at.value("Cast", [at.value("Unsqueeze", [mask, at.ints(1)])], {"to": int(ir.DataType.BOOL)})
    seen = at.value("And", [seen, real])
    bias = at.value("Where", [seen, at.number(0.0), at.number(vocabulary.MASKED)])
    shared.bias[window] = at.value("Unsqueeze", [bias, at.ints(1, 2)], name=f"bias_{window}")
    return shared.bias[window]


def _angles(at: Nodes, shared: _Shared, table: ir.Value) -> ir.Value:
    """The rows of a rope table at the new positions, [B,1,S,d/2]."""
    assert table.name is not None
    if table.name not in shared.rope:
        rows = at.value("Gather", [table, shared.positions], {"axis": 0})
        shared.rope[table.name] = at.value("Unsqueeze", [rows, at.ints(1)], name=table.name)
    return shared.rope[table.name]


def _rotate(at: Nodes, x: ir.Value, cos: ir.Value, sin: ir.Value) -> ir.Value:
    """(a, b) -> (a cos - b sin, b cos + a sin), a and b the halves of every head."""
    first, second = at.node("Split", [x], {"axis": -1, "num_outputs": 2}, outputs=2).outputs
    turned = at.value("Sub", [at.value("Mul", [first, cos]), at.value("Mul", [second, sin])])
    other = at.value("Add", [at.value("Mul", [second, cos]), at.value("Mul", [first, sin])])
    return at.value("Concat", [turned, other], {"axis": -1})


def _heads(at: Nodes, x: ir.Value, heads: int, size: int) -> ir.Value:
    """[B,S,heads*d] -> [B,heads,S,d]."""
    split = at.value("Reshape", [x, at.ints(0, 0, heads, size)])
    return at.value("Transpose", [split], {"perm": [0, 2, 1, 3]})


def _rewrite(graph: ir.Graph, node: ir.Node, first: Nodes, shared: _Shared) -> None:
    has = operands(node)
    heads, kv_heads, size = (attribute_int(node, name) for name in ("heads", "kv_heads", "head_dim"))
    bias = _bias(first, graph, shared, attribute_int(node, "window"))
    at = Nodes(graph, (node.name or "").rpartition("/")[0], node)
    q, k, v = _heads(at, has.q, heads, size), _heads(at, has.k, kv_heads, size), _heads(at, has.v, kv_heads, size)
    if has.tables:
        cos, sin = (_angles(first, shared, table) for table in has.tables)
        q, k = _rotate(at, q, cos, sin), _rotate(at, k, cos, sin)
    if has.scales:
        k, v = (quantized(at, x, scale) for x, scale in zip((k, v), has.scales, strict=True))
    key = at.value("Concat", [has.past_key, k], {"axis": 2})
    value = at.value("Concat", [has.past_value, v], {"axis": 2})
    keys, values = key, value
    if has.scales:
        keys, values = (at.value("Mul", [integers(at, x), scale]) for x, scale in zip((key, value), has.scales, strict=True))

    grouped = at.value("Reshape", [q, at.ints(0, kv_heads, heads // kv_heads, -1, size)])
    across = at.value("Unsqueeze", [at.value("Transpose", [keys], {"perm": [0, 1, 3, 2]}), at.ints(2)])
    scores = at.value("Mul", [at.value("MatMul", [grouped, across]), at.number(attribute_float(node, "scale"))])
    softcap = attribute_float(node, "softcap")
    if softcap:
        scores = at.value("Tanh", [at.value("Div", [scores, at.number(softcap)])])
        scores = at.value("Mul", [scores, at.number(softcap)])
    weights = at.value("Softmax", [at.value("Add", [scores, bias])], {"axis": -1})
    mixed = at.value("MatMul", [weights, at.value("Unsqueeze", [values, at.ints(2)])])
    mixed = at.value("Reshape", [mixed, at.ints(0, heads, -1, size)])
    joined = at.value("Transpose", [mixed], {"perm": [0, 2, 1, 3]})
    replace(graph, node, [at.value("Reshape", [joined, at.ints(0, 0, heads * size)]), key, value])
