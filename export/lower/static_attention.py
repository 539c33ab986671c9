"""Lowering: Attention as plain matrix products over a fixed buffer of keys and values.

Knows: the arithmetic of causal attention with rotary positions. Does not know: how far the buffer is filled; the mask
says that, and the runtime writes it.

Sources: grouped heads, Ainslie et al. 2023 (arXiv 2305.13245); rotary positions, Su et al. 2021 (arXiv 2104.09864).

    q -- heads -- rope -- x scale -- rows [1,Hkv,G*S,d] -+- x past_key^T -+
    k -- heads -- rope -+- present_key                   |                +- Concat - softcap - + mask - Softmax - Split
                        +--------------------------------+- x new_key^T --+                                       |   |
    v -- heads -+- present_value                               y - merge heads - Add -+- x past_value ------------+   |
                +----------------------------------------------------------------------- x new_value -----------------+

The G query heads of one key head are rows of one product, so keys are never repeated. The two products, over the
buffer and over the new rows, spare a copy of the whole buffer at each step: what is joined are the scores.

With int8 state, keys and values are integers on all four lines, and their scales, one a head and channel, go to where that
channel is alone: the keys' to the rows, the values' to y before its heads are merged.
"""

from dataclasses import dataclass

import onnx_ir as ir

from appliance.bundle.vocabulary import ATTENTION, POSITION_IDS, window_mask_name
from appliance.targets.capabilities import Flags, Target
from export.attention import Operands, integers, operands, quantized
from export.graph import Nodes, attribute_float, attribute_int, nodes_of, replace
from export.graph import sizes as sizes_of
from export.step import Step

STAGE = 20


def wanted(flags: Flags) -> bool:
    """Every static graph: no attention operator works over a buffer that is filled only in part, without a mask of ours."""
    return flags.form == "static"


def run(model: ir.Model, target: Target, step: Step) -> None:
    """Rewrite every Attention node; `static_inputs` has run before, and `cut_context` saw to the length of the tables."""
    graph = model.graph
    inputs = {str(value.name): value for value in graph.inputs}
    angles = _Angles(inputs[POSITION_IDS], step)
    for node in nodes_of(graph, ATTENTION):
        sizes = _Sizes.of(node, step)
        write = Nodes(graph, str(node.name), node)
        replace(graph, node, _attention(write, operands(node), sizes, angles, inputs[window_mask_name(sizes.window)]))


@dataclass(frozen=True)
class _Sizes:
    tokens: int
    context: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    softcap: float
    window: int

    @classmethod
    def of(cls, node: ir.Node, step: Step) -> "_Sizes":
        heads, kv_heads, head_dim, window = (attribute_int(node, name) for name in ("heads", "kv_heads", "head_dim", "window"))
        scale, softcap = attribute_float(node, "scale"), attribute_float(node, "softcap")
        return cls(step.tokens, step.context, heads, kv_heads, head_dim, scale, softcap, window)

    @property
    def group(self) -> int:
        """Query heads of one key head."""
        return self.heads // self.kv_heads


