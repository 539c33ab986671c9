"""DequantizeLinear in front of a plain MatMul, standard operators only; quantized activations spelled out.

Knows: opset-21 DequantizeLinear, blocked or one scale a row; the arithmetic of MatMulNBits level 4, so that both forms give
the same numbers; Q/DQ with calibrated ranges. Does not know: how integers and ranges were found, roles, or any provider.

onnxruntime's CPU provider fuses DequantizeLinear and MatMul back to MatMulNBits, at the level that the session is opened with.
Ours is 1 (cpu-static.toml): float activations, taken as they come. Its default, 4, quantizes them once more; blocks that are
whole multiples of max|block|/127 already stay what they are (2e-7 relative), but what a scheme leaves float would not.
OpenVINO's CPU device does the same with groups of 32 unless DYNAMIC_QUANTIZATION_GROUP_SIZE is 0; with larger groups that
costs 3e-3, so its target file must turn it off.
"""

import numpy as np
import onnx_ir as ir

from appliance.targets.capabilities import Target
from quant.arrays import group_size, groups_of, pack_columns
from quant.graph import Writer, add_initializer, lazy, sizes, tensor_of
from quant.offsets import Offsets
from quant.scheme import Form
from quant.static import STATIC_BITS, Range, range_of

OPERATOR = "DequantizeLinear"
ELEMENT = "int"
OPSET = 21
DOMAINS: tuple[str, ...] = ()

_NO_BLOCK = 1e-30
"""Stands for the maximum of a block of zeros: 0 / (1e-30 / 127) is 0, where 0 / 0 would be no number."""


def refusal(form: Form, roles: tuple[str, ...]) -> str | None:
    """Rows of an embedding are picked as bytes, so 4 bits (two weights a byte) cannot be."""
    if "embed" in roles and form.bits != 8:
        return "standard operators cannot pick rows of packed 4-bit weights, an embedding takes 8 bits"
    if form.offsets and form.activation in STATIC_BITS:
        return "static activations leave no place for the float offsets of groups"
    if form.activation not in ("float", "block-dynamic", "token-dynamic", *STATIC_BITS):
        return f"this form has no {form.activation} activations"
    return None


