"""A decided canonical model, made again from a bundle's graph file: its layers can then be run one by one without deciding anew.

Knows: how matrices in a file belong to the canonical model's weights (`quant.structure`), where the record keeps the ranges of
static activations: in the file they lie in nodes that lowering may have moved. Does not know: who decided them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from appliance.bundle.record import MatrixRecord, RangeRecord, Record
from appliance.bundle.vocabulary import ATTENTION, DOMAIN, EMBEDDING, LAYER, LINEAR, QUANT_EMBEDDING, QUANT_LINEAR, ROLE
from appliance.errors import BundleError
from quant import kv
from quant.graph import add_initializer, canonical, drop_unused, lazy, replace
from quant.static import STATIC_BITS, Range, Ranges, attach
from quant.structure import base_name, rows_of
from quant.written import GraphFile, Written


@dataclass(frozen=True)
class _Found:
    """A weight in the file: the matrix that holds it, and which of its rows it is."""

    written: Written
    rows: slice


def can_restore(record: Record, target: str) -> bool:
    """Whether file and record say all that is needed; older records do not tell the ranges of static activations."""
    static = any(one.activation in STATIC_BITS for one in record.matrices)
    return not static or bool(ranges_of(record, target))


def ranges_of(record: Record, target: str) -> dict[str, Ranges]:
    """Of every static linear, by its node's name, as they were calibrated for `target`; empty where the record has none."""

    def made(told: RangeRecord) -> Range:
        return Range(told.scale, told.zero_point, told.bits)

    return {
        name: Ranges(made(one.input), made(output), one.reason)
        for one in record.ranges.get(target, ())
        if one.input is not None
        for name, output in one.outputs.items()
    }


def restore(model: ir.Model, path: Path, record: Record, target: str) -> ir.Model:
    """Put the integers of the file, a graph of `target`, into a canonical float `model`, in place; and ranges, if it has any.

    Raises:
        BundleError: a matrix that the record names is not in the file, or has another shape than the model's.
        TargetError: the record has ranges for `target`, and none for one of its static linears.
    """
    file = GraphFile(path)
    found = _matrices(file, model.graph)
    told = {one.name: one for one in record.matrices}
    made: dict[str, list[ir.Value | None]] = {}
    nodes = canonical(model.graph, LINEAR, EMBEDDING)
    weights = []
    for node in nodes:
        weight = node.inputs[1]
        assert weight is not None
        name = str(weight.name)
        if name not in told:
            continue
        if name not in found:
            raise BundleError(f"{path} has no matrix {name}, which the record tells of", "build the bundle again")
        weights.append(weight)
        if name not in made:
            made[name] = _initializers(model.graph, weight, found[name], told[name], path)
        _rewrite(node, made[name], told[name])
    drop_unused(model.graph, weights)
    _restore_kv(model, file)
    attach(model, ranges_of(record, target))
    return model


def _matrices(file: GraphFile, graph: ir.Graph) -> dict[str, _Found]:
    """By the weight's name in the canonical graph."""
    by_role = {}
    for node in canonical(graph, LINEAR, EMBEDDING):
        weight = node.inputs[1]
        assert weight is not None
        by_role[weight.metadata_props.get(ROLE, ""), weight.metadata_props.get(LAYER, "")] = str(weight.name)
    found: dict[str, _Found] = {}
    for written in file.matrices():
        parts = rows_of(written.tags)
        if not parts:
            found.setdefault(base_name(written.weight), _Found(written, slice(0, len(written.scales))))
        for role, rows in parts:
            name = by_role.get((role, written.tags.get(LAYER, "")))
            if name is not None:
                found.setdefault(name, _Found(written, rows))
    return found


def _initializers(graph: ir.Graph, weight: ir.Value, found: _Found, told: MatrixRecord, path: Path) -> list[ir.Value | None]:
    """q, scales, zero points and offsets as QuantLinear's inputs 1, 2, 4 and 5."""
    name, tags, (rows, columns) = str(weight.name), dict(weight.metadata_props), told.shape
    written, part = found.written, found.rows
    if part.stop - part.start != rows:
        raise BundleError(f"{path}: {name} has {part.stop - part.start} rows, the record tells of {rows}", "build it again")

    def integers() -> np.ndarray:
        q = np.zeros((rows, columns), np.int8)
        for piece in written.pieces():
            first, last = max(piece.rows.start, part.start), min(piece.rows.stop, part.stop)
            left, right = piece.columns.start, min(piece.columns.stop, columns)
            if first < last and left < right:
                inside = piece.q[first - piece.rows.start : last - piece.rows.start, : right - left]
                q[first - part.start : last - part.start, left:right] = inside
        return q

    half = written.scales[part].astype(np.float16)
    whole = np.array_equal(half.astype(np.float32), written.scales[part])
    scales = half if whole else np.ascontiguousarray(written.scales[part])
    kind = ir.DataType.FLOAT16 if whole else ir.DataType.FLOAT
    made: list[ir.Value | None] = [
        add_initializer(graph, lazy(f"{name}.q", ir.DataType.INT8, (rows, columns), integers), tags),
        add_initializer(graph, lazy(f"{name}.scales", kind, scales.shape, lambda: scales), tags),
        None,
        None,
    ]
    if not told.symmetric:
        zeros = (written.zeros[part].astype(np.int16) + (1 << (told.bits - 1))).astype(np.uint8)
        made[2] = add_initializer(graph, lazy(f"{name}.zero_points", ir.DataType.UINT8, zeros.shape, lambda: zeros), tags)
    if told.offsets and written.offsets is not None:
        offsets = written.offsets[part].astype(np.float16)
        made[3] = add_initializer(graph, lazy(f"{name}.offsets", ir.DataType.FLOAT16, offsets.shape, lambda: offsets), tags)
    return made


def _rewrite(node: ir.Node, made: list[ir.Value | None], told: MatrixRecord) -> None:
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    linear = node.op_type == LINEAR
    bias = node.inputs[2] if linear and len(node.inputs) > 2 else None
    inputs: list[ir.Value | None] = [node.inputs[0], *made[:2], bias, *made[2:]]
    while inputs[-1] is None:
        inputs.pop()
    attributes: dict[str, int | str] = {"bits": told.bits, "group": told.group}
    attributes |= {"activation": told.activation} if linear else {}
    attributes |= {"element": told.element} if told.element != "int" else {}
    decided = ir.node(
        QUANT_LINEAR if linear else QUANT_EMBEDDING,
        inputs,
        attributes,
        domain=DOMAIN,
        name=node.name,
        outputs=[ir.Value(name=node.outputs[0].name)],
        metadata_props=dict(node.metadata_props),
    )
    graph.insert_before(node, decided)
    replace(node, decided.outputs[0])


def _restore_kv(model: ir.Model, file: GraphFile) -> None:
    """Scales of keys and values, where the file has them for every layer."""
    found: dict[int, kv.KvScales] = {}
    for node in canonical(model.graph, ATTENTION):
        layer = node.attributes[LAYER].as_int()
        names: Mapping[str, str] = {part: f"layers.{layer}.{part}.scales" for part in ("key", "value")}
        if all(name in file.initializers for name in names.values()):
            shape = (node.attributes["kv_heads"].as_int(), 1, node.attributes["head_dim"].as_int())
            key, value = (file.numbers(names[part]).astype(np.float32).reshape(shape) for part in ("key", "value"))
            found[layer] = kv.KvScales(key, value)
    if found:
        kv.rewrite(model, found)
