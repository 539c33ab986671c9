"""Lowering: the graph's inputs and outputs take the fixed shapes of one step of the static pair.

Knows: the inputs of a prefill or decode step (`appliance.bundle.vocabulary`). Does not know: what the nodes do with them.

    input_ids [B,S]              ->  input_ids [1,tokens]
    attention_mask [B,T]         ->  mask [1,1,tokens,context+tokens] for each window there is (0 = full attention)
                                     position_ids [1,tokens], last_index [1]
    past_... [B,Hkv,past,d]      ->  past_... [1,Hkv,context,d]: the buffer as it was before the step
    present... [B,Hkv,T,d]       ->  present... [1,Hkv,tokens,d]: the new rows only
    logits [B,R,V]               ->  logits [1,1,V]
"""

import onnx_ir as ir

from appliance.bundle.vocabulary import (
    ATTENTION,
    ATTENTION_MASK,
    INPUT_IDS,
    LAST_INDEX,
    LOGITS,
    POSITION_IDS,
    window_mask_name,
)
from appliance.targets.capabilities import Flags, Target
from export.graph import attribute_int, nodes_of
from export.step import Step

STAGE = 1


def wanted(flags: Flags) -> bool:
    """Every static graph needs it."""
    return flags.form == "static"


def run(model: ir.Model, target: Target, step: Step) -> None:
    """See the picture above."""
    graph = model.graph
    named = {str(value.name): value for value in [*graph.inputs, *graph.outputs]}
    named[INPUT_IDS].shape = ir.Shape([1, step.tokens])
    logits = named[LOGITS]
    assert logits.shape is not None
    logits.shape = ir.Shape([1, 1, logits.shape[2]])
    attentions = nodes_of(graph, ATTENTION)
    for node in attentions:
        heads, size = attribute_int(node, "kv_heads"), attribute_int(node, "head_dim")
        for past in node.inputs[3:5]:
            assert past is not None
            past.shape = ir.Shape([1, heads, step.context, size])
        for present in node.outputs[1:3]:
            present.shape = ir.Shape([1, heads, step.tokens, size])
    mask = named[ATTENTION_MASK]
    assert not mask.uses(), "the canonical Attention is causal by itself and reads no mask"
    at = graph.inputs.index(mask)
    windows = sorted({attribute_int(node, "window") for node in attentions})
    masks = [(window_mask_name(window), [1, 1, step.tokens, step.context + step.tokens]) for window in windows]
    graph.inputs[at : at + 1] = [
        _input(POSITION_IDS, ir.DataType.INT64, [1, step.tokens]),
        *(_input(name, ir.DataType.FLOAT, shape) for name, shape in masks),
        _input(LAST_INDEX, ir.DataType.INT64, [1]),
    ]


def _input(name: str, dtype: ir.DataType, shape: list[int]) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
