"""Microscaling weights and activations in standard operators: FP4 and FP8 elements with E8M0 scales (opset 24).

Knows: the Q/DQ pattern around a plain MatMul. Does not know: the arithmetic (`quant.mx`), roles, or any provider.
onnxruntime 1.32 has no kernel for it; onnx's reference evaluator computes it.
"""

import numpy as np
import onnx_ir as ir

from appliance.targets.capabilities import Target
from quant import mx
from quant.arrays import Bytes
from quant.graph import Writer, add_initializer, lazy, sizes, tensor_of
from quant.scheme import Form

OPERATOR = "DequantizeLinear"
ELEMENT = "mxfp4"
OPSET = 24
DOMAINS: tuple[str, ...] = ()

_IR_VERSION = 12
"""The first whose tensors can be FLOAT8E8M0."""


def refusal(form: Form, roles: tuple[str, ...]) -> str | None:
    """Blocks are the format's 32, activations MXFP8 or float; rows of two elements a byte cannot be picked."""
    if "embed" in roles:
        return "standard operators cannot pick rows of packed 4-bit weights, an embedding stays float"
    if form.group != mx.BLOCK:
        return f"MXFP4 has blocks of {mx.BLOCK}"
    if form.activation not in ("float", "mxfp8"):
        return f"MXFP4 weights have no {form.activation} activations"
    return None


def upgrade(model: ir.Model) -> None:
    """Opset and IR version that know the types; the operators that are in the graph already mean the same in both."""
    model.graph.opset_imports[""] = max(model.graph.opset_imports.get("", 0), OPSET)
    model.ir_version = max(model.ir_version, _IR_VERSION)


class Emitter:
    """Writes one model's nodes; what they share is written once."""

    def __init__(self, target: Target):
        self._activations: dict[int, ir.Value] = {}

    def linear(self, node: ir.Node) -> ir.Value:
        """The output that takes the place of a QuantLinear's. Kp = K up to whole blocks; layout as in `quant.emit.qdq`.

            w [Kp,N] FLOAT4E2M1 -+- DequantizeLinear(axis 0, block_size 32) - MatMul - (Add bias) - y
        scales [G,N] FLOAT8E8M0 -+                                             |
                   x [...,K] - (Pad) - (Q/DQ of FLOAT8E4M3FN) -----------------+
        """
        at = Writer(node)
        q, scales = node.inputs[1], node.inputs[2]
        assert q is not None and scales is not None
        read, read_scales = tensor_of(q, node), tensor_of(scales, node)
        (rows, columns), count = sizes(read), sizes(read_scales)[1]
        name = str(q.name).removesuffix(".q")
        shape = (count * mx.BLOCK, rows)
        weight = lazy(f"{name}.e2m1", ir.DataType.FLOAT4E2M1, shape, lambda: _turned(read.numpy(), shape))
        turned = lazy(
            f"{name}.e8m0",
            ir.DataType.FLOAT8E8M0,
            (count, rows),
            lambda: np.ascontiguousarray(mx.exponents_of(read_scales.numpy()).T),
        )
        parts = [add_initializer(at.graph, one, q.metadata_props) for one in (weight, turned)]
        blocks = {"axis": 0, "block_size": mx.BLOCK, "output_dtype": int(ir.DataType.FLOAT)}
        x = self._activation(at, node, columns, count)
        y = at.value("MatMul", [x, at.value("DequantizeLinear", parts, blocks)])
        if len(node.inputs) > 3 and node.inputs[3] is not None:
            y = at.value("Add", [y, node.inputs[3]])
        return y

    def embedding(self, node: ir.Node) -> ir.Value:
        """Refused by `refusal`."""
        raise AssertionError(f"{node.name}: an embedding in MXFP4")

    def _activation(self, at: Writer, node: ir.Node, columns: int, count: int) -> ir.Value:
        """x [...,K] padded to whole blocks and, for mxfp8, as MXFP8 holds it; shared by all readers.

        Casting to E8M0 rounding down is floor(log2), and 2^-8 is E4M3's emax:

            x - Pad -+- Reshape [...,G,32] - Abs - ReduceMax - Mul 2^-8 - Cast E8M0 (down) -+- scale
                     +- QuantizeLinear (scale) - DequantizeLinear (scale)
        """
        x = node.inputs[0]
        assert x is not None
        if id(x) in self._activations:
            return self._activations[id(x)]
        rank, value, width = len(x.shape) if x.shape is not None else 3, x, count * mx.BLOCK
        if width != columns:
            pads = at.constant(np.array([0] * (2 * rank - 1) + [width - columns]))
            value = at.value("Pad", [value, pads], name="quantize/Pad")
        if node.attributes["activation"].as_string() == "mxfp8":
            shape = at.constant(np.array([*([0] * (rank - 1)), count, mx.BLOCK]))
            most = at.value("Abs", [at.value("Reshape", [value, shape], name="quantize/Reshape")], name="quantize/Abs")
            most = at.value("ReduceMax", [most, at.constant(np.array([-1]))], {"keepdims": 0}, name="quantize/ReduceMax")
            most = at.value("Mul", [most, at.constant(np.float32(2.0**-mx.E4M3.emax))], name="quantize/Mul")
            scale = at.value("Cast", [most], {"to": int(ir.DataType.FLOAT8E8M0), "round_mode": "down"}, name="quantize/Cast")
            for op, kind in (("QuantizeLinear", ir.DataType.FLOAT8E4M3FN), ("DequantizeLinear", ir.DataType.FLOAT)):
                blocks = {"axis": -1, "block_size": mx.BLOCK, "output_dtype": int(kind)}
                value = at.value(op, [value, scale], blocks, name=f"quantize/{op}")
        self._activations[id(x)] = value
        return value


def _turned(q: np.ndarray, shape: tuple[int, int]) -> Bytes:
    """The bytes of a FLOAT4E2M1 tensor [Kp,N]."""
    whole = np.zeros(shape, np.int8)
    whole[: q.shape[1]] = q.T
    return mx.pack_pairs(whole.reshape(1, -1)).reshape(-1)
