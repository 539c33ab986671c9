"""One run over a folder: what is new, changed or gone since last time goes into the index, a file a transaction.

Knows: when a file is read again, what is written together. Does not know: formats, models, ranking.

    walk -> same stamp? keep -> read in the child -> same hash? new stamp only -> passages, words, vectors: one transaction
Interrupted anywhere, the next run goes on: whole files stand in the index, the others are read then.
"""

import contextlib
import fcntl
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import apsw

from appliance.errors import ApplianceError, Unavailable
from appliance.knowledge import readers, vectors
from appliance.knowledge.chunks import Chunk, cut
from appliance.knowledge.document import Condition, Document, DocumentError
from appliance.knowledge.reading import Reader
from appliance.knowledge.records import Progress
from appliance.knowledge.schema import below
from appliance.knowledge.terms import segmented
from appliance.knowledge.vectors import Embedder
from appliance.knowledge.walk import Found, files_below, storable


class Update:
    """One run. The counts are what `IndexReport` says.

    Args:
        connection: to the index.
        reader: reads the files.
        embedder: makes vectors; None = words alone.
    """

    def __init__(self, connection: apsw.Connection, reader: Reader, embedder: Embedder | None):
        self._connection = connection
        self._reader = reader
        self._embedder = embedder
        self.read = self.added = self.changed = self.removed = self.unchanged = 0
        self.vectors = ""

    def run(self, folder: Path, progress: Progress | None) -> str:
        """Index `folder` (absolute, without links); why it cannot be read, "" when it can."""
        low, high = below(folder)
        problem, found = "", []
        try:
            found = files_below(folder)
        except OSError as failure:
            problem = f"{folder} cannot be read: {failure.strerror}"
        with self._connection:
            insert = "INSERT OR REPLACE INTO folders VALUES(?, ?, ?)"
            self._connection.execute(insert, (storable(folder), problem, now()))
            if problem:  # perhaps a stick that was pulled: what was read is kept, but not found, until it is back
                self._connection.execute("UPDATE files SET present = 0 WHERE path >= ? AND path < ?", (low, high))
        if problem:
            return problem
        self._prepare_vectors()
        self._forget({storable(one.path) for one in found}, low, high)
        for number, one in enumerate(found):
            if progress:
                progress(number, len(found), str(one.path.relative_to(folder)))
            self._take(one)
        if self._embedder and not self.vectors:
            self.vectors = vectors.complete(self._connection, self._embedder, low, high)
        if progress:
            progress(len(found), len(found), "")
        return ""

    def _prepare_vectors(self) -> None:
        if self._embedder is None:
            return
        try:
            vectors.prepare(self._connection, self._embedder)
        except ApplianceError as failure:  # the documents can still be found by their words; the report says so
            self.vectors = str(failure)

    def _forget(self, there: set[str], low: str, high: str) -> None:
        """Remove what is in the index and no longer in the folder."""
        rows = self._connection.execute("SELECT id, path FROM files WHERE path >= ? AND path < ?", (low, high)).fetchall()
        for number, path in rows:
            if path not in there:
                with self._connection:
                    self._clear(int(str(number)))
                    self._connection.execute("DELETE FROM files WHERE id = ?", (number,))
                self.removed += 1

    def _take(self, one: Found) -> None:
        """Bring one file up to date."""
        path, kind = storable(one.path), readers.kind_of(one.path.name)
        version = int(readers.find(kind).VERSION)
        select = "SELECT id, stamp, version, sha256, lasting, present, condition, reason FROM files WHERE path = ?"
        row = self._connection.execute(select, (path,)).fetchone()
        if one.problem:
            if row is None or row[-2:] != ("unsupported", one.problem):
                self._replace(row, one, kind, version, "", "unsupported", one.problem)
            else:
                self.unchanged += 1
            return
        if row and row[1] == one.stamp and row[2] == version and row[4]:
            if not row[5]:
                self._connection.execute("UPDATE files SET present = 1 WHERE id = ?", (row[0],))
            self.unchanged += 1
            return
        self.read += 1
        try:
            document = self._reader.read(one.path)
        except DocumentError as failure:
            sha256 = self._reader.sha256
            self._replace(row, one, kind, version, sha256, failure.condition, str(failure), lasting=failure.lasting)
            return
        if row and row[2] == version and row[3] == document.sha256 and row[6] == "ready":
            self._connection.execute("UPDATE files SET stamp = ?, present = 1 WHERE id = ?", (one.stamp, row[0]))
            self.unchanged += 1
            return
        self._replace(row, one, kind, version, document.sha256, "ready", "", document)

    def _replace(
        self,
        row: tuple[object, ...] | None,
        one: Found,
        kind: str,
        version: int,
        sha256: str,
        condition: Condition,
        reason: str,
        document: Document | None = None,
        *,
        lasting: bool = True,
    ) -> None:
        """Write a file's row and passages in the place of what was there, in one transaction."""
        chunks = cut(document) if document else []
        made = self._embed(document, chunks) if document else []
        with self._connection:
            if row:
                self._clear(int(str(row[0])))
            insert = """INSERT INTO files(path, kind, condition, reason, lasting, present, stamp, version, sha256, indexed)
                        VALUES(?, ?, ?, ?, ?, 1, ?, ?, ?, ?)
                        ON CONFLICT(path) DO UPDATE SET kind = excluded.kind, condition = excluded.condition,
                            reason = excluded.reason, lasting = excluded.lasting, present = 1, stamp = excluded.stamp,
                            version = excluded.version, sha256 = excluded.sha256, indexed = excluded.indexed
                        RETURNING id"""
            values = (storable(one.path), kind, condition, reason, int(lasting), one.stamp, version, sha256, now())
            ((number,),) = self._connection.execute(insert, values).fetchall()
            if document:
                self._write(int(str(number)), document, chunks, made)
        self.changed += row is not None
        self.added += row is None

    def _embed(self, document: Document, chunks: list[Chunk]) -> list[bytes]:
        """Vectors of all passages; none at all when the embedder is missing or fails."""
        if self._embedder is None or self.vectors:
            return []
        subjects = [vectors.subject(chunk.anchor, document.text[chunk.start : chunk.end]) for chunk in chunks]
        try:
            return vectors.batch(self._embedder, subjects)
        except ApplianceError as failure:
            self.vectors = str(failure)
            return []

    def _write(self, file: int, document: Document, chunks: list[Chunk], made: list[bytes]) -> None:
        insert = "INSERT INTO chunks(file, anchor, start, stop, text) VALUES(?, ?, ?, ?, ?)"
        for at, chunk in enumerate(chunks):
            text = document.text[chunk.start : chunk.end]
            self._connection.execute(insert, (file, chunk.anchor, chunk.start, chunk.end, text))
            number = self._connection.last_insert_rowid()
            title = f"{document.path.name} {chunk.anchor if document.anchors == 'heading' else ''}"
            words = (number, segmented(title), segmented(text))
            self._connection.execute("INSERT INTO words(rowid, title, body) VALUES(?, ?, ?)", words)
            if made:
                vectors.store(self._connection, number, made[at])

    def _clear(self, file: int) -> None:
        """Remove a file's passages, and with them their words and vectors."""
        vectors.remove(self._connection, file)
        self._connection.execute("DELETE FROM words WHERE rowid IN (SELECT id FROM chunks WHERE file = ?)", (file,))
        self._connection.execute("DELETE FROM chunks WHERE file = ?", (file,))


@contextlib.contextmanager
def only_one(path: Path) -> Iterator[None]:
    """Hold the right to write the index; `Unavailable` when another run, of any process, has it."""
    with open(path.with_name(f"{path.name}.lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Unavailable("documents are being indexed already", "wait for that run to end") from None
        yield


def now() -> str:
    """The time, UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")
