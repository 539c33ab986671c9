"""Discovery of readers: every file in this folder reads one kind of document.

A reader has `SUFFIXES` (lower case, with the dot), `VERSION` (raised when its text changes, so that files are read again) and
`read(data: bytes) -> Extract`, which raises `DocumentError` for what it cannot read. Readers run in a child process with
limits of time and memory (`appliance.knowledge.reading`); they need not defend themselves against endless files.
"""

import importlib
import pkgutil
from pathlib import Path
from types import ModuleType

FALLBACK = "text"
"""Reads whatever no other reader claims, if it is text at all."""


def kind_of(name: str) -> str:
    """Which reader is for a file of that name."""
    suffix = Path(name).suffix.lower()
    return next((kind for kind in known() if suffix in find(kind).SUFFIXES), FALLBACK)


def known() -> list[str]:
    """Names of all readers, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]))


def find(kind: str) -> ModuleType:
    """The reader of that name."""
    return importlib.import_module(f"appliance.knowledge.readers.{kind}")
