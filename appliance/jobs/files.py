"""Files that a run writes: whole or not at all, and the same ones when it writes again.

Knows: names and atomic replacement. Does not know: what is written.
"""

import os
from pathlib import Path

from appliance.errors import StorageError


def run_stem(job: str, slot: str) -> str:
    """The file name of a run's report without its suffix; without colons, which some file systems do not take."""
    return f"{job}-{slot.replace(':', '')}"


def write_text(path: Path, text: str) -> Path:
    """Replace `path` in one step; `StorageError` when it cannot be written."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as failure:
        raise StorageError(f"cannot write {path}: {failure.strerror}", "free some space or choose another folder") from None
    return path
