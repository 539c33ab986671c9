"""Attention as com.microsoft GroupQueryAttention over key and value buffers that may be updated in place.

Knows: that operator's inputs. Does not know: who owns the buffers (`appliance.runtime`).
Source: onnxruntime, ContribOperators.md, GroupQueryAttention.

    attention_mask - ReduceSum - Sub 1 - Cast --> seqlens_k [B] int32          (index of each row's last valid key)
                   - Shape[1] ---------- Cast --> total_sequence_length int32   (longest row)

    qkv or q, k, v ----------------------+
    past_key, past_value ----------------+-- GroupQueryAttention(do_rotary, causal) --> y, present_key, present_value
    seqlens_k, total_sequence_length ----+
    cos, sin ----------------------------+
    key_scale, value_scale (int8 state) -+

A past of the buffer's full length makes the present just as long, so that both may be one buffer: the kernel writes the
new rows behind the valid ones and leaves the rest. Over a past it takes several new tokens for a batch of one, or one
new token for a batch of any size (onnxruntime 1.32 refuses the rest). With int8 state it rounds new keys (after rope) and
values itself, half to even within -128..127, and attends to integer x scale throughout, new tokens included.
"""

import onnx_ir as ir

from appliance.bundle import vocabulary
from appliance.targets.capabilities import Flags, Target
from export.attention import operands
from export.blocks import STATE, UPDATE
from export.graph import Nodes, attribute_float, attribute_int, nodes_of, replace
from export.step import Step

STAGE = 20


def wanted(flags: Flags) -> bool:
    """Dynamic shapes and the contrib attention."""
    return flags.form == "dynamic" and flags.attention == "contrib"


def run(model: ir.Model, target: Target, step: Step) -> None:
    """Rewrite every Attention."""
    graph = model.graph
    found = nodes_of(graph, vocabulary.ATTENTION)
    if not found:
        return
    at = Nodes(graph, "/model/attention", graph[0])
    mask = next(value for value in graph.inputs if value.name == vocabulary.ATTENTION_MASK)
    tokens = at.value("ReduceSum", [mask, at.ints(1)], {"keepdims": 0})
    int32 = {"to": int(ir.DataType.INT32)}
    lengths = at.value("Cast", [at.value("Sub", [tokens, at.integer(1)])], int32, name="seqlens_k")
    longest = at.value("Squeeze", [at.value("Shape", [mask], {"start": 1, "end": 2})])
    total = at.value("Cast", [longest], int32, name="total_sequence_length")
    for node in found:
        _rewrite(graph, node, lengths, total)
    for value in graph.inputs:
        if value.metadata_props.get(STATE, "").startswith("kv."):
            value.metadata_props[UPDATE] = "inplace"


def _rewrite(graph: ir.Graph, node: ir.Node, lengths: ir.Value, total: ir.Value) -> None:
    has = operands(node)
    new: list[ir.Value | None] = [has.q, has.k, has.v]
    split = _packed(node)
    if split is not None:
        new = [split.inputs[0], None, None]
    at = Nodes(graph, (node.name or "").rpartition("/")[0], node)
    attributes: dict[str, int | float | str] = {
        "num_heads": attribute_int(node, "heads"),
        "kv_num_heads": attribute_int(node, "kv_heads"),
        "scale": attribute_float(node, "scale"),
        "softcap": attribute_float(node, "softcap"),
        "local_window_size": attribute_int(node, "window") or -1,
        "do_rotary": 1 if has.tables else 0,
        "rotary_interleaved": 0,
    }
    optional: list[ir.Value | None] = [*(has.tables or (None, None))]
    if has.scales:
        attributes |= {"kv_cache_bit_width": 8, "k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL"}
        optional += [None, None, None, *has.scales]  # between them: position_ids, attention_bias, head_sink
    while optional and optional[-1] is None:
        optional.pop()
    fused = at.node(
        "GroupQueryAttention",
        [*new, has.past_key, has.past_value, lengths, total, *optional],
        attributes,
        domain="com.microsoft",
        outputs=3,
    )
    replace(graph, node, fused.outputs)
    if split is not None:
        graph.remove(split, safe=True)


def _packed(node: ir.Node) -> ir.Node | None:
    """The Split whose three outputs are exactly q, k and v, and nothing else reads them."""
    split = node.inputs[0].producer() if node.inputs[0] is not None else None
    if split is None or split.op_type != "Split" or list(split.outputs) != list(node.inputs[:3]):
        return None
    return split if all(len(value.uses()) == 1 for value in split.outputs) else None
