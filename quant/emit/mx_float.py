"""Microscaling spelled out for onnxruntime's processor kernels, which have no FP4: a stand-in to measure with, never shipped.

Knows: the arithmetic of `quant.mx` in operators that run everywhere. Does not know: who measures.
"""

import math

import numpy as np
import onnx_ir as ir

from appliance.targets.capabilities import Target
from quant import mx
from quant.arrays import dequantize
from quant.graph import Writer, add_initializer, lazy, sizes, tensor_of
from quant.scheme import Form

OPERATOR = "stand-in"
ELEMENT = "mxfp4"
OPSET = 19
DOMAINS: tuple[str, ...] = ()

_LEAST = 2.0 ** (mx.E4M3.emax - mx.BIAS)
"""A largest magnitude whose power of two is the smallest that E8M0 has."""


def refusal(form: Form, roles: tuple[str, ...]) -> str | None:
    """Always: no bundle holds it."""
    return "it is a stand-in to measure with"


class Emitter:
    """Writes one model's nodes; activations that several linears read are rounded once."""

    def __init__(self, target: Target):
        self._activations: dict[int, ir.Value] = {}

    def linear(self, node: ir.Node) -> ir.Value:
        """The output that takes the place of a QuantLinear's.

        x - (round to MXFP8) - MatMul(values of the elements [K,N] float32) - (Add bias) - y
        """
        at = Writer(node)
        q, scales = tensor_of(node.inputs[1], node), tensor_of(node.inputs[2], node)
        rows, columns = sizes(q)
        wide = lazy(
            f"{q.name}.values",
            ir.DataType.FLOAT,
            (columns, rows),
            lambda: np.ascontiguousarray(dequantize(q.numpy(), scales.numpy(), mx.BLOCK).T),
        )
        weight = node.inputs[1]
        assert weight is not None
        y = at.value("MatMul", [self._activation(at, node, columns), add_initializer(at.graph, wide, weight.metadata_props)])
        if len(node.inputs) > 3 and node.inputs[3] is not None:
            y = at.value("Add", [y, node.inputs[3]])
        return y

    def embedding(self, node: ir.Node) -> ir.Value:
        """No embedding is kept in FP4."""
        raise AssertionError(f"{node.name}: an embedding in MXFP4")

    def _activation(self, at: Writer, node: ir.Node, columns: int) -> ir.Value:
        """x as MXFP8 holds it. The logarithm may be off by one at a power of two, so its power is put right by comparison.

        x - Pad - Reshape [...,G,32] -+- Abs - ReduceMax - Max - p = 2^floor(log2) -+
                                      +- Div p - Mul 256 - Clip - Cast E4M3 - Cast -+- Mul p/256 - Reshape - Slice
        """
        x = node.inputs[0]
        assert x is not None
        if id(x) in self._activations or node.attributes["activation"].as_string() != "mxfp8":
            return self._activations.get(id(x), x)
        rank, count = len(x.shape) if x.shape is not None else 3, -(-columns // mx.BLOCK)
        value = x
        if count * mx.BLOCK != columns:
            pads = np.array([0] * (2 * rank - 1) + [count * mx.BLOCK - columns])
            value = at.value("Pad", [value, at.constant(pads)], name="quantize/Pad")
        keep = [0] * (rank - 1)
        blocks = at.value("Reshape", [value, at.constant(np.array([*keep, count, mx.BLOCK]))], name="quantize/Reshape_blocks")
        power = self._power(at, blocks)
        factor = at.constant(np.float32(2.0**mx.E4M3.emax))
        steps = at.value("Mul", [at.value("Div", [blocks, power], name="quantize/Div"), factor], name="quantize/Mul_factor")
        ends = [at.constant(np.float32(sign * mx.E4M3.largest)) for sign in (-1, 1)]
        steps = at.value("Clip", [steps, *ends], name="quantize/Clip")
        steps = at.value("Cast", [steps], {"to": int(ir.DataType.FLOAT8E4M3FN)}, name="quantize/Cast")
        steps = at.value("Cast", [steps], {"to": int(ir.DataType.FLOAT)}, name="quantize/Cast_back")
        scale = at.value("Div", [power, factor], name="quantize/Div_factor")
        value = at.value("Mul", [steps, scale], name="quantize/Mul")
        value = at.value("Reshape", [value, at.constant(np.array([*keep, count * mx.BLOCK]))], name="quantize/Reshape")
        self._activations[id(x)] = value if count * mx.BLOCK == columns else at.cut(value, columns)
        return self._activations[id(x)]

    def _power(self, at: Writer, blocks: ir.Value) -> ir.Value:
        """2^floor(log2 max|block|) [...,G,1], at least `_LEAST`."""
        two = at.constant(np.float32(2))
        most = at.value("Abs", [blocks], name="quantize/Abs")
        most = at.value("ReduceMax", [most, at.constant(np.array([-1]))], {"keepdims": 1}, name="quantize/ReduceMax")
        most = at.value("Max", [most, at.constant(np.float32(_LEAST))], name="quantize/Max")
        power = at.value("Mul", [at.value("Log", [most], name="quantize/Log"), at.constant(np.float32(1 / math.log(2)))])
        power = at.value("Pow", [two, at.value("Floor", [power], name="quantize/Floor")], name="quantize/Pow")
        half = at.value("Div", [power, two], name="quantize/Div_half")
        power = at.value("Where", [at.value("Greater", [power, most], name="quantize/Greater"), half, power])
        twice = at.value("Mul", [power, two], name="quantize/Mul_twice")
        return at.value("Where", [at.value("LessOrEqual", [twice, most], name="quantize/LessOrEqual"), twice, power])
