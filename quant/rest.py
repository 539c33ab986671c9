"""What a written file must hold beside quantized matrices: what stayed float, key and value scales, how activations are taken.

Knows: a decided canonical model, and how a product's bias and Q/DQ stand in a file. Does not know: integers of weights and their
scales (`quant.structure`), what wrote the file.

    x - QuantizeLinear - DequantizeLinear -+
                   weight - DequantizeLinear - MatMul - (Add offsets) - (Add bias) - QuantizeLinear - DequantizeLinear - y
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
import onnx_ir as ir

from appliance.bundle.vocabulary import LINEAR, QUANT_EMBEDDING, QUANT_LINEAR, ROLE
from appliance.errors import BundleError
from quant.graph import canonical
from quant.static import STATIC_BITS, Range, range_of
from quant.written import GraphFile

AGAIN = "build it again; if it stays so, it is a bug of this program"

CUT = ("rope", "position")
"""Roles of tables with a row a position: a file may hold the first rows alone, or compute them where they are read."""

_LEVELS = {"block-dynamic": 4, "float": 1}
"""accuracy_level of a MatMulNBits with such activations."""

Rows = Sequence[tuple[str, slice]]
"""Names of the weights that a written matrix is made of, with their rows."""


@dataclass(frozen=True)
class Linear:
    """A linear, but for its weight.

    Attributes:
        activation: one of `vocabulary.ACTIVATIONS`.
        ranges: of what enters and what leaves, of a static one.
        bias: its name, "" where there is none.
    """

    activation: str = "float"
    ranges: tuple[Range, Range] | None = None
    bias: str = ""


@dataclass(frozen=True)
class Rest:
    """What a decided canonical model says of all but the integers.

    Attributes:
        floats: every float tensor that is no part of a quantized weight, by name; numbers are read when they are compared.
        roles: of those that have one.
        linears: by name of the weight.
    """

    floats: Mapping[str, ir.TensorProtocol] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)
    linears: Mapping[str, Linear] = field(default_factory=dict)


def rest_of(model: ir.Model) -> Rest:
    """Read it off a decided canonical model; call it before lowering."""
    decided, linears = set(), {}
    for node in canonical(model.graph, QUANT_LINEAR, QUANT_EMBEDDING, LINEAR):
        weight, bias = node.inputs[1], ([*node.inputs, None])[3 if node.op_type == QUANT_LINEAR else 2]
        assert weight is not None
        if node.op_type != LINEAR:
            decided |= {id(value) for value in (*node.inputs[1:3], *node.inputs[4:6]) if value is not None}
        if node.op_type == QUANT_EMBEDDING:
            continue
        name = "" if bias is None else str(bias.name)
        if node.op_type == LINEAR:
            linears[str(weight.name)] = Linear(bias=name)
            continue
        activation = node.attributes["activation"].as_string()
        ranges = (range_of(node, "input"), range_of(node, "output")) if activation in STATIC_BITS else None
        linears[str(weight.name).removesuffix(".q")] = Linear(activation, ranges, name)
    kept = {
        name: value
        for name, value in model.graph.initializers.items()
        if id(value) not in decided and value.uses() and value.const_value is not None
    }
    kept = {name: value for name, value in kept.items() if value.dtype is not None and value.dtype.is_floating_point()}
    floats = {name: value.const_value for name, value in kept.items() if value.const_value is not None}
    return Rest(floats, {name: value.metadata_props.get(ROLE, "") for name, value in kept.items()}, linears)


class Reading:
    """One file being compared with what it must hold beside its quantized matrices. Each of its methods raises `BundleError`."""

    def __init__(self, file: GraphFile, wanted: Rest, compared: set[tuple[object, ...]]):
        """Args: `compared`: places that hold what they should already; it is added to."""
        self._file, self._wanted, self._compared = file, wanted, compared
        self._nodes = {node.name: node for node in file.model.graph.node}
        self._found: set[str] = set()

    def linear(self, reader: str, parts: Rows) -> None:
        """How the operator called `reader`, which reads a matrix made of `parts`, takes its input, its bias and its output."""
        node = self._nodes[reader]
        if node.op_type == "DequantizeLinear":
            node = next((one for one in self._file.readers(node.output[0]) if one.op_type == "MatMul"), node)
        if node.op_type not in ("MatMulNBits", "MatMul"):
            return
        linears = [self._wanted.linears.get(name) for name, _ in parts]
        for (name, _), linear in zip(parts, linears, strict=True):
            if linear is not None and node.op_type == "MatMulNBits":
                self._check_level(node, name, linear)
            elif linear is not None and linear.ranges is not None:
                self._check_ranges(node, name, *linear.ranges)
        self._check_bias(node, [(linear.bias, rows) for (_, rows), linear in zip(parts, linears, strict=True) if linear])

    def joined(self, node: onnx.NodeProto, weight: str, parts: Rows) -> None:
        """A float matrix `weight`, as MatMul reads it, that is made of others; and the bias that the product gets."""
        numbers = self._file.numbers(weight)
        for name, rows in parts:
            self._compare(name, numbers[:, rows].T, (self._file.place(weight), name))
        linears = [(self._wanted.linears.get(name), rows) for name, rows in parts]
        self._check_bias(node, [(one.bias, rows) for one, rows in linears if one is not None])

    def by_name(self) -> None:
        """All that has its name, a matrix of a float product turned; then, that nothing is missing."""
        held = self._file.initializers
        for name in self._wanted.floats:
            if name in held:
                self._compare(name, self._file.numbers(name), (self._file.place(name), name))
            elif (turned := f"{name}.transposed") in held:
                self._compare(name, self._file.numbers(turned).T, (self._file.place(turned), name))
        lost = [name for name in self._wanted.floats if name not in self._found and self._wanted.roles[name] not in CUT]
        if lost:
            raise BundleError(f"{self._file.path}: {lost[0]} is not in the file", AGAIN)

    def _compare(self, name: str, found: np.ndarray, place: tuple[object, ...]) -> None:
        self._found.add(name)
        if place in self._compared:
            return
        self._compared.add(place)
        wanted = self._wanted.floats[name].numpy()
        if self._wanted.roles[name] in CUT:
            wanted = wanted[: len(found)]
        if found.shape != wanted.shape or found.dtype != wanted.dtype:
            told = f"{found.dtype} {list(found.shape)}, not {wanted.dtype} {list(wanted.shape)}"
            raise BundleError(f"{self._file.path}: {name} is {told}", AGAIN)
        if not np.array_equal(found, wanted):
            at = tuple(int(index) for index in np.argwhere(found != wanted)[0])
            count = int((found != wanted).sum())
            what = (
                f"{count} numbers of {name} are not what they were, the first at {list(at)}: {found[at]} instead of {wanted[at]}"
            )
            raise BundleError(f"{self._file.path}: {what}", AGAIN)

    def _check_level(self, node: onnx.NodeProto, name: str, linear: Linear) -> None:
        level = next((one.i for one in node.attribute if one.name == "accuracy_level"), 0)
        if level != _LEVELS[linear.activation]:
            what = f"weight {name} is read at accuracy level {level}, {linear.activation} activations are level"
            raise BundleError(f"{self._file.path}: {what} {_LEVELS[linear.activation]}", AGAIN)

    def _check_bias(self, node: onnx.NodeProto, parts: Sequence[tuple[str, slice]]) -> None:
        """The bias that a product adds holds that of each part in its rows."""
        found = self._bias(node)
        for name, rows in parts:
            if not name and found and node.op_type == "MatMulNBits":
                raise BundleError(f"{self._file.path}: {node.name} got the bias {found}", AGAIN)
            if name and not found:
                raise BundleError(f"{self._file.path}: {node.name} lost the bias {name}", AGAIN)
            if name:
                self._compare(name, self._file.numbers(found)[rows], (self._file.place(found), name))

    def _bias(self, node: onnx.NodeProto) -> str:
        if node.op_type == "MatMulNBits":
            return node.input[5] if len(node.input) > 5 else ""
        for add in (one for one in self._file.readers(node.output[0]) if one.op_type == "Add"):
            held = [name for name in add.input if name in self._file.initializers]
            return held[0] if held else self._bias(add)  # what comes first is the share of offsets
        return ""

    def _check_ranges(self, product: onnx.NodeProto, name: str, entering: Range, leaving: Range) -> None:
        back = self._file.maker(product.input[0])
        self._check_range(name, "input", back, entering)
        after = product
        while adds := [one for one in self._file.readers(after.output[0]) if one.op_type == "Add"]:
            after = adds[0]
        quantize = next((one for one in self._file.readers(after.output[0]) if one.op_type == "QuantizeLinear"), None)
        back = None if quantize is None else next(iter(self._file.readers(quantize.output[0])), None)
        self._check_range(name, "output", back, leaving)

    def _check_range(self, name: str, side: str, back: onnx.NodeProto | None, wanted: Range) -> None:
        """`back`: the DequantizeLinear behind the QuantizeLinear of that side."""
        to = None if back is None or back.op_type != "DequantizeLinear" else self._file.maker(back.input[0])
        if back is None or to is None or to.op_type != "QuantizeLinear":
            raise BundleError(f"{self._file.path}: weight {name}: its {side} is not quantized", AGAIN)
        kind = np.uint8 if wanted.bits == 8 else np.uint16
        told = (np.float32(wanted.scale), kind(wanted.zero_point))
        for node in (to, back):
            found = [self._file.numbers(one) for one in node.input[1:3]]
            for what, have, want in zip(("scale", "zero point"), found, told, strict=True):
                if have.dtype != want.dtype or have.size != 1 or have.reshape(()) != want:
                    text = f"{node.op_type} of its {side} has the {what} {have.tolist()} ({have.dtype}), {want} was decided"
                    raise BundleError(f"{self._file.path}: weight {name}: {text}", AGAIN)
