"""The knowledge index: folders of documents that can be searched, with places that can be read again.

Knows: what can be asked of it. Does not know: models (vectors come from a function that is handed in), HTTP, jobs.

    folder -- walk, readers (child process) --> text with anchors -- cut --> passages --> words (FTS5) + vectors (sqlite-vec)
    question --> BM25 ranks + cosine ranks -- reciprocal rank --> hits: file, page or heading or lines, passage
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

import apsw

from appliance.errors import NotFound
from appliance.knowledge.document import Condition, Document
from appliance.knowledge.reader_process import Limits
from appliance.knowledge.reading import locate, open_reader, read_document
from appliance.knowledge.records import FileStatus, FolderStatus, Hit, IndexReport, Mode, Progress
from appliance.knowledge.schema import below, open_index
from appliance.knowledge.search import search
from appliance.knowledge.update import Update, only_one
from appliance.knowledge.vectors import Embed, Embedder
from appliance.knowledge.walk import storable
from appliance.paths import real
from appliance.store.database import storage_errors


class Knowledge:
    """One index file. Every method may be called from any thread and opens a connection of its own.

    Args:
        path: the index's file; made on first use.
        embed: texts to unit vectors, all of one width; None = search by words alone.
        embedder: name of the model behind `embed`. When it is another than last time, `index` makes all vectors anew.
        find_embedder: asked before every run and search, instead of the two above: an embedder may be installed meanwhile.
        limits: of time, memory and size for reading one document.

    Every method raises `StorageError` when the file cannot be used.
    """

    def __init__(
        self,
        path: Path,
        embed: Embed | None = None,
        *,
        embedder: str = "embedder",
        find_embedder: Callable[[], Embedder | None] | None = None,
        limits: Limits = Limits(),
    ):
        given = Embedder(embed, embedder) if embed else None
        self._path = path
        self._find_embedder = find_embedder or (lambda: given)
        self._limits = limits

    @property
    def embedder(self) -> str | None:
        """Name of the embedding model; None when there is none, and search is by words alone."""
        found = self._find_embedder()
        return found.name if found else None

    def index(self, folder: Path, progress: Progress | None = None) -> IndexReport:
        """Bring the index up to date with a folder and all below it. Files that did not change are not opened.

        What cannot be read, the folder itself included, is in the report and raises nothing.

        Raises:
            Unavailable: another run is under way.
        """
        folder = real(folder)
        with self._open() as connection, only_one(self._path), open_reader(self._limits) as reader:
            update = Update(connection, reader, self._find_embedder())
            problem = update.run(folder, progress)
            return IndexReport(
                folder=folder,
                problem=problem,
                files=() if problem else tuple(_statuses(connection, folder)),
                read=update.read,
                added=update.added,
                changed=update.changed,
                removed=update.removed,
                unchanged=update.unchanged,
                vectors=update.vectors,
            )

    def search(self, query: str, limit: int = 8, folders: Sequence[Path] | None = None, mode: Mode = "auto") -> list[Hit]:
        """The passages that fit a question best, best first.

        Args:
            limit: hits at most, 1 to 100.
            folders: only files below one of these (or one of these files themselves); None = all.
            mode: "lexical", "vector" or both ("hybrid"); "auto" = both, or lexical where there are no vectors.

        Raises:
            BadInput: an empty query, a limit out of range, or vectors asked for where there are none.
        """
        with self._open() as connection:
            return search(connection, self._find_embedder(), query, limit, folders, mode)

    def document(self, path: Path) -> Document:
        """The whole text of an indexed file, read from disk now.

        Raises:
            NotFound: it is not in the index, or gone. DocumentError: it cannot be read.
        """
        return read_document(self._indexed(path), self._limits)

    def locate(self, path: Path, anchor: str) -> str:
        """The text at an anchor of an indexed file as it is on disk now; raises as `document` does."""
        return locate(self._indexed(path), anchor, self._limits)

    def status(self, folder: Path | None = None) -> list[FileStatus]:
        """Every file of the index, or of those below `folder`, by path."""
        with self._open() as connection:
            return _statuses(connection, real(folder) if folder else Path("/"))

    def folders(self) -> list[FolderStatus]:
        """Every folder that was ever indexed, by path."""
        with self._open() as connection:
            rows = connection.execute("SELECT path, problem, indexed FROM folders ORDER BY path").fetchall()
        return [FolderStatus(Path(str(path)), str(problem), str(indexed)) for path, problem, indexed in rows]

    def _indexed(self, path: Path) -> Path:
        with self._open() as connection:
            known = connection.execute("SELECT 1 FROM files WHERE path = ?", (storable(path),)).fetchone()
        if known is None:
            raise NotFound(f"{path} is not in the knowledge index", "index its folder: appliance knowledge index FOLDER")
        return path

    @contextlib.contextmanager
    def _open(self) -> Iterator[apsw.Connection]:
        with storage_errors(self._path), contextlib.closing(open_index(self._path)) as connection:
            yield connection


def _statuses(connection: apsw.Connection, folder: Path) -> list[FileStatus]:
    sql = """SELECT path, kind, condition, reason, sha256, indexed, present,
                    (SELECT count(*) FROM chunks WHERE file = files.id),
                    (SELECT count(*) FROM chunks WHERE file = files.id AND embedded)
             FROM files WHERE path >= ? AND path < ? ORDER BY path"""
    found = []
    for path, kind, condition, reason, sha256, indexed, present, chunks, embedded in connection.execute(sql, below(folder)):
        found.append(
            FileStatus(
                path=Path(str(path)),
                kind=str(kind),
                condition=cast(Condition, condition) if present else "unreadable",
                reason=str(reason) if present else "its folder could not be read last time",
                sha256=str(sha256),
                chunks=int(str(chunks)),
                embedded=int(str(embedded)),
                indexed=str(indexed),
            )
        )
    return found