def _attention(
    write: Nodes, has: Operands, sizes: _Sizes, angles: "_Angles", mask: ir.Value
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """The picture above: (y [1,S,H*d], new keys, new values [1,Hkv,S,d])."""
    heads = _split_heads(write, has.q, sizes.heads, sizes)
    new_key = _split_heads(write, has.k, sizes.kv_heads, sizes)
    new_value = _split_heads(write, has.v, sizes.kv_heads, sizes)
    if has.tables:
        cosine, sine = (angles.rows(write, table) for table in has.tables)
        heads = _rotate(write.below("q_rope"), heads, cosine, sine, sizes)
        new_key = _rotate(write.below("k_rope"), new_key, cosine, sine, sizes)
    scaled = write.value("Mul", [heads, write.number(sizes.scale)])
    rows = write.value("Reshape", [scaled, write.ints(1, sizes.kv_heads, sizes.group * sizes.tokens, sizes.head_dim)])
    if has.scales:
        rows = write.value("Mul", [rows, has.scales[0]])
        new_key, new_value = (quantized(write, x, scale) for x, scale in zip((new_key, new_value), has.scales, strict=True))
    keys = [write.value("Transpose", [x], {"perm": [0, 1, 3, 2]}) for x in (has.past_key, new_key)]
    values = [has.past_value, new_value]
    if has.scales:  # behind the Transpose: onnxruntime 1.32 writes a wrong graph when it moves one past a DequantizeLinear
        keys, values = ([integers(write, x) for x in both] for both in (keys, values))
    scores = [write.value("MatMul", [rows, one]) for one in keys]
    weights = _softmax(write, write.value("Concat", scores, {"axis": -1}), mask, sizes)
    lengths = write.ints(sizes.context, sizes.tokens)
    over_past, over_new = write.node("Split", [weights, lengths], {"axis": -1}, outputs=2).outputs
    seen = write.value("Add", [write.value("MatMul", pair) for pair in zip((over_past, over_new), values, strict=True)])
    if has.scales:
        seen = write.value("Mul", [seen, has.scales[1]])
    by_head = write.value("Reshape", [seen, write.ints(1, sizes.heads, sizes.tokens, sizes.head_dim)])
    merged = write.value("Transpose", [by_head], {"perm": [0, 2, 1, 3]})
    return write.value("Reshape", [merged, write.ints(1, sizes.tokens, sizes.heads * sizes.head_dim)]), new_key, new_value


def _split_heads(write: Nodes, x: ir.Value | None, heads: int, sizes: _Sizes) -> ir.Value:
    """[1,S,heads*d] -> [1,heads,S,d]."""
    split = write.value("Reshape", [x, write.ints(1, sizes.tokens, heads, sizes.head_dim)])
    return write.value("Transpose", [split], {"perm": [0, 2, 1, 3]})


def _softmax(write: Nodes, scores: ir.Value, mask: ir.Value, sizes: _Sizes) -> ir.Value:
    """Weights from scores [1,Hkv,G*S,context+S] under the mask [1,1,S,context+S]; a soft cap comes before the mask."""
    if sizes.softcap:
        cap = write.number(sizes.softcap)
        scores = write.value("Mul", [write.value("Tanh", [write.value("Div", [scores, cap])]), cap])
    columns = sizes.context + sizes.tokens
    # A batch of one leaves the first axis free for the key heads, so that nothing has more than four dimensions.
    by_group = write.value("Reshape", [scores, write.ints(sizes.kv_heads, sizes.group, sizes.tokens, columns)])
    weights = write.value("Softmax", [write.value("Add", [by_group, mask])], {"axis": -1})
    return write.value("Reshape", [weights, write.ints(1, sizes.kv_heads, sizes.group * sizes.tokens, columns)])


def _rotate(write: Nodes, x: ir.Value, cosine: ir.Value, sine: ir.Value, sizes: _Sizes) -> ir.Value:
    """Turn the first 2r dimensions of x [1,heads,S,d] by angles [1,1,S,r]; dimensions i and i+r are a pair.

    (a, b) -> (a cos - b sin, b cos + a sin)
    """
    half = sizes_of(cosine)[3]
    kept = sizes.head_dim - 2 * half
    lengths = [half, half, kept] if kept else [half, half]
    first, second, *rest = write.node("Split", [x, write.ints(*lengths)], {"axis": -1}, outputs=len(lengths)).outputs
    turned_first = write.value("Sub", [write.value("Mul", [first, cosine]), write.value("Mul", [second, sine])])
    turned_second = write.value("Add", [write.value("Mul", [second, cosine]), write.value("Mul", [first, sine])])
    return write.value("Concat", [turned_first, turned_second, *rest], {"axis": -1})


class _Angles:
    """Rows of the rotary tables at the step's positions, gathered once for all layers that share a table."""

    def __init__(self, positions: ir.Value, step: Step):
        self._positions = positions
        self._step = step
        self._known: dict[ir.Value, ir.Value] = {}

    def rows(self, write: Nodes, table: ir.Value | None) -> ir.Value:
        """[positions, r] -> [1,1,S,r]."""
        assert table is not None
        if table not in self._known:
            shape = (1, 1, self._step.tokens, sizes_of(table)[1])
            found = write.value("Gather", [table, self._positions], {"axis": 0}, name=f"{table.name}/Gather")
            self._known[table] = write.value("Reshape", [found, write.ints(*shape)], name=f"{table.name}/Reshape")
            self._known[table].type, self._known[table].shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(shape)
        return self._known[table]
