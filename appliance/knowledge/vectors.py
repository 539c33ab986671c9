"""Vectors of passages: made by an embed function that is handed in, kept by sqlite-vec.

Knows: which passages lack one, the table's width, whose vectors they are. Does not know: any model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import apsw
import numpy as np

from appliance.errors import ApplianceError, ContextLengthError

Embed = Callable[[Sequence[str]], list[list[float]]]
"""Texts to vectors of unit length; `ContextLengthError` when one is too long."""

BATCH = 16


@dataclass(frozen=True)
class Embedder:
    """An embed function and the name of the model behind it: vectors of two models are not compared."""

    embed: Embed
    name: str


def encode(embedder: Embedder, text: str) -> bytes:
    """One vector as sqlite-vec takes it: float32, native order. A text that is too long is the mean of its halves."""
    return _unit(_embedded(embedder.embed, text)).tobytes()


def _embedded(embed: Embed, text: str) -> np.ndarray:
    try:
        return np.asarray(embed([text])[0], np.float32)
    except ContextLengthError:
        middle = len(text) // 2
        if middle < 32:
            raise
        # The guess of tokens was too low, as for a long run of digits. Half the text would be no passage of its own.
        halves = [_unit(_embedded(embed, half)) for half in (text[:middle], text[middle:])]
        return np.asarray(halves[0] + halves[1], np.float32)


def _unit(vector: np.ndarray) -> np.ndarray:
    return np.asarray(vector / max(float(np.linalg.norm(vector)), 1e-12), np.float32)


def prepare(connection: apsw.Connection, embedder: Embedder) -> None:
    """Make the table for this embedder; vectors of another one are dropped and made anew."""
    row = connection.execute("SELECT value FROM settings WHERE key = 'embedder'").fetchone()
    if row and row[0] == embedder.name:
        return
    width = len(embedder.embed(["width"])[0])
    with connection:
        connection.execute("DROP TABLE IF EXISTS vectors")
        connection.execute(f"CREATE VIRTUAL TABLE vectors USING vec0(embedding float[{width}] distance_metric=cosine)")
        connection.execute("UPDATE chunks SET embedded = 0 WHERE embedded")
        connection.execute("INSERT OR REPLACE INTO settings VALUES('embedder', ?)", (embedder.name,))


def usable(connection: apsw.Connection, embedder: Embedder | None) -> bool:
    """Whether the index holds vectors of this embedder."""
    row = connection.execute("SELECT value FROM settings WHERE key = 'embedder'").fetchone()
    return bool(row and embedder and row[0] == embedder.name)


def complete(connection: apsw.Connection, embedder: Embedder, low: str, high: str) -> str:
    """Give a vector to every passage of the files between two paths that lacks one, a batch a transaction.

    Returns:
        why some are still without, "" when none is.
    """
    waiting = """SELECT chunks.id, chunks.anchor, chunks.text, files.path FROM chunks JOIN files ON files.id = chunks.file
                 WHERE NOT chunks.embedded AND files.path >= ? AND files.path < ? ORDER BY chunks.id LIMIT ?"""
    while rows := connection.execute(waiting, (low, high, BATCH)).fetchall():
        try:
            made = batch(embedder, [subject(str(anchor), str(text)) for _, anchor, text, _ in rows])
        except ApplianceError as failure:
            return str(failure)
        with connection:
            for (number, *_), vector in zip(rows, made, strict=True):
                store(connection, int(str(number)), vector)
    return ""


def batch(embedder: Embedder, texts: Sequence[str]) -> list[bytes]:
    """Vectors of several texts, together where none is too long."""
    found: list[bytes] = []
    for at in range(0, len(texts), BATCH):
        some = texts[at : at + BATCH]
        try:
            found += [_unit(np.asarray(one, np.float32)).tobytes() for one in embedder.embed(some)]
        except ContextLengthError:
            found += [encode(embedder, one) for one in some]
    return found


def store(connection: apsw.Connection, chunk: int, vector: bytes) -> None:
    """Keep a passage's vector; unless the passage is gone since."""
    connection.execute("UPDATE chunks SET embedded = 1 WHERE id = ?", (chunk,))
    if connection.changes():
        connection.execute("INSERT INTO vectors(rowid, embedding) VALUES(?, ?)", (chunk, vector))


def remove(connection: apsw.Connection, file: int) -> None:
    """Drop the vectors of a file's passages."""
    if connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'vectors'").fetchone():
        connection.execute("DELETE FROM vectors WHERE rowid IN (SELECT id FROM chunks WHERE file = ?)", (file,))


def subject(anchor: str, text: str) -> str:
    """What is embedded of a passage: a heading says what its text is about; a page number or a line does not."""
    return text if not anchor or anchor.startswith(("page ", "lines ")) else f"{anchor}\n{text}"