class Emitter:
    """Writes one model's nodes; what they share is written once."""

    def __init__(self, target: Target):
        self._target = target
        self._weights: dict[int, tuple[ir.Value, ir.Value]] = {}
        self._zeros: dict[int, ir.Value] = {}
        self._activations: dict[tuple[int, int], ir.Value] = {}
        self._pads: dict[tuple[int, int], ir.Value] = {}
        self._offsets = Offsets()
        self._static: dict[tuple[int, Range], ir.Value] = {}

    def linear(self, node: ir.Node) -> ir.Value:
        """The output that takes the place of a QuantLinear's. Kp = K up to whole groups.

        The weight lies as MatMul wants it, so nothing is transposed at run time. One scale a row (group 0) is per axis 1,
        scales [N]; static activations get Q/DQ on both sides of the MatMul, both of one width, as QNN's HTP wants them:

            w [Kp,N] int4 or int8 -+- DequantizeLinear(axis 0, block_size g) - MatMul - (Add bias) - (Q - DQ) - y
          scales (, zeros) [G,N] --+                                             |
                      x [...,K] - (Pad) - (quantize per block or token | Q - DQ) -+
        """
        at = Writer(node)
        group, columns = _group(node), sizes(tensor_of(node.inputs[1], node))[1]
        weight, scales = self._weight(at, node)
        parts: list[ir.Value | None] = [weight, self._float(at, scales)]
        if len(node.inputs) > 4 and node.inputs[4] is not None:
            parts.append(self._zero_points(at, node, node.inputs[4]))
        elif not group:
            parts.append(self._no_zero_points(at, node, scales))
        blocks = {"axis": 0, "block_size": group} if group else {"axis": 1}
        activation = node.attributes["activation"].as_string()
        static = activation in STATIC_BITS
        if static:
            assert node.inputs[0] is not None
            missing = groups_of(columns, group) * group_size(columns, group) - columns
            x = self._ranged(at, node, "input", self._padded(at, node.inputs[0], missing))
        else:
            x = self._activation(at, node, group, columns, activation)
        y = at.value("MatMul", [x, at.value("DequantizeLinear", parts, blocks)])
        if len(node.inputs) > 5 and node.inputs[5] is not None:
            y = self._offsets.added(at, node, y, at.value("Transpose", [parts[1]], {"perm": [1, 0]}, name="scales/Transpose"))
        if len(node.inputs) > 3 and node.inputs[3] is not None:
            y = at.value("Add", [y, node.inputs[3]])
        return self._ranged(at, node, "output", y) if static else y

    def embedding(self, node: ir.Node) -> ir.Value:
        """The output that takes the place of a QuantEmbedding's: float rows [B,S,D].

        The table lies as the head's MatMul wants it, so a tied head reads the very same initializer; only the picked
        columns are turned:

            q [Dp,V] int8 - Gather(axis 1) - Transpose - Cast - Reshape [B,S,G,g] -+
            scales [G,V] -- Gather(axis 1) - Transpose ------ Unsqueeze [B,S,G,1] -+- Mul - Reshape [B,S,Dp] - (Slice)

        One scale a row (scales [V]) needs no blocks: q [B,S,D] x Unsqueeze(Gather(scales)) [B,S,1].
        """
        at = Writer(node)
        columns = sizes(tensor_of(node.inputs[1], node))[1]
        group = group_size(columns, _group(node))
        count = groups_of(columns, group)
        weight, stored = self._weight(at, node)
        turn = {"perm": [1, 2, 0]}
        q = at.value("Transpose", [at.value("Gather", [weight, node.inputs[0]], {"axis": 1})], turn)
        q = at.value("Cast", [q], {"to": int(ir.DataType.FLOAT)})
        if not _group(node):
            wide = at.value("Gather", [self._float(at, stored), node.inputs[0]], {"axis": 0}, name="Gather_scales")
            return at.value("Mul", [q, at.value("Unsqueeze", [wide, at.constant(np.array([2]))])])
        q = at.value("Reshape", [q, at.constant(np.array([0, 0, count, group]))], name="Reshape_blocks")
        scales = at.value("Gather", [self._float(at, stored), node.inputs[0]], {"axis": 1}, name="Gather_scales")
        scales = at.value("Transpose", [scales], turn, name="Transpose_scales")
        scales = at.value("Unsqueeze", [scales, at.constant(np.array([3]))])
        rows = at.value("Reshape", [at.value("Mul", [q, scales]), at.constant(np.array([0, 0, count * group]))])
        return rows if count * group == columns else at.cut(rows, columns)

    def _weight(self, at: Writer, node: ir.Node) -> tuple[ir.Value, ir.Value]:
        """The turned integers and scales as initializers."""
        q, scales = node.inputs[1], node.inputs[2]
        assert q is not None and scales is not None
        if id(q) not in self._weights:
            bits, group = node.attributes["bits"].as_int(), _group(node)
            read, read_scales = tensor_of(q, node), tensor_of(scales, node)
            rows, columns = sizes(read)
            count = groups_of(columns, group)
            name = str(q.name).removesuffix(".q")
            kind = ir.DataType.INT4 if bits == 4 else ir.DataType.INT8
            shape = (count * group_size(columns, group), rows)
            packed = lazy(f"{name}.t{bits}", kind, shape, lambda: pack_columns(read.numpy(), bits, group))
            half = self._target.weights.scale_dtype == "float16"
            dtype, stored = (ir.DataType.FLOAT16, np.float16) if half else (ir.DataType.FLOAT, np.float32)
            turned_shape = (count, rows) if group else (rows,)
            turned = lazy(
                f"{scales.name}.t",
                dtype,
                turned_shape,
                lambda: np.ascontiguousarray(read_scales.numpy().T.reshape(turned_shape), dtype=stored),
            )
            self._weights[id(q)] = (
                add_initializer(at.graph, packed, q.metadata_props),
                add_initializer(at.graph, turned, scales.metadata_props),
            )
        return self._weights[id(q)]

    def _no_zero_points(self, at: Writer, node: ir.Node, scales: ir.Value) -> ir.Value:
        """[N] zeros, spelled out: QNN's HTP takes 4-bit weights without a zero point for something else, in silence."""
        if id(scales) not in self._zeros:
            bits, rows = node.attributes["bits"].as_int(), sizes(tensor_of(node.inputs[2], node))[0]
            kind, size = (ir.DataType.INT4, (rows + 1) // 2) if bits == 4 else (ir.DataType.INT8, rows)
            dtype = np.uint8 if bits == 4 else np.int8
            name = f"{str(scales.name).removesuffix('.t')}.none"
            zeros = lazy(name, kind, (rows,), lambda: np.zeros(size, dtype))
            self._zeros[id(scales)] = add_initializer(at.graph, zeros, scales.metadata_props)
        return self._zeros[id(scales)]

    def _zero_points(self, at: Writer, node: ir.Node, zeros: ir.Value) -> ir.Value:
        """Turned, and signed as the weight is: zero_point - 2^(bits-1), [G,N] int4 or int8."""
        if id(zeros) not in self._zeros:
            bits, read = node.attributes["bits"].as_int(), tensor_of(zeros, node)
            rows, count = sizes(read)
            shape = (count, rows) if _group(node) else (rows,)

            def signed() -> np.ndarray:
                packed = pack_columns((read.numpy().astype(np.int16) - (1 << (bits - 1))).astype(np.int8), bits, 1)
                return packed if bits == 4 else packed.reshape(shape)

            kind = ir.DataType.INT4 if bits == 4 else ir.DataType.INT8
            self._zeros[id(zeros)] = add_initializer(
                at.graph, lazy(f"{zeros.name}.t{bits}", kind, shape, signed), zeros.metadata_props
            )
        return self._zeros[id(zeros)]

    def _float(self, at: Writer, scales: ir.Value) -> ir.Value:
        if scales.dtype == ir.DataType.FLOAT:
            return scales
        return at.value("Cast", [scales], {"to": int(ir.DataType.FLOAT)}, name="scales")

    def _activation(self, at: Writer, node: ir.Node, group: int, columns: int, activation: str) -> ir.Value:
        """x [...,K] padded to whole groups and, for dynamic ones, on the grid of int8 per block; shared by all readers.

        A token is one block as wide as the row.
        scale = max|block| / 127; round half to even; no clipping is needed, as |x| / scale is at most 127.

            x - Pad - Reshape [...,G,g] -+- Abs - ReduceMax - Max - Div 127 -+- scale
                                         +- Div (scale) - Round - Mul (scale) - Reshape [...,Kp]
        """
        x = node.inputs[0]
        assert x is not None
        size, count = group_size(columns, group), groups_of(columns, group)
        if activation == "token-dynamic":
            size, count = size * count, 1
        key = (id(x), size if activation != "float" else -size)
        if key in self._activations:
            return self._activations[key]
        rank = len(x.shape) if x.shape is not None else 3
        value = self._padded(at, x, count * size - columns)
        if activation != "float":
            keep = [0] * (rank - 1)
            blocks = at.value("Reshape", [value, at.constant(np.array([*keep, count, size]))], name="quantize/Reshape_blocks")
            most = at.value("Abs", [blocks], name="quantize/Abs")
            most = at.value("ReduceMax", [most, at.constant(np.array([-1]))], {"keepdims": 1}, name="quantize/ReduceMax")
            most = at.value("Max", [most, at.constant(np.float32(_NO_BLOCK))], name="quantize/Max")
            scale = at.value("Div", [most, at.constant(np.float32(127))], name="quantize/Div_scale")
            steps = at.value("Div", [blocks, scale], name="quantize/Div")
            steps = at.value("Round", [steps], name="quantize/Round")
            value = at.value("Mul", [steps, scale], name="quantize/Mul")
            value = at.value("Reshape", [value, at.constant(np.array([*keep, count * size]))], name="quantize/Reshape")
        self._activations[key] = value
        return value

    def _padded(self, at: Writer, x: ir.Value, missing: int) -> ir.Value:
        """x with so many zeros at the end of each row; shared by all readers."""
        if not missing:
            return x
        key = (id(x), missing)
        if key not in self._pads:
            rank = len(x.shape) if x.shape is not None else 3
            pads = np.array([0] * (2 * rank - 1) + [missing])
            self._pads[key] = at.value("Pad", [x, at.constant(pads)], name="quantize/Pad")
        return self._pads[key]

    def _ranged(self, at: Writer, node: ir.Node, side: str, value: ir.Value) -> ir.Value:
        """`value` through QuantizeLinear and DequantizeLinear with the node's calibrated range of that side.

        Readers of one value share its pair, as they share its range. Zero points are unsigned 8- or 16-bit scalars.
        """
        taken = range_of(node, side)
        key = (id(value), taken)
        if key not in self._static:
            kind = np.uint8 if taken.bits == 8 else np.uint16
            numbers = [at.constant(np.array(taken.scale, np.float32)), at.constant(np.array(taken.zero_point, kind))]
            q = at.value("QuantizeLinear", [value, *numbers], name=f"{side}/QuantizeLinear")
            self._static[key] = at.value("DequantizeLinear", [q, *numbers], name=f"{side}/DequantizeLinear")
        return self._static[key]


def _group(node: ir.Node) -> int:
    return node.attributes["group"].as_int()
