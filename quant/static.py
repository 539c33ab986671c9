"""Calibrated ranges of activations: what they are, how they lie on a QuantLinear, and what they compute.

Knows: scale and zero point, the attributes. Does not know: how a range is found (`quant.ranges`), how it is emitted.

A static QuantLinear has, besides its weight, one range for what enters and one for what leaves, both of the width that its
`activation` says (a matrix unit of QNN's kind takes no other):

    input_scale, output_scale              float      value = (u - zero_point) * scale, one for the whole tensor
    input_zero_point, output_zero_point    int        0 .. 2^bits - 1, so that 0 is met exactly
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from appliance.bundle.vocabulary import QUANT_LINEAR
from appliance.errors import TargetError
from quant.arrays import Floats
from quant.graph import canonical

STATIC_BITS = {"static-u8": 8, "static-u16": 16}
"""Width of the activations that have calibrated ranges."""


@dataclass(frozen=True)
class Range:
    """Unsigned integers over a range that holds 0: value = (u - zero_point) * scale, u in 0 .. 2^bits - 1."""

    scale: float
    zero_point: int
    bits: int

    @classmethod
    def over(cls, low: float, high: float, bits: int) -> "Range":
        """The finest that reaches from `low` to `high`, and to 0 where that lies outside."""
        low, high, top = min(low, 0.0), max(high, 0.0), (1 << bits) - 1
        scale = float(np.float32(max((high - low) / top, 1e-30)))
        return cls(scale, min(max(round(-low / scale), 0), top), bits)

    @property
    def low(self) -> float:
        """Smallest value it can hold."""
        return -self.zero_point * self.scale

    @property
    def high(self) -> float:
        """Largest value it can hold."""
        return ((1 << self.bits) - 1 - self.zero_point) * self.scale

    def apply(self, values: np.ndarray) -> Floats:
        """QuantizeLinear, then DequantizeLinear: round half to even, saturate."""
        steps = np.rint(values.astype(np.float32, copy=False) / np.float32(self.scale))
        steps = np.clip(steps + np.float32(self.zero_point), 0, (1 << self.bits) - 1)
        found: Floats = ((steps - np.float32(self.zero_point)) * np.float32(self.scale)).astype(np.float32)
        return found


@dataclass(frozen=True)
class Ranges:
    """Both ranges of one linear; `reason` says why it has another width than its scheme gives, "" when it has not."""

    input: Range
    output: Range
    reason: str = ""


def attach(model: ir.Model, ranges: Mapping[str, Ranges]) -> None:
    """Write the ranges, by name of the linear's node, to the static QuantLinears of a decided model; 16-bit ones included.

    Raises:
        TargetError: a static linear has no range.
    """
    for node in canonical(model.graph, QUANT_LINEAR):
        if node.attributes["activation"].as_string() not in STATIC_BITS:
            continue
        if str(node.name) not in ranges:
            raise TargetError(f"no range was calibrated for {node.name}", "calibrate the model first")
        found = ranges[str(node.name)]
        assert found.input.bits == found.output.bits, f"{node.name}: two widths at one linear"
        node.attributes["activation"] = ir.AttrString("activation", activation_of(found.input))
        for side, one in (("input", found.input), ("output", found.output)):
            node.attributes[f"{side}_scale"] = ir.AttrFloat32(f"{side}_scale", one.scale)
            node.attributes[f"{side}_zero_point"] = ir.AttrInt64(f"{side}_zero_point", one.zero_point)


def by_weight(model: ir.Model, ranges: Mapping[str, Ranges]) -> dict[str, Ranges]:
    """The same ranges by the name of the weight that each linear of a decided model multiplies with."""
    found = {}
    for node in canonical(model.graph, QUANT_LINEAR):
        integers = node.inputs[1]
        if integers is not None and str(node.name) in ranges:
            found[str(integers.name).removesuffix(".q")] = ranges[str(node.name)]
    return found


def activation_of(taken: Range) -> str:
    """The activation of a linear that takes such a range."""
    return next(name for name, bits in STATIC_BITS.items() if bits == taken.bits)


def range_of(node: ir.Node, side: str) -> Range:
    """The range of a static QuantLinear's "input" or "output".

    Raises:
        TargetError: none was calibrated.
    """
    if f"{side}_scale" not in node.attributes:
        raise TargetError(f"{node.name} has static activations and no calibrated range", "calibrate the model first")
    scale = float(np.float32(node.attributes[f"{side}_scale"].as_float()))
    bits = STATIC_BITS[node.attributes["activation"].as_string()]
    return Range(scale, node.attributes[f"{side}_zero_point"].as_int(), bits)
