"""Tensors inside files: where each one lies, and how to read just that one as float32.

Knows: positioned reads, pieces, damage, grids of integers. Does not know: how a format writes its header.

A tensor is read and decoded in pieces of `PIECE` elements into one float32 array, so reading costs the array itself and
a few MiB. Nothing is mapped into memory: mapped pages count as resident, and peak memory must follow the largest
tensor, not the model.
"""

import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from appliance.errors import CheckpointError
from export.checkpoint.sidecars import AGAIN, beside
from export.checkpoint.source import Grid, StoredGrid

PIECE = 1 << 18
"""Elements decoded at once. Measured on Q4_1, Q8_0, Q4_K, Q6_K: 2^18 is fastest; 2^14 takes up to five times as long."""
MAX_RANK = 8
MAX_ELEMENTS = 1 << 48
"""More float32 than any address space holds: a shape above it is damage, whatever the type."""
EXACT = 1 << 24
"""Every whole number up to here is a float32."""


@dataclass(frozen=True)
class GridCodec:
    """A stored type whose blocks are integers of one scale.

    Attributes:
        bits: of the integers.
        has_offsets: whether a block has an offset.
        decode: flat uint8 of whole blocks -> a `Grid` with a row for each block.
    """

    bits: int
    has_offsets: bool
    decode: Callable[[np.ndarray], Grid]


@dataclass(frozen=True)
class Codec:
    """One stored type.

    Attributes:
        name: as `stored_type` gives it.
        block: elements of one block (1 for plain numbers).
        size: bytes of one block.
        decode: flat uint8 of whole blocks -> flat float32; None when this program cannot.
        mend: what to do when `decode` is None.
        grid: how its integers are read; None when they are on no plain grid.
    """

    name: str
    block: int
    size: int
    decode: Callable[[np.ndarray], np.ndarray] | None
    mend: str = ""
    grid: GridCodec | None = None

    def bytes_of(self, shape: Sequence[int]) -> int:
        """Bytes of a tensor; ValueError when a row is no whole number of blocks."""
        row = shape[-1] if shape else 1
        if row % self.block:
            raise ValueError(f"rows of {row} are no whole number of {self.name} blocks of {self.block}")
        return math.prod(shape) // self.block * self.size


@dataclass(frozen=True)
class Entry:
    """One tensor: `size` bytes at `offset` of `file`."""

    name: str
    file: Path
    offset: int
    size: int
    shape: tuple[int, ...]
    codec: Codec


