"""Graphs to disk: a small .onnx file each, all weights in one file of external data, one tensor in memory at a time.

Knows: files, offsets, equal tensors. Does not know: what a graph computes.
The same graphs give the same bytes. Tensors of equal contents (tied weights, the two graphs of a static pair) are
written once. When it fails or is interrupted, the files it had begun are removed.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np
import onnx_ir as ir

from appliance.bundle import vocabulary
from export.graph import sizes

ALIGNMENT = 4096
"""Offsets of tensors: a page, so that onnxruntime maps them and vector loads are aligned."""
INLINE = 1024
"""Tensors below this many bytes stay inside the graph file, where shape inference can see them."""

Name = TypeVar("Name", bound=str)
Progress = Callable[[str, int, int], None]
"""Called before each tensor with its name, its number and how many there are."""


@dataclass(frozen=True)
class _Place:
    offset: int
    length: int


def save(model: ir.Model, folder: Path, name: str, progress: Progress | None = None) -> Path:
    """Write one graph as `<name>.onnx` with its weights in `<name>.bin`; the path of the .onnx file."""
    return save_all({name: model}, folder, f"{name}.bin", progress)[name]


def save_all(graphs: Mapping[Name, ir.Model], folder: Path, weights: str, progress: Progress | None = None) -> dict[Name, Path]:
    """Write graphs as `<name>.onnx` that share one file of weights.

    Args:
        graphs: by file name without its ending; no canonical operator may be left in them.
        folder: where to; it exists.
        weights: name of the file of external data.
        progress: told of every tensor.

    Raises:
        OSError: the disk is full or cannot be written; nothing of these files is left.
    """
    for name, model in graphs.items():
        left = {node.op_type for node in model.graph if node.domain == vocabulary.DOMAIN}
        assert not left, f"{name}: canonical operators {sorted(left)} cannot be saved"
    paths = {name: folder / f"{name}.onnx" for name in graphs}
    with _whole_or_gone([folder / weights, *paths.values()]):
        with open(folder / weights, "wb") as file:
            store = _Store(file, progress, sum(len(_large(model)) for model in graphs.values()))
            places = {name: [store.put(value) for value in _large(model)] for name, model in graphs.items()}
        for name, model in graphs.items():
            _write_graph(model, paths[name], weights, places[name])
    return paths


@contextlib.contextmanager
def _whole_or_gone(paths: list[Path]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for path in paths:
            path.unlink(missing_ok=True)
        raise


def _large(model: ir.Model) -> list[ir.Value]:
    """The initializers that go to the weights file, in the order of the graph. Overridable ones never do."""
    found = []
    for value in model.graph.initializers.values():
        assert value.const_value is not None, f"initializer {value.name} has no numbers"
        if value.const_value.nbytes >= INLINE and not value.is_graph_input():
            found.append(value)
    return found


class _Store:
    """The weights file being written."""

    def __init__(self, file: BinaryIO, progress: Progress | None, total: int):
        self._file = file
        self._progress = progress
        self._total = total
        self._count = 0
        self._known: dict[tuple[bytes, int], _Place] = {}

    def put(self, value: ir.Value) -> _Place:
        """Where the tensor's bytes are, written now if their like is not there yet."""
        assert value.const_value is not None and value.name is not None
        if self._progress is not None:
            self._progress(value.name, self._count, self._total)
        self._count += 1
        data = _bytes_of(value.const_value)
        key = (hashlib.blake2b(data, digest_size=32).digest(), data.nbytes)
        if key not in self._known:
            offset = -(-self._file.tell() // ALIGNMENT) * ALIGNMENT
            self._file.write(b"\0" * (offset - self._file.tell()))
            self._file.write(data)
            self._known[key] = _Place(offset, data.nbytes)
        return self._known[key]


def _bytes_of(tensor: ir.TensorProtocol) -> memoryview:
    """The tensor's bytes as ONNX stores them, without a second copy where the numbers lie in order already."""
    if tensor.dtype.bitwidth < 8:
        return memoryview(tensor.tobytes())
    array = np.ascontiguousarray(tensor.numpy())
    return array.reshape(-1).view(np.uint8).data


def _write_graph(model: ir.Model, path: Path, weights: str, places: list[_Place]) -> None:
    """Serialize with references in place of the large tensors, then give the model its own tensors back."""
    large = _large(model)
    originals = [value.const_value for value in large]
    try:
        for value, place in zip(large, places, strict=True):
            tensor = value.const_value
            assert tensor is not None and value.name is not None
            value.const_value = ir.ExternalTensor(
                weights, place.offset, place.length, tensor.dtype, shape=ir.Shape(sizes(tensor)), name=value.name,
                base_dir=path.parent,
            )  # fmt: skip
        data = ir.to_proto(model).SerializeToString(deterministic=True)
    finally:
        for value, original in zip(large, originals, strict=True):
            value.const_value = original
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
