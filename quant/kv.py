"""Keys and values in int8: one static scale for each head and channel of each layer, found on calibration text.

Knows: ranges of keys and values, how rotary positions move them, how scales enter a canonical graph.
Does not know: who computes the keys and values (`quant.calibrate`), or any target's attention operator (`export/lower`).

A key is kept after its rotation, and rotation turns channels i and i + r of a head into each other by an angle that grows
with the position. Ranges seen over the positions of a calibration text say nothing of later ones, but the length of the
pair, sqrt(k_i^2 + k_j^2), is the same at all of them: both channels get the range of that envelope.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from appliance.bundle.vocabulary import ATTENTION, LAYER
from appliance.errors import TargetError
from appliance.targets.capabilities import Target
from quant.graph import add_initializer, canonical, sizes

FLOAT, INT8 = "float32", "int8"
"""Ways to keep keys and values, as `Flags.kv_dtypes` names them."""
STEPS = 127


@dataclass(frozen=True)
class KvScales:
    """Scales of one layer, both [Hkv,1,d] float32: a channel's value is integer * scale."""

    key: np.ndarray
    value: np.ndarray


def check_held(kind: str, target: Target) -> None:
    """Whether `target` can carry keys and values as `kind`.

    Raises:
        TargetError: it cannot; the message names what it can.
    """
    takes = target.flags.kv_dtypes
    if kind not in takes:
        raise TargetError(
            f"keys and values in {kind} were asked for; target {target.name} carries {' or '.join(takes)}",
            "build without --kv, or for another target",
        )


def rotary_pairs(model: ir.Model) -> dict[int, int]:
    """By layer: r, so that channels i and i + r of a head (i < r) turn into each other; 0 = no rotary positions."""
    found = {}
    for node in canonical(model.graph, ATTENTION):
        table = node.inputs[5] if len(node.inputs) > 5 else None
        found[node.attributes["layer"].as_int()] = 0 if table is None else _last_size(table)
    return found


def envelope(key: np.ndarray, pairs: int) -> np.ndarray:
    """|k| of keys [...,d], but the length of the pair for the channels that rotary positions turn into each other."""
    size: np.ndarray = np.abs(key)
    if pairs:
        size[..., :pairs] = size[..., pairs : 2 * pairs] = np.hypot(key[..., :pairs], key[..., pairs : 2 * pairs])
    return size


def rewrite(model: ir.Model, scales: Mapping[int, KvScales]) -> None:
    """Let every Attention of a canonical `model`, in place, keep its keys and values in int8.

    Attention(q, k, v, past_key, past_value, cos, sin)  ->  Attention(..., key_scale, value_scale); past and present int8
    """
    graph = model.graph
    for node in canonical(graph, ATTENTION):
        layer = node.attributes["layer"].as_int()
        kept = []
        for part, array in (("key", scales[layer].key), ("value", scales[layer].value)):
            name = f"layers.{layer}.{part}.scales"
            kept.append(add_initializer(graph, ir.tensor(array, name=name), {LAYER: str(layer)}))
        tables = list(node.inputs[5:7])
        node.resize_inputs(9)
        for at, value in enumerate([*tables, *[None] * (2 - len(tables)), *kept], 5):
            node.replace_input_with(at, value)
        for state in [*node.inputs[3:5], *node.outputs[1:3]]:
            assert state is not None
            state.type = ir.TensorType(ir.DataType.INT8)


def _last_size(value: ir.Value) -> int:
    assert value.const_value is not None
    return sizes(value.const_value)[-1]
