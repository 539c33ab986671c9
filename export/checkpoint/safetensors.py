"""safetensors checkpoints: one file, or shards with `model.safetensors.index.json`, with a `config.json` beside.

Knows: the header, the index, the stored types. Does not know: what a tensor is for.
Source: the format's README (github.com/huggingface/safetensors): 8 bytes little-endian header length, a JSON object
`{name: {dtype, shape, data_offsets}}` with an optional `__metadata__`, then the bytes, without holes.

    | length N | header: N bytes of JSON | data: data_offsets count from here |
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from appliance.errors import CheckpointError
from export.checkpoint.sidecars import AGAIN, MAX_JSON, license_of, parse_object, read_object
from export.checkpoint.tensors import (
    Codec,
    Entry,
    FileCheckpoint,
    bfloat16,
    check_name,
    check_overlaps,
    check_shape,
    plain,
)

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.safetensors$")
SCALED = "convert it to bf16 first: its values mean nothing without scales that lie in other tensors"


def _codecs() -> dict[str, Codec]:
    readable = [plain("F64", "f8"), plain("F32", "f4"), plain("F16", "f2"), plain("I64", "i8"), plain("I32", "i4")]
    readable += [plain("I16", "i2"), plain("I8", "i1"), plain("U64", "u8"), plain("U32", "u4"), plain("U16", "u2")]
    readable += [plain("U8", "u1"), plain("BOOL", "u1"), Codec("BF16", 1, 2, bfloat16)]
    # Known by size, so that the rest of the file can be read; see SCALED for why they are not.
    eights = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
    refused = [Codec(name, 1, 1, None, SCALED) for name in eights]
    refused += [Codec("F4", 2, 1, None, SCALED), Codec("F6_E2M3", 4, 3, None, SCALED), Codec("F6_E3M2", 4, 3, None, SCALED)]
    refused += [Codec("C64", 1, 8, None, "no architecture here has complex weights")]
    return {codec.name: codec for codec in [*readable, *refused]}


def matches(path: Path) -> bool:
    """A `.safetensors` file, an index of shards, or a folder that holds one of them."""
    if path.is_dir():
        return any(_weight_files(path)) or (path / INDEX).is_file()
    return path.suffix.lower() == ".safetensors" or path.name.endswith(".safetensors.index.json")


def open(path: Path) -> FileCheckpoint:
    """Read the headers of every weight file and `config.json`.

    Raises:
        CheckpointError: something is missing, damaged, contradictory or ambiguous.
    """
    folder = path if path.is_dir() else path.parent
    weights = _choose(path, folder)
    config_path = folder / "config.json"
    if not config_path.is_file():
        raise CheckpointError(f"{config_path} is missing", "put the model's config.json beside its weights")
    entries: dict[str, Entry] = {}
    for file in weights:
        for name, entry in read_header(file).items():
            if name in entries:
                raise CheckpointError(f"tensor {name!r} is both in {entries[name].file} and in {file}", AGAIN)
            entries[name] = entry
    index = _index_of(path, folder)
    if index is not None:
        _check_index(index, entries)
    return FileCheckpoint(
        path=path,
        format="safetensors",
        config=read_object(config_path),
        license=license_of(folder),
        folder=folder,
        entries=entries,
        weights=weights,
    )


def _weight_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() == ".safetensors" and path.is_file())


def _index_of(path: Path, folder: Path) -> Path | None:
    """The index to follow: the one named, or the folder's; a plain `model.safetensors` wins over it, as in transformers."""
    if not path.is_dir():
        return path if path.suffix == ".json" else None
    return folder / INDEX if (folder / INDEX).is_file() and not (folder / SINGLE).is_file() else None


def _choose(path: Path, folder: Path) -> tuple[Path, ...]:
    """The weight files of what was named."""
    index = _index_of(path, folder)
    if index is not None:
        return _shards(index)
    if not path.is_dir():
        shard = SHARD.search(path.name)
        if shard and int(shard[2]) > 1:
            raise CheckpointError(f"{path} is one shard of {int(shard[2])}", f"name the folder: {folder}")
        return (path,)
    files = _weight_files(folder)
    if folder / SINGLE in files:
        return (folder / SINGLE,)
    if any(SHARD.search(file.name) for file in files):
        raise CheckpointError(f"{folder / INDEX} is missing", "fetch it: it lists the shards")
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:8])
        raise CheckpointError(f"{folder} holds {len(files)} checkpoints: {names}", "name one of these files")
    return tuple(files)


