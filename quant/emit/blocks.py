"""MatMulNBits and GatherBlockQuantized: packed blocks with their scales, int8 activations inside the operator.

Knows: the two contrib operators. Does not know: how integers were found, roles, or any provider.
Source: com.microsoft MatMulNBits and GatherBlockQuantized. accuracy_level 4 quantizes a row's activations per weight
block: scale = max|block| / 127. Without a zero point input a stored byte means byte - 2^(bits-1).
"""

import numpy as np
import onnx_ir as ir

from appliance.errors import TargetError
from appliance.targets.capabilities import Target
from quant.arrays import groups_of, pack_rows, pack_zeros
from quant.graph import Writer, add_initializer, lazy, sizes, tensor_of
from quant.offsets import Offsets
from quant.scheme import Form

OPERATOR = "MatMulNBits"
ELEMENT = "int"
OPSET = 13
DOMAINS = ("com.microsoft",)

_LEVELS = {"block-dynamic": 4, "float": 1}


def refusal(form: Form, roles: tuple[str, ...]) -> str | None:
    """Groups must be a power of two, 16 to 256 (512 gives zeros); activations int8 per block, or float beside 4-bit weights.

    8-bit weights have no fast kernel at level 1 (float): one row takes tens of times as long as at level 4. Rows of an
    embedding are picked, not multiplied.
    """
    if form.group not in (16, 32, 64, 128, 256):
        return "MatMulNBits takes groups of 16, 32, 64, 128 or 256"
    if form.activation not in _LEVELS:
        return f"MatMulNBits has no {form.activation} activations"
    if form.bits == 8 and form.activation == "float" and set(roles) != {"embed"}:
        return "MatMulNBits multiplies 8-bit weights by float activations too slowly to decode with"
    return None


class Emitter:
    """Writes one model's nodes; what they share is written once."""

    def __init__(self, target: Target):
        self._target = target
        self._packed: dict[int, ir.Value] = {}
        self._scales: dict[int, ir.Value] = {}
        self._zeros: dict[int, ir.Value] = {}
        self._offsets = Offsets()

    def linear(self, node: ir.Node) -> ir.Value:
        """The output that takes the place of a QuantLinear's.

             scales (fp16) - Cast -+        (the Cast is folded when the session is loaded)
                        B (uint8) -+- MatMulNBits - y
        x, zero points, bias (maybe) -+

        Offsets add what `quant.offsets` says.
        """
        at = Writer(node)
        bits, group = _shape_of(node)
        rows, columns = sizes(tensor_of(node.inputs[1], node))
        bias = node.inputs[3] if len(node.inputs) > 3 else None
        inputs = [node.inputs[0], self._weight(at, node, bits, group), self._float_scales(at, node)]
        attributes = {
            "K": columns,
            "N": rows,
            "bits": bits,
            "block_size": group,
            "accuracy_level": _LEVELS[node.attributes["activation"].as_string()],
        }
        zeros = node.inputs[4] if len(node.inputs) > 4 else None
        if zeros is not None:
            inputs.append(self._packed_zeros(at, node, zeros, bits))
        if bias is not None:
            inputs += [None] * (5 - len(inputs)) + [bias]
        y = at.value("MatMulNBits", inputs, attributes, domain="com.microsoft")
        if len(node.inputs) < 6 or node.inputs[5] is None:
            return y
        return self._offsets.added(at, node, y, self._float_scales(at, node))

    def embedding(self, node: ir.Node) -> ir.Value:
        """The output that takes the place of a QuantEmbedding's: float rows [B,S,D].

        The data keeps MatMulNBits' three dimensions, so that a tied head reads the very same initializer:

            scales [V,G] - Cast - Unsqueeze -+
                     data [V,G,g*bits/8] ----+- GatherBlockQuantized [B,S,G,g] - Reshape [B,S,G*g] - Slice (if D < G*g)
                                  ids [B,S] -+

        With offsets, Unsqueeze(Gather(middles [V,G], ids)) is added to the blocks.
        """
        at = Writer(node)
        bits, group = _shape_of(node)
        columns = sizes(tensor_of(node.inputs[1], node))[1]
        width = groups_of(columns, group) * group
        scales = at.value("Unsqueeze", [self._float_scales(at, node), at.constant(np.array([2]))])
        attributes = {"bits": bits, "block_size": group, "gather_axis": 0, "quantize_axis": 2}
        data = self._weight(at, node, bits, group)
        rows = at.value("GatherBlockQuantized", [data, node.inputs[0], scales], attributes, domain="com.microsoft")
        if len(node.inputs) > 5 and node.inputs[5] is not None:
            middles = self._offsets.middles(at, node, self._float_scales(at, node))
            picked = at.value("Gather", [middles, node.inputs[0]], {"axis": 0}, name="offsets/Gather")
            picked = at.value("Unsqueeze", [picked, at.constant(np.array([3]))], name="offsets/Unsqueeze")
            rows = at.value("Add", [rows, picked], name="offsets/Add")
        flat = at.value("Reshape", [rows, at.constant(np.array([0, 0, width]))])
        return flat if width == columns else at.cut(flat, columns)

    def _weight(self, at: Writer, node: ir.Node, bits: int, group: int) -> ir.Value:
        q = node.inputs[1]
        tensor = tensor_of(q, node)
        assert q is not None
        if id(q) not in self._packed:
            rows, columns = sizes(tensor)
            shape = (rows, groups_of(columns, group), group * bits // 8)
            name = f"{str(q.name).removesuffix('.q')}.q{bits}"
            packed = lazy(name, ir.DataType.UINT8, shape, lambda: pack_rows(tensor.numpy(), bits, group))
            self._packed[id(q)] = add_initializer(at.graph, packed, q.metadata_props)
        return self._packed[id(q)]

    def _packed_zeros(self, at: Writer, node: ir.Node, zeros: ir.Value, bits: int) -> ir.Value:
        """Zero points as the operator packs them: [N, ceil(G*bits/8)] uint8, two of 4 bits a byte, the earlier one low."""
        if id(zeros) not in self._zeros:
            tensor = tensor_of(zeros, node)
            rows, count = sizes(tensor)
            packed = lazy(
                f"{zeros.name}.q{bits}",
                ir.DataType.UINT8,
                (rows, -(-count * bits // 8)),
                lambda: pack_zeros(tensor.numpy(), bits),
            )
            self._zeros[id(zeros)] = add_initializer(at.graph, packed, zeros.metadata_props)
        return self._zeros[id(zeros)]

    def _float_scales(self, at: Writer, node: ir.Node) -> ir.Value:
        """Scales in the activations' type, as the operator wants them; on disk in the target's."""
        scales = node.inputs[2]
        tensor = tensor_of(scales, node)
        assert scales is not None
        if id(scales) not in self._scales:
            if self._target.weights.scale_dtype == "float16":
                value = at.value("Cast", [scales], {"to": int(ir.DataType.FLOAT)}, name="scales")
            else:
                wide = lazy(f"{scales.name}32", ir.DataType.FLOAT, sizes(tensor), lambda: tensor.numpy().astype(np.float32))
                value = add_initializer(at.graph, wide, scales.metadata_props)
            self._scales[id(scales)] = value
        return self._scales[id(scales)]


def _shape_of(node: ir.Node) -> tuple[int, int]:
    bits, group = node.attributes["bits"].as_int(), node.attributes["group"].as_int()
    if group == 0:
        raise TargetError(f"{node.name} has one scale a row, which MatMulNBits does not take", "choose a group")
    return bits, group