@dataclass(frozen=True)
class FileCheckpoint:
    """A `export.checkpoint.source.Checkpoint` over entries.

    Attributes:
        folder: where sidecars are looked for; None when the checkpoint is one self-contained file.
        entries: by tensor name, in file order.
        weights: the weight files.
    """

    path: Path
    format: str
    config: Mapping[str, Any]
    license: str
    folder: Path | None
    entries: Mapping[str, Entry]
    weights: tuple[Path, ...]

    def names(self) -> Sequence[str]:
        return tuple(self.entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def stored_type(self, name: str) -> str:
        return self._entry(name).codec.name

    def read(self, name: str) -> np.ndarray:
        return read_tensor(self._entry(name))

    def stored_grid(self, name: str) -> StoredGrid | None:
        entry = self._entry(name)
        grid = entry.codec.grid
        if grid is None or len(entry.shape) != 2:
            return None
        return StoredGrid(entry.codec.name, grid.bits, entry.codec.block, grid.has_offsets, lambda: read_grid(entry, grid))

    def files(self) -> Sequence[Path]:
        return self.weights

    def sidecar(self, name: str) -> Path | None:
        return None if self.folder is None else beside(self.folder, name)

    def _entry(self, name: str) -> Entry:
        try:
            return self.entries[name]
        except KeyError:
            raise CheckpointError(f"{self.path} has no tensor {name!r}", "check that the checkpoint is complete") from None


def check_shape(shape: Sequence[int], where: str) -> None:
    """Refuse a shape that no array can have."""
    if len(shape) > MAX_RANK:
        raise CheckpointError(f"{where} has {len(shape)} dimensions, at most {MAX_RANK} are read", AGAIN)
    if any(type(size) is not int or size < 0 for size in shape):
        raise CheckpointError(f"{where} has a dimension that is no whole number", AGAIN)
    if math.prod(max(size, 1) for size in shape) > MAX_ELEMENTS:
        raise CheckpointError(f"{where} has the impossible shape {list(shape)}", AGAIN)


def check_name(name: str, where: str) -> None:
    """Refuse a name that cannot be shown or written on."""
    if not name or len(name) > 512 or not name.isprintable():
        raise CheckpointError(f"{where} holds the unusable name {name[:40]!r}", AGAIN)


def check_overlaps(entries: Sequence[Entry]) -> None:
    """Refuse two tensors that share bytes of one file: no writer makes such a file, and one of the two must be wrong."""
    placed = sorted((entry for entry in entries if entry.size), key=lambda entry: (entry.file, entry.offset))
    for left, right in itertools.pairwise(placed):
        if left.file == right.file and left.offset + left.size > right.offset:
            raise CheckpointError(f"{left.file}: tensors {left.name!r} and {right.name!r} overlap", AGAIN)


def read_tensor(entry: Entry) -> np.ndarray:
    """The tensor as a fresh float32 array in C order.

    Raises:
        CheckpointError: the stored type cannot be read, the file is shorter than it was, or a value is not finite.
    """
    where = f"{entry.file}: tensor {entry.name!r}"
    decode, codec = entry.codec.decode, entry.codec
    if decode is None:
        raise CheckpointError(f"{where} is stored as {codec.name}, which is not read", codec.mend)
    values = np.empty(math.prod(entry.shape), dtype=np.float32)
    try:
        for first, raw in _pieces(entry):
            # Damaged scales overflow or turn into NaN while decoding; the check below says so better than a warning.
            with np.errstate(all="ignore"):
                piece = decode(raw)
            _check_finite(piece, first, where)
            values[first : first + piece.size] = piece
    except ValueError as failure:
        raise CheckpointError(f"{where} {failure}", "it is no weight; check the architecture") from None
    return values.reshape(entry.shape)


def read_grid(entry: Entry, codec: GridCodec) -> Grid:
    """The integers and scales of a matrix as the file holds them.

    Raises:
        CheckpointError: the file is shorter than it was, or a scale or offset is not finite.
    """
    where, (rows, columns) = f"{entry.file}: tensor {entry.name!r}", entry.shape
    blocks = rows * columns // entry.codec.block
    q = np.empty((blocks, entry.codec.block), np.int8)
    scales = np.empty(blocks, np.float16)
    offsets = np.empty(blocks, np.float16) if codec.has_offsets else None
    for first, raw in _pieces(entry):
        grid = codec.decode(raw)
        at = slice(first // entry.codec.block, first // entry.codec.block + len(grid.q))
        _check_finite(grid.scales.reshape(-1), at.start, f"{where}, scales,")
        q[at], scales[at] = grid.q, grid.scales.reshape(-1)
        if offsets is not None:
            assert grid.offsets is not None
            _check_finite(grid.offsets.reshape(-1), at.start, f"{where}, offsets,")
            offsets[at] = grid.offsets.reshape(-1)
    return Grid(q.reshape(rows, columns), scales.reshape(rows, -1), None if offsets is None else offsets.reshape(rows, -1))


def _pieces(entry: Entry) -> Iterator[tuple[int, np.ndarray]]:
    """The tensor's bytes, whole blocks at a time: (number of the first element, uint8)."""
    where, codec = f"{entry.file}: tensor {entry.name!r}", entry.codec
    step = PIECE // codec.block * codec.size
    try:
        with open(entry.file, "rb", buffering=0) as file:
            file.seek(entry.offset)
            for begin in range(0, entry.size, step):
                raw = np.empty(min(step, entry.size - begin), dtype=np.uint8)
                if not _fill(file, raw):
                    raise CheckpointError(f"{where} is cut off at byte {os.fstat(file.fileno()).st_size}", AGAIN)
                yield begin // codec.size * codec.block, raw
    except OSError as failure:
        raise CheckpointError(f"{where} cannot be read: {failure.strerror}", "check the disk and the permissions") from failure


def _fill(file: Any, raw: np.ndarray) -> bool:
    view = memoryview(raw.data)
    while view:
        count = file.readinto(view)
        if not count:
            return False
        view = view[count:]
    return True


def _check_finite(piece: np.ndarray, first: int, where: str) -> None:
    finite = np.isfinite(piece)
    if not finite.all():
        index = int(np.argmin(finite))
        raise CheckpointError(f"{where} holds {piece[index]} at element {first + index}, the file is damaged", AGAIN)


def plain(name: str, dtype: str) -> Codec:
    """A codec of plain little-endian numbers; `dtype` as numpy writes it.

    A whole number that float32 would round is refused: it is an index or packed bits, and read as a weight it is wrong.
    """
    kind = np.dtype(dtype).newbyteorder("<")

    def decode(raw: np.ndarray) -> np.ndarray:
        values = raw.view(kind)
        if kind.kind in "iu" and values.size and max(int(values.max()), -int(values.min())) > EXACT:
            raise ValueError(f"holds whole numbers above {EXACT}, which float32 cannot keep")
        return values.astype(np.float32)

    return Codec(name, 1, kind.itemsize, decode)


def bfloat16(raw: np.ndarray) -> np.ndarray:
    """bfloat16 is the upper half of a float32."""
    return (raw.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