def _weight_map(index: Path) -> Mapping[str, str]:
    found = read_object(index).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise CheckpointError(f'{index} has no "weight_map"', AGAIN)
    for name, file in found.items():
        if not isinstance(file, str) or not _is_plain(file):
            raise CheckpointError(
                f"{index} puts {name!r} into {file!r}, which is no file of this folder", "do not use this checkpoint"
            )
    return found


def _is_plain(name: str) -> bool:
    return bool(name) and name.isprintable() and not set(name) & {"/", "\\", ":"} and name not in (".", "..") and len(name) < 256


def _shards(index: Path) -> tuple[Path, ...]:
    files = sorted(set(_weight_map(index).values()))
    missing = [name for name in files if not (index.parent / name).is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"{index.parent / missing[0]}{more} is missing, {index.name} names it", "fetch the missing shards")
    return tuple(index.parent / name for name in files)


def _check_index(index: Path, entries: Mapping[str, Entry]) -> None:
    for name, file in _weight_map(index).items():
        if name not in entries or entries[name].file.name != file:
            raise CheckpointError(f"{index.parent / file} lacks tensor {name!r}, which {index.name} puts there", AGAIN)


def read_header(file: Path) -> dict[str, Entry]:
    """The tensors of one file, by name.

    Raises:
        CheckpointError: any byte of the header that does not fit the format or the file's size.
    """
    raw, size = _header_bytes(file)
    header = parse_object(raw, f"{file}: the header")
    header.pop("__metadata__", None)
    codecs = _codecs()
    begin = 8 + len(raw)
    entries = {name: _entry(file, name, fields, begin, size, codecs) for name, fields in header.items()}
    check_overlaps(list(entries.values()))
    used = sum(entry.size for entry in entries.values())
    if begin + used != size:
        raise CheckpointError(f"{file} has {size} bytes, its header accounts for {begin + used}", AGAIN)
    return entries


def _header_bytes(file: Path) -> tuple[bytes, int]:
    """The header's JSON and the size of the whole file."""
    descriptor = -1
    try:
        descriptor = os.open(file, os.O_RDONLY)
        size = os.fstat(descriptor).st_size
        length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
        if size < 8 or length > size - 8:
            raise CheckpointError(f"{file} is cut off: {size} bytes, the header alone wants {length + 8}", AGAIN)
        if length > MAX_JSON:
            raise CheckpointError(f"{file}: a header of {length} bytes is too large", AGAIN)
        raw = os.pread(descriptor, length, 8)
    except OSError as failure:
        raise CheckpointError(f"{file} cannot be read: {failure.strerror}", "check the file's permissions") from failure
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    if len(raw) != length:
        raise CheckpointError(f"{file} is cut off inside its header", AGAIN)
    return raw, size


def _entry(file: Path, name: str, fields: Any, begin: int, size: int, codecs: Mapping[str, Codec]) -> Entry:
    check_name(name, str(file))
    where = f"{file}: tensor {name!r}"
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where} is not described by exactly dtype, shape and data_offsets", AGAIN)
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    codec = codecs.get(dtype) if isinstance(dtype, str) else None
    if codec is None:
        raise CheckpointError(f"{where} has the unknown type {str(dtype)[:40]!r}", f"known: {', '.join(sorted(codecs))}")
    if not isinstance(shape, list):
        raise CheckpointError(f"{where} has a shape that is no list", AGAIN)
    check_shape(shape, where)
    if not isinstance(offsets, list) or len(offsets) != 2 or any(type(value) is not int for value in offsets):
        raise CheckpointError(f"{where} has data_offsets that are not two whole numbers", AGAIN)
    first, last = offsets
    if not 0 <= first <= last <= size - begin:
        raise CheckpointError(f"{where} lies at bytes {first} to {last}, outside the {size - begin} bytes of data", AGAIN)
    try:
        wanted = codec.bytes_of(shape)
    except ValueError as failure:
        raise CheckpointError(f"{where}: {failure}", AGAIN) from None
    if last - first != wanted:
        raise CheckpointError(
            f"{where} of shape {shape} in {dtype} takes {wanted} bytes, the header gives it {last - first}", AGAIN
        )
    return Entry(name, file, begin + first, wanted, tuple(shape), codec)
