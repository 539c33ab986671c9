"""What a tool may reach. Everything outside the process goes through it.

Knows: the doors. Does not know: grants; whoever lays the desk has checked them in the functions it hands over.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Desk:
    """One call's surroundings.

    Attributes:
        confine: a path as the caller wrote it -> where it really leads; raises when that is not allowed.
        search: query, limit -> passages, each with path, anchor, text.
        read: the text of a document of any kind that can be read.
        write: file name, text -> the path written, in the job's output folder.
        post: address, JSON -> HTTP status; raises when the address is not allowed.
        folders: the granted folders.
    """

    confine: Callable[[str], Path]
    search: Callable[[str, int], list[dict[str, Any]]]
    read: Callable[[Path], str]
    write: Callable[[str, str], Path]
    post: Callable[[str, dict[str, Any]], int]
    folders: tuple[Path, ...]
