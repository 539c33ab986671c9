"""GGUF checkpoints: one file, or llama.cpp's splits `-00001-of-0000N.gguf`.

Knows: which file to open, how splits belong together, the stored types. Does not know: the header's bytes
(`export.checkpoint.gguf_header`), llama.cpp's permutation of rows, or what a tensor is for.
Dequantization is the `gguf` package's.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np

from appliance.errors import CheckpointError
from export.checkpoint.gguf_grid import GRIDS
from export.checkpoint.gguf_header import Header, read_header
from export.checkpoint.sidecars import AGAIN, license_of
from export.checkpoint.tensors import Codec, Entry, FileCheckpoint, check_overlaps, plain

SPLIT = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$", re.IGNORECASE)
MAX_SPLITS = 4096
PLAIN = {"I8": "i1", "I16": "i2", "I32": "i4", "I64": "i8", "F64": "f8"}
"""Types without blocks that the `gguf` package sizes but does not dequantize."""


def matches(path: Path) -> bool:
    """A file that begins with or is named GGUF, or a folder that holds a `.gguf`."""
    if path.is_dir():
        return bool(_weight_files(path))
    if path.suffix.lower() == ".gguf":
        return True
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def open(path: Path) -> FileCheckpoint:
    """Read the header of every split.

    Sidecars and README are those of the folder when a folder was named; a GGUF named as a file stands for itself, since
    such files often lie among others.

    Raises:
        CheckpointError: something is missing, damaged, contradictory or ambiguous.
    """
    folder = path if path.is_dir() else None
    first = _choose(path) if folder else path
    headers = _headers(first)
    codecs = _codecs()
    entries: dict[str, Entry] = {}
    for header in headers:
        for entry in _entries(header, codecs):
            if entry.name in entries:
                raise CheckpointError(f"tensor {entry.name!r} is both in {entries[entry.name].file} and in {entry.file}", AGAIN)
            entries[entry.name] = entry
    config = headers[0].metadata
    _check_count(headers, len(entries))
    return FileCheckpoint(
        path=path,
        format="gguf",
        config=config,
        license=license_of(folder, config.get("general.license")),
        folder=folder,
        entries=entries,
        weights=tuple(header.file for header in headers),
    )


def _weight_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() == ".gguf" and path.is_file())


def _choose(folder: Path) -> Path:
    """The one model of a folder: its file, or its first split."""
    files = _weight_files(folder)
    models: dict[str, Path] = {}
    for file in files:
        split = SPLIT.match(file.name)
        models.setdefault(f"{split['stem']}-of-{split['count']}" if split else file.name, file)
    if len(models) > 1:
        names = ", ".join(file.name for file in list(models.values())[:8])
        raise CheckpointError(f"{folder} holds {len(models)} GGUF models: {names}", "name one of these files")
    return files[0]


def _headers(first: Path) -> list[Header]:
    """The headers of all splits in order, whichever of them was named."""
    header = read_header(first)
    count = header.metadata.get("split.count", 1)
    if type(count) is not int or not 0 <= count <= MAX_SPLITS:
        raise CheckpointError(f"{first}: split.count is {count!r}", AGAIN)
    if count <= 1:
        return [header]
    split = SPLIT.match(first.name)
    if not split or int(split["count"]) != count:
        raise CheckpointError(
            f"{first} is one of {count} splits but is not named so",
            f"give the splits their names back: NAME-00001-of-{count:05d}.gguf",
        )
    files = [first.with_name(f"{split['stem']}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]
    missing = [file for file in files if not file.is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"{missing[0]}{more} is missing", "fetch every split of the model")
    headers = [header if file == first else read_header(file) for file in files]
    for number, found in enumerate(headers):
        if found.metadata.get("split.no") != number or found.metadata.get("split.count") != count:
            raise CheckpointError(f"{found.file} says it is not split {number} of {count}", AGAIN)
    return headers


def _check_count(headers: list[Header], found: int) -> None:
    wanted = headers[0].metadata.get("split.tensors.count", found)
    if wanted != found:
        raise CheckpointError(f"{headers[0].file}: the splits hold {found} tensors, {wanted} are announced", AGAIN)


def _codecs() -> dict[int, Codec]:
    """By type number. What the `gguf` package can dequantize is asked of it, one zero block each."""
    codecs: dict[int, Codec] = {}
    for kind, (block, size) in gguf.GGML_QUANT_SIZES.items():
        if kind.name in PLAIN:
            codecs[int(kind)] = plain(kind.name, PLAIN[kind.name])
            continue
        decode: Callable[[np.ndarray], np.ndarray] | None = _decoder(kind)
        try:
            gguf.dequantize(np.zeros((1, size), dtype=np.uint8), kind)
        except NotImplementedError:
            decode = None
        mend = "use a copy of the model quantized to another type"
        codecs[int(kind)] = Codec(kind.name, block, size, decode, mend, GRIDS.get(kind.name))
    return codecs


def _decoder(kind: gguf.GGMLQuantizationType) -> Callable[[np.ndarray], np.ndarray]:
    def decode(raw: np.ndarray) -> np.ndarray:
        # One long row: the package works through rows in groups of 16, which is slow for short ones.
        return np.asarray(gguf.dequantize(raw.reshape(1, -1), kind), dtype=np.float32).reshape(-1)

    return decode


def _entries(header: Header, codecs: Mapping[int, Codec]) -> list[Entry]:
    entries = []
    for tensor in header.tensors:
        where = f"{header.file}: tensor {tensor.name!r}"
        codec = codecs.get(tensor.kind)
        if codec is None:
            raise CheckpointError(
                f"{where} has the unknown type number {tensor.kind}", "upgrade the gguf package, or use another copy"
            )
        try:
            size = codec.bytes_of(tensor.shape)
        except ValueError as failure:
            raise CheckpointError(f"{where}: {failure}", AGAIN) from None
        if tensor.offset % header.alignment or header.data + tensor.offset + size > header.size:
            raise CheckpointError(
                f"{where} lies at bytes {header.data + tensor.offset} to {header.data + tensor.offset + size}, "
                f"outside the file of {header.size} bytes or off its alignment of {header.alignment}",
                AGAIN,
            )
        entries.append(Entry(tensor.name, header.file, header.data + tensor.offset, size, tensor.shape, codec))
    check_overlaps(entries)
    return entries
