"""A document as text: what every reader makes of its kind of file.

Knows: sections with anchors and offsets, the conditions a file can be in. Does not know: formats, files on disk, the index.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from appliance.errors import BadInput, NotFound

Condition = Literal["ready", "empty", "unreadable", "needs OCR", "unsupported"]
AnchorKind = Literal["page", "heading", "lines"]

_LINES = re.compile(r"^lines (\d+)-(\d+)$")


class DocumentError(BadInput):
    """A file cannot be read as a document.

    Attributes:
        condition: what is wrong with it, as the index says it.
        lasting: it will be no better next time, unless the file changes.
    """

    code = "bad_document"

    def __init__(self, condition: Condition, what: str, fix: str = "", *, lasting: bool = True):
        super().__init__(what, fix)
        self.condition: Condition = condition
        self.lasting = lasting


@dataclass(frozen=True)
class Section:
    """A stretch of a document's text that a person can find again in the source.

    Attributes:
        anchor: "page 3"; "Manual > Setup" (headings from the top down; "Manual > Setup [2]" is the second of that name, ""
            what stands before the first heading); "lines 10-24".
        start, end: characters of the document's text; sections follow each other and do not overlap.
    """

    anchor: str
    start: int
    end: int


@dataclass(frozen=True)
class Extract:
    """What a reader finds in a file."""

    text: str
    sections: tuple[Section, ...]
    anchors: AnchorKind


@dataclass(frozen=True)
class Document:
    """A file's text at one moment. `sha256`: of the file's bytes, hex; `kind`: the reader's name."""

    path: Path
    kind: str
    sha256: str
    text: str
    sections: tuple[Section, ...]
    anchors: AnchorKind

    def at(self, anchor: str) -> str:
        """The text at an anchor; `NotFound` when the document has no such place."""
        found = [section for section in self.sections if section.anchor == anchor]
        if found:
            return self.text[found[0].start : found[0].end]
        lines = _LINES.match(anchor) if self.anchors == "lines" else None
        if lines:
            first, last = int(lines[1]), int(lines[2])
            rows = self.text.split("\n")
            if 1 <= first <= last <= len(rows):
                return "\n".join(rows[first - 1 : last])
        raise NotFound(f'{self.path} has no place "{anchor}"', "it may have changed; index its folder again")


def lines_anchor(first: int, last: int) -> str:
    """The anchor of lines `first` to `last`, counted from 1, both included."""
    return f"lines {first}-{last}"


class Headings:
    """Names the places between headings: the path down to each, and which one of that name it is."""

    def __init__(self) -> None:
        self._path: list[tuple[int, str]] = []
        self._seen = {"": 1}  # what stands before the first heading

    def enter(self, level: int, title: str) -> str:
        """The anchor of the section under a heading of `level`, 1 = highest."""
        self._path = [one for one in self._path if one[0] < level] + [(level, " ".join(title.split()))]
        path = " > ".join(name for _, name in self._path if name)
        self._seen[path] = self._seen.get(path, 0) + 1
        return path if self._seen[path] == 1 else f"{path} [{self._seen[path]}]"
