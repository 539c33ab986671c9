"""What a bundle's graph files hold: every initializer with its bytes, and the integers and scales of each matrix.

Knows: files as `quant.emit` and `export.save` leave them. Does not know: sessions, losses.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from appliance.bundle.record import SizeRecord
from appliance.bundle.vocabulary import PARTS, ROLE
from quant.scheme import TABLES

_NAMES = {"FLOAT": "float32"}


@dataclass(frozen=True)
class Stored:
    """One initializer of a file.

    Attributes:
        kind: what it is: "int4 weights", "scales", "zero points", "float32", "int64 constants" ...
        place: where its bytes lie; equal for two graphs that share them.
    """

    name: str
    role: str
    kind: str
    bytes: int
    place: tuple[object, ...]


def stored(graphs: Iterable[Path]) -> list[Stored]:
    """Every initializer of these graph files; what several of them share, once."""
    found: dict[tuple[object, ...], Stored] = {}
    for path in graphs:
        model = ir.load(path)
        kinds = _kinds(model.graph)
        for value in model.graph.initializers.values():
            tensor = value.const_value
            assert tensor is not None
            place: tuple[object, ...] = (path, value.name)
            if isinstance(tensor, ir.ExternalTensor):
                place = (Path(tensor.base_dir or "") / str(tensor.location), tensor.offset, tensor.length)
            tags = value.metadata_props
            role = tags.get(ROLE) or ("attn.qkv" if PARTS in tags else "")
            kind = (
                kinds.get(str(value.name))
                or f"{_NAMES.get(tensor.dtype.name, tensor.dtype.name.lower())}{'' if role else ' constants'}"
            )
            found.setdefault(place, Stored(str(value.name), role, kind, int(tensor.nbytes), place))
    return list(found.values())


def _kinds(graph: ir.Graph) -> dict[str, str]:
    """What quantized operators read, by the initializer's name; scales may come to them through a Cast and an Unsqueeze."""
    found: dict[str, str] = {}
    for node in graph:
        if node.op_type == "MatMulNBits":
            said = (f"int{node.attributes['bits'].as_int()} weights", "scales", "zero points")
            inputs = (node.inputs[1], node.inputs[2], node.inputs[3] if len(node.inputs) > 3 else None)
        elif node.op_type == "GatherBlockQuantized":
            said = (f"int{node.attributes['bits'].as_int()} weights", "scales", "zero points")
            inputs = (node.inputs[0], node.inputs[2], node.inputs[3] if len(node.inputs) > 3 else None)
        elif node.op_type == "DequantizeLinear" and node.inputs[0] is not None and node.inputs[0].const_value is not None:
            said = (f"{node.inputs[0].const_value.dtype.name.lower()} weights", "scales", "zero points")
            inputs = (node.inputs[0], node.inputs[1], node.inputs[2] if len(node.inputs) > 2 else None)
        else:
            continue
        for value, kind in zip(inputs, said, strict=True):
            source = _source(value)
            if source is not None:
                found[str(source.name)] = kind
    return found


def _source(value: ir.Value | None) -> ir.Value | None:
    """The initializer behind a value."""
    while value is not None and value.const_value is None:
        producer = value.producer()
        if producer is None or producer.op_type not in ("Cast", "Unsqueeze", "Transpose", "Reshape"):
            return None
        value = producer.inputs[0]
    return value


def size(graphs: Iterable[Path], parameters: int, table_parameters: int) -> SizeRecord:
    """Bytes of all initializers in the files.

    Args:
        parameters: of the model, tied ones once.
        table_parameters: those of embedding and head among them.
    """
    tensors = stored(graphs)
    by_type: dict[str, int] = defaultdict(int)
    for one in tensors:
        by_type[one.kind] += one.bytes
    total = sum(one.bytes for one in tensors)
    body = sum(one.bytes for one in tensors if one.role not in ("", "rope", *TABLES))
    rest = parameters - table_parameters
    return SizeRecord(
        bits_per_weight=round(8 * total / max(parameters, 1), 4),
        bits_per_body_weight=round(8 * body / rest, 4) if rest > 0 else None,
        bytes=total,
        bytes_by_type=dict(sorted(by_type.items())),
    )


def by_role(tensors: Iterable[Stored]) -> Mapping[str, int]:
    """Bytes of each role."""
    found: dict[str, int] = defaultdict(int)
    for one in tensors:
        found[one.role or "constant"] += one.bytes
    return dict(sorted(found.items()))
