"""The header of a GGUF file: metadata and where each tensor lies.

Knows: bytes of versions 2 and 3, little-endian, and that each of them may be a lie. Does not know: stored types.
Source: ggml's docs/gguf.md (github.com/ggml-org/ggml).

    magic "GGUF" | version u32 | tensors u64 | pairs u64 | pairs: key, type u32, value | tensor infos | pad | data

The `gguf` package's own reader maps the whole file and makes a numpy view of every number: 3.7 s and 160 MiB for
SmolLM2-135M's vocabulary of 49 152, where this takes about a tenth of a second and what the lists themselves need.
"""

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from appliance.errors import CheckpointError
from export.checkpoint.sidecars import AGAIN
from export.checkpoint.tensors import check_name, check_shape

SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
"""Value types that are plain numbers, as numpy writes them."""
BOOL, STRING, ARRAY = 7, 8, 9
MAX_HEADER = 128 << 20
"""Bytes; the largest vocabularies (260 000 tokens, 510 000 merges) make about 20 MiB."""
MAX_ITEMS = 8_000_000
"""Array items of one file: a byte of an array becomes a Python object, so bytes alone do not bound memory."""
MAX_PAIRS = 1 << 16
MAX_TENSORS = 1 << 18
MAX_ALIGNMENT = 1 << 20


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: shape in C order, type number, offset from the start of the data."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True)
class Header:
    """What one file says: `data` is where its data begins, `size` the length of the file, both in bytes."""

    file: Path
    metadata: Mapping[str, Any]
    tensors: tuple[TensorInfo, ...]
    alignment: int
    data: int
    size: int


def read_header(file: Path) -> Header:
    """Read metadata and tensor infos, nothing of the data.

    Raises:
        CheckpointError: not GGUF, another version, cut off, or any value that cannot be.
    """
    try:
        with open(file, "rb", buffering=1 << 16) as stream:
            size = os.fstat(stream.fileno()).st_size
            return _parse(_Bytes(stream, min(size, MAX_HEADER), size, file), file, size)
    except OSError as failure:
        raise CheckpointError(f"{file} cannot be read: {failure.strerror}", "check the file's permissions") from failure


class _Bytes:
    """A stream that knows its end, so that no length in the file makes it read or allocate past it."""

    def __init__(self, stream: BinaryIO, limit: int, size: int, file: Path):
        self._read = stream.read
        self._limit = limit
        self._size = size
        self._file = file
        self.at = 0
        self.items = 0

    def take(self, count: int, what: str) -> bytes:
        if count > self._limit - self.at:
            if self._limit < self._size:
                raise CheckpointError(f"{self._file}: {what} ends beyond {MAX_HEADER >> 20} MiB of header", AGAIN)
            raise CheckpointError(f"{self._file} is cut off: {what} ends at byte {self.at + count} of {self._size}", AGAIN)
        found = self._read(count)
        if len(found) != count:
            raise CheckpointError(f"{self._file} is cut off in {what}", AGAIN)
        self.at += count
        return found

    def u32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little")

    def u64(self, what: str) -> int:
        return int.from_bytes(self.take(8, what), "little")

    def text(self, what: str) -> str:
        raw = self.take(int.from_bytes(self.take(8, what), "little"), what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise CheckpointError(f"{self._file}: {what} is not UTF-8 text", AGAIN) from None

    def count(self, what: str) -> int:
        """The length of an array."""
        count = self.u64(what)
        self.items += count
        if self.items > MAX_ITEMS:
            raise CheckpointError(f"{self._file}: {what} claims {count} items, too many", AGAIN)
        return count


def _parse(source: _Bytes, file: Path, size: int) -> Header:
    if source.take(4, "the magic") != b"GGUF":
        raise CheckpointError(f"{file} is no GGUF file", "check the path, or fetch it again")
    raw = source.take(4, "the version")
    version = int.from_bytes(raw, "little")
    if version not in (2, 3):
        big = int.from_bytes(raw, "big") in (2, 3)
        what = "is big-endian" if big else f"is of GGUF version {version}"
        raise CheckpointError(f"{file} {what}, versions 2 and 3 in little-endian are read", "use another copy of the model")
    tensor_count, pair_count = source.u64("the tensor count"), source.u64("the metadata count")
    if pair_count > MAX_PAIRS or tensor_count > MAX_TENSORS:
        raise CheckpointError(f"{file} claims {pair_count} metadata pairs and {tensor_count} tensors, too many", AGAIN)
    metadata: dict[str, Any] = {}
    for _ in range(pair_count):
        key = source.text("a metadata key")
        check_name(key, f"{file}: the metadata")
        if key in metadata:
            raise CheckpointError(f"{file}: metadata key {key!r} stands there twice", AGAIN)
        metadata[key] = _value(source, source.u32(key), f"metadata {key!r}", file)
    tensors: dict[str, TensorInfo] = {}
    for _ in range(tensor_count):
        tensor = _tensor(source, file)
        if tensor.name in tensors:
            raise CheckpointError(f"{file}: tensor {tensor.name!r} stands there twice", AGAIN)
        tensors[tensor.name] = tensor
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise CheckpointError(f"{file}: general.alignment is {alignment!r}, no power of two", AGAIN)
    data = -(-source.at // alignment) * alignment
    return Header(file, metadata, tuple(tensors.values()), alignment, data, size)


def _tensor(source: _Bytes, file: Path) -> TensorInfo:
    name = source.text("a tensor's name")
    check_name(name, str(file))
    where = f"{file}: tensor {name!r}"
    rank = source.u32(name)
    if rank > 8:
        raise CheckpointError(f"{where} has {rank} dimensions", AGAIN)
    shape = struct.unpack(f"<{rank}Q", source.take(8 * rank, name))[::-1]
    check_shape(shape, where)
    return TensorInfo(name, shape, source.u32(name), source.u64(name))


def _value(source: _Bytes, kind: int, what: str, file: Path) -> Any:
    if kind == STRING:
        return source.text(what)
    if kind == ARRAY:
        return _array(source, what, file)
    value = _numbers(source, kind, 1, what, file)[0]
    if isinstance(value, float) and not math.isfinite(value):
        raise CheckpointError(f"{file}: {what} is {value}, which is no number", AGAIN)
    return value


def _array(source: _Bytes, what: str, file: Path) -> list[Any]:
    kind = source.u32(what)
    count = source.count(what)
    if kind == STRING:
        return [source.text(what) for _ in range(count)]
    if kind == ARRAY:
        raise CheckpointError(f"{file}: {what} is an array of arrays, which no model has", AGAIN)
    return _numbers(source, kind, count, what, file)


def _numbers(source: _Bytes, kind: int, count: int, what: str, file: Path) -> list[Any]:
    dtype = SCALARS.get(kind)
    if dtype is None:
        raise CheckpointError(f"{file}: {what} has the unknown value type {kind}", "upgrade, or fetch the file again")
    raw = source.take(np.dtype(dtype).itemsize * count, what)
    if kind == BOOL and raw.strip(b"\x00\x01"):
        raise CheckpointError(f"{file}: {what} is neither true nor false", AGAIN)
    values = np.frombuffer(raw, dtype=dtype)
    if values.dtype.kind == "f" and np.isnan(values).any():
        raise CheckpointError(f"{file}: {what} is NaN", AGAIN)
    found: list[Any] = values.tolist()
    return found
