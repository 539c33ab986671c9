"""The matrices of a saved graph file, decoded from its bytes: an account that shares no code with what wrote them.

Knows: how MatMulNBits, GatherBlockQuantized and DequantizeLinear read their inputs, onnx files. Does not know: what should be in
them (`quant.structure`), emission, packing.
Sources: com.microsoft MatMulNBits and GatherBlockQuantized; ai.onnx DequantizeLinear 21 to 25; onnx's IR for 4-bit types.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from appliance.errors import BundleError

_PIECE = 1 << 22
"""Weights decoded at once."""
_PASSED = ("Cast", "Transpose", "Unsqueeze", "Reshape")
"""Operators that only bring an initializer to where it is read; of a Reshape's and Unsqueeze's inputs the first counts."""
_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int16)
"""Twice the number of each code of FLOAT4E2M1."""

MATRICES = (
    "MatMul",
    "Gemm",
    "FusedMatMul",
    "MatMulNBits",
    "QMoE",
    "MatMulInteger",
    "MatMulIntegerToFloat",
    "DynamicQuantizeMatMul",
)
"""Operators that multiply by a matrix."""


@dataclass(frozen=True)
class Piece:
    """Some integers of a matrix [N,Kp], signed, the padding after K included."""

    rows: slice
    columns: slice
    q: np.ndarray


@dataclass(frozen=True)
class Written:
    """One quantized matrix as an operator of the file reads it: value = (q - zero) * scale [+ offset for the lowest q = 0].

    Attributes:
        node: name of the operator that reads it.
        weight: name of the initializer with the integers.
        tags: the initializer's metadata.
        place: where the bytes of the integers lie.
        scales: [N,G] float32.
        zeros: [N,G], signed as q is; what the operator takes where the file gives none stands here too.
        offsets: [N,G] float32, None where nothing is added.
        pieces: reads all integers, some at a time.
    """

    node: str
    weight: str
    tags: Mapping[str, str]
    place: tuple[object, ...]
    bits: int
    group: int
    scales: np.ndarray
    zeros: np.ndarray
    offsets: np.ndarray | None
    pieces: Callable[[], Iterator[Piece]]


class GraphFile:
    """One saved graph; numbers stay on disk until they are asked for."""

    def __init__(self, path: Path):
        self.path = path
        self.model = onnx.load(str(path), load_external_data=False)
        graph = self.model.graph
        self.initializers = {one.name: one for one in graph.initializer}
        self._makers = {name: node for node in graph.node for name in node.output if name}
        self._readers: dict[str, list[onnx.NodeProto]] = {}
        for node in graph.node:
            for name in node.input:
                self._readers.setdefault(name, []).append(node)
        self._constants = _constants(graph)
        self._tags = {value.name: {pair.key: pair.value for pair in value.metadata_props} for value in graph.value_info}

    def matrices(self) -> Iterator[Written]:
        """Every quantized matrix that an operator of the graph reads, in order; one read by two operators comes twice."""
        for node in self.model.graph.node:
            if node.op_type == "MatMulNBits":
                yield self._blocks(node, 1, 2, 3, _int(node, "bits", 4))
            elif node.op_type == "GatherBlockQuantized":
                if (_int(node, "gather_axis", 0), _int(node, "quantize_axis", 1)) != (0, 2):
                    raise BundleError(f"{self.path}: {node.name} picks rows or scales along another axis", "build it again")
                yield self._blocks(node, 0, 2, 3, _int(node, "bits", 4))
            elif node.op_type == "DequantizeLinear" and node.input[0] in self.initializers:
                yield self._dequantized(node)
            elif node.op_type == "Gather" and self._is_turned_table(node):
                yield self._table(node)

    def weights(self) -> Iterator[tuple[onnx.NodeProto, str]]:
        """Every operator that multiplies by a matrix which the file alone determines, and the initializers it is made of."""
        for node in self.model.graph.node:
            for name in node.input if node.op_type in MATRICES else ():
                for found in sorted(self.constants(name) or ()):
                    if len(self.initializers[found].dims) >= 2:
                        yield node, found

    def tags(self, name: str) -> Mapping[str, str]:
        """Metadata of an initializer."""
        return self._tags.get(name, {})

    def readers(self, name: str) -> Sequence[onnx.NodeProto]:
        """The operators that read a value."""
        return self._readers.get(name, [])

    def maker(self, name: str) -> onnx.NodeProto | None:
        """The operator that gives a value; None for an initializer or an input."""
        return self._makers.get(name)

    def origin(self, name: str) -> str:
        """The initializer that `name` is, or comes from by casts, moves and dequantization alone; "" when it does not."""
        while name not in self.initializers:
            maker = self._makers.get(name)
            if maker is None or maker.op_type not in (*_PASSED, "DequantizeLinear"):
                return ""
            name = maker.input[0]
        return name

    def constants(self, name: str) -> set[str] | None:
        """All initializers that `name` is computed from; None when an input of the graph is among what it is computed from."""
        return self._constants.get(name)

    def numbers(self, name: str) -> np.ndarray:
        """All numbers of an initializer in its own type; 4-bit ones one a byte, signed where the type is."""
        tensor = self.initializers[name]
        dims, kind = tuple(tensor.dims), tensor.data_type
        raw = self._raw(tensor)
        if kind in (onnx.TensorProto.INT4, onnx.TensorProto.UINT4, onnx.TensorProto.FLOAT4E2M1):
            return _unpacked(raw, kind)[: int(np.prod(dims))].reshape(dims)
        if kind == onnx.TensorProto.FLOAT8E8M0:
            return raw.reshape(dims)
        return raw.view(onnx.helper.tensor_dtype_to_np_dtype(kind)).reshape(dims)

    def _raw(self, tensor: onnx.TensorProto) -> np.ndarray:
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            if not tensor.raw_data:  # small ones that another exporter keeps as numbers
                return np.ascontiguousarray(onnx.numpy_helper.to_array(tensor)).reshape(-1).view(np.uint8)
            return np.frombuffer(tensor.raw_data, np.uint8)
        where = {pair.key: pair.value for pair in tensor.external_data}
        file = self.path.parent / where["location"]
        length, offset = int(where["length"]), int(where.get("offset", 0))
        if length == 0 or offset + length > file.stat().st_size:
            raise BundleError(f"{file}: {tensor.name} ends at byte {offset + length}, the file before", "build it again")
        return np.memmap(file, np.uint8, "r", offset, (length,))

    def place(self, name: str) -> tuple[object, ...]:
        """Where the bytes of an initializer lie."""
        tensor = self.initializers[name]
        external = {pair.key: pair.value for pair in tensor.external_data}
        return (external.get("location", self.path), external.get("offset", name))

    def _blocks(self, node: onnx.NodeProto, data: int, scale: int, zero: int, bits: int) -> Written:
        """Packed blocks [N,G,bytes]: unsigned codes, two of 4 bits a byte, the first low; the zero point is half the range."""
        weight, group, half = self.origin(node.input[data]), _int(node, "block_size", 0), 1 << (bits - 1)
        rows, count = self.initializers[weight].dims[:2]
        if self.initializers[weight].data_type != onnx.TensorProto.UINT8:
            raise BundleError(f"{self.path}: {weight} is not kept as bytes", "build it again")
        scales = self._scales(node.input[scale]).reshape(rows, count)
        zeros = np.zeros((rows, count), np.int16)
        if len(node.input) > zero and node.input[zero]:
            packed = self.numbers(self.origin(node.input[zero])).reshape(rows, -1)
            codes = packed if bits == 8 else np.stack([packed & 15, packed >> 4], axis=-1).reshape(rows, -1)
            zeros = codes[:, :count].astype(np.int16) - half

        def pieces() -> Iterator[Piece]:
            raw, width = self._raw(self.initializers[weight]).reshape(rows, -1), count * group
            step = max(1, _PIECE // width)
            for start in range(0, rows, step):
                part = np.asarray(raw[start : start + step])
                codes = part if bits == 8 else np.stack([part & 15, part >> 4], axis=-1).reshape(len(part), -1)
                yield Piece(slice(start, start + len(part)), slice(0, width), codes.astype(np.int16) - half)

        return self._written(node, weight, bits, group, scales, zeros, pieces)

    def _dequantized(self, node: onnx.NodeProto) -> Written:
        """A matrix [Kp,N] as MatMul reads it, dequantized along axis 0, or with one scale a column."""
        weight = node.input[0]
        tensor, axis = self.initializers[weight], _int(node, "axis", 1)
        columns, rows = tensor.dims
        group = _int(node, "block_size", 0)
        if (axis, bool(group)) not in ((0, True), (1, False)):
            raise BundleError(f"{self.path}: {node.name} dequantizes {weight} along axis {axis}", "build it again")
        count = -(-columns // group) if group else 1
        scales = self._scales(node.input[1]).reshape(count, rows).T
        zeros = np.zeros((rows, count), np.int16)
        if len(node.input) > 2 and node.input[2]:
            zeros = self.numbers(self.origin(node.input[2])).astype(np.int16).reshape(count, rows).T
        bits = 8 if tensor.data_type == onnx.TensorProto.INT8 else 4
        return self._written(node, weight, bits, group, scales, zeros, lambda: self._turned_pieces(weight))

    def _is_turned_table(self, node: onnx.NodeProto) -> bool:
        tensor = self.initializers.get(node.input[0])
        return tensor is not None and tensor.data_type == onnx.TensorProto.INT8 and _int(node, "axis", 0) == 1

    def _table(self, node: onnx.NodeProto) -> Written:
        """An embedding [Dp,V] of int8 whose columns are picked, then multiplied by scales that are picked likewise."""
        weight = node.input[0]
        columns, rows = self.initializers[weight].dims
        product = self._next(self._next(node, "Transpose"), "Mul")
        others = [self._makers.get(name) for name in product.input]
        scales = next(
            self._scales(gather.input[0]) for gather in map(self._gather_of, others) if gather is not None and gather is not node
        )
        count = 1 if scales.ndim == 1 else scales.shape[0]
        zeros = np.zeros((rows, count), np.int16)
        group = columns // count if count > 1 or scales.ndim > 1 else 0
        return self._written(node, weight, 8, group, scales.reshape(count, rows).T, zeros, lambda: self._turned_pieces(weight))

    def _gather_of(self, node: onnx.NodeProto | None) -> onnx.NodeProto | None:
        while node is not None and node.op_type in _PASSED:
            node = self._makers.get(node.input[0])
        return node if node is not None and node.op_type == "Gather" else None

    def _next(self, node: onnx.NodeProto, op: str) -> onnx.NodeProto:
        """The first operator `op` that follows along casts and moves."""
        while True:
            readers = self._readers.get(node.output[0], [])
            found = [one for one in readers if one.op_type == op]
            if found:
                return found[0]
            on = [one for one in readers if one.op_type in _PASSED]
            if not on:
                raise BundleError(f"{self.path}: no {op} follows {node.name}", "build it again")
            node = on[0]

    def _turned_pieces(self, weight: str) -> Iterator[Piece]:
        tensor = self.initializers[weight]
        columns, rows = tensor.dims
        raw, kind = self._raw(tensor), tensor.data_type
        step = max(2, _PIECE // rows // 2 * 2)  # an even number of lines is a whole number of bytes
        for start in range(0, columns, step):
            stop = min(start + step, columns)
            if kind == onnx.TensorProto.INT8:
                q = np.asarray(raw[start * rows : stop * rows]).view(np.int8)
            else:
                q = _unpacked(np.asarray(raw[start * rows // 2 : -(-stop * rows // 2)]), kind)
            yield Piece(slice(0, rows), slice(start, stop), q[: (stop - start) * rows].reshape(stop - start, rows).T)

    def _scales(self, name: str) -> np.ndarray:
        origin = self.origin(name)
        if not origin:
            raise BundleError(f"{self.path}: the scales {name} are not in the file", "build it again")
        numbers = self.numbers(origin)
        if self.initializers[origin].data_type == onnx.TensorProto.FLOAT8E8M0:
            return np.ldexp(np.float32(0.5), numbers.astype(np.int32) - 127)
        return numbers.astype(np.float32)

    def _written(
        self,
        node: onnx.NodeProto,
        weight: str,
        bits: int,
        group: int,
        scales: np.ndarray,
        zeros: np.ndarray,
        pieces: Callable[[], Iterator[Piece]],
    ) -> Written:
        offsets = self._offsets(node, bits, scales)
        return Written(node.name, weight, self.tags(weight), self.place(weight), bits, group, scales, zeros, offsets, pieces)

    def _offsets(self, node: onnx.NodeProto, bits: int, scales: np.ndarray) -> np.ndarray | None:
        """What an Add after the operator brings in: offsets [N,G] out of Add(Cast(offsets), scales * 2^(bits-1))."""
        product = node
        if node.op_type == "DequantizeLinear":
            products = [one for one in self._readers.get(node.output[0], []) if one.op_type == "MatMul"]
            if not products:
                return None
            product = products[0]
        for add in self._readers.get(product.output[0], []):
            for share in [self._makers.get(name) for name in add.input] if add.op_type == "Add" else ():
                picked = self._gather_of(share) if share is not None and share.op_type == "Unsqueeze" else None
                name = (
                    picked.input[0]
                    if picked is not None
                    else share.input[1]
                    if share is not None and share.op_type == "MatMul"
                    else ""
                )
                middles = self._makers.get(name)
                while middles is not None and middles.op_type == "Transpose":
                    middles = self._makers.get(middles.input[0])
                if middles is not None and middles.op_type == "Add" and self.constants(name):
                    return self._told_offsets(middles, bits, scales)
        return None

    def _told_offsets(self, middles: onnx.NodeProto, bits: int, scales: np.ndarray) -> np.ndarray:
        offsets, steps = middles.input
        product = self._makers[steps]
        factor = self.numbers(self.origin(product.input[1]))
        used = self._scales(product.input[0])
        if float(factor) != 1 << (bits - 1) or not any(
            np.array_equal(one.reshape(-1), used.reshape(-1)) for one in (scales, scales.T)
        ):
            raise BundleError(f"{self.path}: {middles.name} does not lift the offsets by half the range of q", "build it again")
        return self.numbers(self.origin(offsets)).astype(np.float32)


def _constants(graph: onnx.GraphProto) -> dict[str, set[str]]:
    """What is computed from initializers alone, and from which. Nodes of a graph stand in an order in which they can run."""
    found = {one.name: {one.name} for one in graph.initializer}
    for value in graph.input:
        found.pop(value.name, None)
    for node in graph.node:
        inputs = [name for name in node.input if name]
        if all(name in found for name in inputs):
            found.update({name: set().union(*(found[one] for one in inputs)) for name in node.output})
    return found


def _int(node: onnx.NodeProto, name: str, default: int) -> int:
    return next((attribute.i for attribute in node.attribute if attribute.name == name), default)


def _unpacked(raw: np.ndarray, kind: int) -> np.ndarray:
    """Two codes a byte, the first one low, as whole numbers; FLOAT4E2M1 doubled."""
    codes = np.stack([raw & 15, raw >> 4], axis=-1).reshape(-1)
    if kind == onnx.TensorProto.FLOAT4E2M1:
        return _E2M1[codes]
    if kind == onnx.TensorProto.INT4:
        return (codes.astype(np.int8) ^ 8) - np.int8(8)
    return codes
