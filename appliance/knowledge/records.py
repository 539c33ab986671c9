"""What the index says of itself: statuses, reports, hits.

Knows: their fields. Does not know: how they come about.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from appliance.knowledge.document import Condition

Mode = Literal["auto", "lexical", "vector", "hybrid"]
Ranker = Literal["lexical", "vector"]
Progress = Callable[[int, int, str], None]
"""(files done, files in all, name of the file that comes next; "" at the end)."""


@dataclass(frozen=True)
class FileStatus:
    """One file of the index.

    Attributes:
        condition: "ready" when it can be searched; otherwise `reason` says why not.
        sha256: of the bytes that were read, hex; "" when they could not be.
        chunks, embedded: passages, and how many of them have a vector.
        indexed: when it was last read; UTC, ISO 8601.
    """

    path: Path
    kind: str
    condition: Condition
    reason: str
    sha256: str
    chunks: int
    embedded: int
    indexed: str


@dataclass(frozen=True)
class FolderStatus:
    """One folder that was indexed. `problem`: why it could not be read last time, "" when it could."""

    path: Path
    problem: str
    indexed: str


@dataclass(frozen=True)
class IndexReport:
    """What one run over a folder did.

    Attributes:
        problem: why the folder could not be read; "" when it could. Then `files` is empty.
        files: every file of the folder as it stands now, by path.
        read: files that were opened; the others are the same as last time.
        added, changed, removed, unchanged: numbers of files.
        vectors: why passages are without vectors; "" when all have one, or no embedder is installed.
    """

    folder: Path
    problem: str
    files: tuple[FileStatus, ...]
    read: int = 0
    added: int = 0
    changed: int = 0
    removed: int = 0
    unchanged: int = 0
    vectors: str = ""

    @property
    def failed(self) -> tuple[FileStatus, ...]:
        """The files that cannot be searched."""
        return tuple(one for one in self.files if one.condition != "ready")


@dataclass(frozen=True)
class Hit:
    """One passage found.

    Attributes:
        path, anchor: where it stands (see `document.Section`); `locate(path, anchor)` reads that place again.
        text: the passage.
        start, end: its characters in the document's text.
        sha256: of the file as it was read, hex.
        score: by which hits are ordered, higher is better: the sum of 1/(60 + rank) over the rankers that found it.
        rankers: which found it.
        lexical: its BM25, higher is better; None when the words did not find it.
        vector: its cosine to the question, at most 1; None when the vectors did not find it.
    """

    path: Path
    anchor: str
    text: str
    start: int
    end: int
    sha256: str
    score: float
    rankers: tuple[Ranker, ...]
    lexical: float | None
    vector: float | None
