"""Wire types of `/appliance/v1/knowledge`.

Knows: field names and ranges. Does not know: the index.
"""

from pydantic import BaseModel, ConfigDict, Field

from appliance.knowledge.document import Condition
from appliance.knowledge.records import Mode, Ranker
from appliance.strict import StrictModel


class IndexRequest(StrictModel):
    """Body of `POST /appliance/v1/knowledge/index`."""

    folder: str = Field(min_length=1, description="Absolute path of a folder on this machine.")


class SearchRequest(StrictModel):
    """Body of `POST /appliance/v1/knowledge/search`."""

    query: str = Field(min_length=1, max_length=10000)
    limit: int = Field(default=8, ge=1, le=100)
    folders: tuple[str, ...] | None = Field(default=None, description="Only files below one of these; null = all.")
    mode: Mode = "auto"


class _Answer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FileCard(_Answer):
    """One file; see `knowledge.records.FileStatus`."""

    path: str
    kind: str
    condition: Condition
    reason: str
    sha256: str
    chunks: int
    embedded: int
    indexed: str


class FolderCard(_Answer):
    """One folder that was indexed."""

    path: str
    problem: str
    indexed: str


class IndexAnswer(_Answer):
    """What one run did; see `knowledge.records.IndexReport`."""

    folder: str
    problem: str
    files: list[FileCard]
    read: int
    added: int
    changed: int
    removed: int
    unchanged: int
    vectors: str


class KnowledgeAnswer(_Answer):
    """The whole index. `embedder`: the model behind the vectors; null = search is by words alone."""

    embedder: str | None
    folders: list[FolderCard]
    files: list[FileCard]


class HitCard(_Answer):
    """One passage found; see `knowledge.records.Hit`."""

    path: str
    anchor: str
    text: str
    start: int
    end: int
    sha256: str
    score: float
    rankers: list[Ranker]
    lexical: float | None
    vector: float | None


class SearchAnswer(_Answer):
    """Passages, best first."""

    data: list[HitCard]
