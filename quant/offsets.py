"""The nodes that carry the offsets of groups: their share of a linear is one small MatMul on sums of the input's blocks.

Knows: onnx_ir nodes. Does not know: how integers are multiplied (`quant.emit`), or where offsets come from (`quant.keep`).

    value = (q + h) * scale + offset = q * scale + middle       h = 2^(bits-1), middle = offset + h * scale

so that x @ W^T = x @ (q * scale)^T + sums(x) @ middles^T, sums(x) [...,G] being those of every block of x. The first product is
what an operator without zero points computes, the second is in float: what int8 activations lose, they lose on the first
alone. Middles are made of the two float16 numbers that the checkpoint has when the session is loaded (constant folding).
MatMulNBits' own float zero points would do without the extra nodes, and are 60 times slower.
"""

import numpy as np
import onnx_ir as ir

from quant.graph import Writer, sizes, tensor_of


class Offsets:
    """Writes one model's nodes; what they share is written once."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, int], ir.Value] = {}
        self._rows: dict[int, ir.Value] = {}
        self._columns: dict[int, ir.Value] = {}

    def added(self, at: Writer, node: ir.Node, y: ir.Value, scales: ir.Value) -> ir.Value:
        """y [...,N] with what the offsets of a QuantLinear add to it; `scales` [N,G] float32.

        x [...,K] - Reshape [...,G,g] - ReduceSum - MatMul(middles [G,N]) -+
                                                                        y -+- Add
        """
        sums = self._block_sums(at, node)
        offsets = node.inputs[5]
        assert offsets is not None
        if id(offsets) not in self._columns:
            middles = self.middles(at, node, scales)
            self._columns[id(offsets)] = at.value("Transpose", [middles], {"perm": [1, 0]}, name="offsets/Transpose")
        return at.value(
            "Add", [y, at.value("MatMul", [sums, self._columns[id(offsets)]], name="offsets/MatMul")], name="offsets/Add"
        )

    def middles(self, at: Writer, node: ir.Node, scales: ir.Value) -> ir.Value:
        """What integer 0 stands for: [N,G] float32, from offsets [N,G] float16 and scales [N,G] float32."""
        offsets = node.inputs[5]
        assert offsets is not None
        if id(offsets) not in self._rows:
            half = at.constant(np.float32(1 << (node.attributes["bits"].as_int() - 1)))
            wide = at.value("Cast", [offsets], {"to": int(ir.DataType.FLOAT)}, name="offsets/Cast")
            steps = at.value("Mul", [scales, half], name="offsets/Mul")
            self._rows[id(offsets)] = at.value("Add", [wide, steps], name="offsets/middles")
        return self._rows[id(offsets)]

    def _block_sums(self, at: Writer, node: ir.Node) -> ir.Value:
        x = node.inputs[0]
        assert x is not None
        columns, group = sizes(tensor_of(node.inputs[1], node))[1], node.attributes["group"].as_int()
        assert columns % group == 0, f"{node.name}: offsets of {columns} weights in groups of {group}"
        if (id(x), group) not in self._sums:
            rank = len(x.shape) if x.shape is not None else 3
            shape = at.constant(np.array([*([0] * (rank - 1)), columns // group, group]))
            blocks = at.value("Reshape", [x, shape], name="offsets/Reshape")
            axes = at.constant(np.array([-1]))
            self._sums[id(x), group] = at.value("ReduceSum", [blocks, axes], {"keepdims": 0}, name="offsets/ReduceSum")
        return self._sums[id(x), group]
