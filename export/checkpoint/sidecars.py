"""The small files beside the weights: strict JSON, sidecars by name, the licence.

Knows: how to read a small file that a stranger wrote. Does not know: weights, or what a config means.
"""

import json
import math
import os
import re
from pathlib import Path
from typing import Any

from appliance.errors import CheckpointError

MAX_JSON = 32 << 20
"""Bytes of a JSON file that is read. A header of 100 000 tensors has about 12 MiB; above this it is not what it claims."""
LICENSE_FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE", "COPYING")
MAX_TEXT = 64 << 10
AGAIN = "fetch the checkpoint again"


def beside(folder: Path, name: str) -> Path | None:
    """The file `name` directly inside `folder`, or None. A name with a folder in it never matches."""
    if Path(name).name != name:
        return None
    path = folder / name
    return path if path.is_file() else None


def read_object(path: Path) -> dict[str, Any]:
    """A JSON file that must hold an object.

    Raises:
        CheckpointError: unreadable, over `MAX_JSON` bytes, not JSON, not an object, a key twice, NaN or infinity.
    """
    try:
        with open(path, "rb") as file:
            # `read(n)` makes room for n bytes first, so ask for what is there.
            raw = file.read(min(os.fstat(file.fileno()).st_size, MAX_JSON) + 1)
    except OSError as failure:
        raise CheckpointError(f"{path} cannot be read: {failure.strerror}", "check the file's permissions") from failure
    if len(raw) > MAX_JSON:
        raise CheckpointError(f"{path} is over {MAX_JSON >> 20} MiB, too large for what it is", AGAIN)
    return parse_object(raw, str(path))


def parse_object(raw: bytes, where: str) -> dict[str, Any]:
    """Decode a JSON object; see `read_object` for what is refused. `where` names the place in the message."""
    try:
        found = json.loads(raw.decode("utf-8"), parse_constant=_refuse_number, parse_float=_finite, object_pairs_hook=_once)
    except UnicodeDecodeError:
        raise CheckpointError(f"{where} is not UTF-8 text", AGAIN) from None
    except RecursionError:
        raise CheckpointError(f"{where} is nested too deeply", AGAIN) from None
    except ValueError as failure:
        raise CheckpointError(f"{where} is not valid JSON: {failure}", AGAIN) from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{where} is not a JSON object", AGAIN)
    return found


def _refuse_number(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse_number(text[:40])


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {key[:80]!r} stands there twice")
            seen.add(key)
    return found


def license_of(folder: Path | None, stated: object = None) -> str:
    """What the checkpoint says its licence is: `stated` by the weights, else README.md's front matter, else the first line
    of a LICENSE file, else "unknown". Always one short printable line."""
    if isinstance(stated, str) and _line(stated):
        return _line(stated)
    if folder is None:
        return "unknown"
    readme = beside(folder, "README.md")
    found = _front_matter(_text(readme)) if readme else ""
    for name in LICENSE_FILES:
        path = beside(folder, name)
        if not found and path:
            found = next((line for line in map(_line, _text(path).splitlines()) if line), "")
    return found or "unknown"


def _front_matter(text: str) -> str:
    """`license:` of the block between two lines of dashes; a name of one's own (`license_name`) says more than "other"."""
    block = re.match(r"\ufeff?---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(\r?\n|$)", text, re.DOTALL)
    if not block:
        return ""
    found = {}
    for key in ("license", "license_name"):
        line = re.search(rf"^{key}:[ \t]*(?:\r?\n[ \t]*-[ \t]*)?([^\r\n]*)$", block[1], re.MULTILINE)
        found[key] = _line(line[1].split(" #")[0].strip(" \t[]'\"")) if line else ""
    return found["license_name"] if found["license"] in ("", "other") and found["license_name"] else found["license"]


def _text(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(MAX_TEXT).decode("utf-8", errors="replace")
    except OSError:
        return ""  # a licence that cannot be read is "unknown", which is what the caller shows


def _line(text: str) -> str:
    """One printable line of at most 100 characters: it is shown on a terminal."""
    return "".join(char for char in " ".join(text.split())[:100] if char.isprintable()).lstrip("# ").strip()
