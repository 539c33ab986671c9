"""The licence that a checkpoint on disk states for itself.

Knows: GGUF's `general.license`, the front matter of a model card, a LICENSE file. Does not know: what a licence allows.
Source: GGUF specification (header, then key-value pairs; `general.*` come first by convention); Hugging Face model cards.
"""

import re
import struct
from pathlib import Path
from typing import BinaryIO

UNKNOWN = "unknown"
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of each scalar type of GGUF
_STRING, _ARRAY = 8, 9
_LONGEST = 1 << 20
_FRONT_MATTER = re.compile(r"\A---\s*\n(.*?)\n---", re.DOTALL)
_LICENSE = re.compile(r"^license:\s*['\"]?([\w.+ -]+?)['\"]?\s*$", re.MULTILINE)


def of_path(path: Path) -> tuple[str, str]:
    """(licence, where it can be read) of a file or folder; ("unknown", "") when nothing says."""
    folder = path if path.is_dir() else path.parent
    named = [path] if path.is_file() else sorted(folder.glob("*.gguf"))
    for gguf in (file for file in named if file.suffix == ".gguf"):
        if license := of_gguf(gguf):
            return license, str(gguf)
    card = folder / "README.md"
    if card.is_file():
        front = _FRONT_MATTER.match(card.read_text(encoding="utf-8", errors="replace"))
        stated = _LICENSE.search(front[1]) if front else None
        if stated:
            return stated[1], str(card)
    for file in sorted(folder.glob("LICEN[SC]E*")):
        lines = [line.strip() for line in file.read_text(encoding="utf-8", errors="replace").splitlines()]
        title = next((line for line in lines if line), "")
        return title[:60] or UNKNOWN, str(file)
    return UNKNOWN, ""


def of_gguf(path: Path) -> str | None:
    """`general.license` of a GGUF file; None when it has none or is no whole GGUF file (reading it will say so)."""
    try:
        with open(path, "rb") as file:
            magic, _version, _tensors, pairs = struct.unpack("<4sIQQ", file.read(24))
            if magic != b"GGUF":
                return None
            for _ in range(min(pairs, 64)):
                key = _text(file)
                (kind,) = struct.unpack("<I", file.read(4))
                if key == "general.license" and kind == _STRING:
                    return _text(file)
                _skip(file, kind)
    except (struct.error, OSError, KeyError, ValueError):
        return None
    return None


def _text(file: BinaryIO) -> str:
    (length,) = struct.unpack("<Q", file.read(8))
    if length > _LONGEST:
        raise ValueError(f"a text of {length} bytes")
    return file.read(length).decode("utf-8")


def _skip(file: BinaryIO, kind: int) -> None:
    if kind == _STRING:
        _text(file)
    elif kind == _ARRAY:
        inner, count = struct.unpack("<IQ", file.read(12))
        if inner == _STRING:
            for _ in range(count):
                _text(file)
        else:
            file.seek(_SIZES[inner] * count, 1)
    else:
        file.seek(_SIZES[kind], 1)
