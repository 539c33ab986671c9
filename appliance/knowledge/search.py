"""Finding passages: by words (BM25) and by vectors (cosine), the two lists joined by reciprocal rank.

Knows: both queries and how they are joined. Does not know: how passages came into the index.
Sources: FTS5's `bm25()`; Cormack, Clarke and Buettcher 2009, "Reciprocal Rank Fusion", for the sum of 1/(60 + rank).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import apsw

from appliance.errors import BadInput
from appliance.knowledge import terms, vectors
from appliance.knowledge.records import Hit, Mode, Ranker
from appliance.knowledge.schema import below
from appliance.knowledge.vectors import Embedder
from appliance.paths import real

CONSTANT = 60
TITLE_WEIGHT = 0.5  # of a word in the file's name or the headings above, against 1 in the passage
MOST = 100
"""Hits that one search may ask for."""


@dataclass(frozen=True)
class _Filter:
    """SQL that keeps ready files, below some folders where any are named."""

    sql: str
    values: tuple[str, ...]


def search(
    connection: apsw.Connection, embedder: Embedder | None, query: str, limit: int, folders: Sequence[Path] | None, mode: Mode
) -> list[Hit]:
    """The best passages, best first (see `Knowledge.search`)."""
    if not 1 <= limit <= MOST:
        raise BadInput(f"a limit of {limit} hits", f"ask for 1 to {MOST}", param="limit")
    if not query.strip():
        raise BadInput("the query is empty", "say what to look for", param="query")
    if folders is not None and not folders:
        return []
    able = vectors.usable(connection, embedder)
    if mode in ("vector", "hybrid") and not able:
        why = "the index has no vectors of the installed embedder" if embedder else "no embedder is installed"
        raise BadInput(f"a {mode} search is not possible: {why}", "use mode lexical", param="mode")
    among = _filter(folders)
    depth = max(50, 4 * limit)
    ranks: dict[Ranker, dict[int, float]] = {}
    if mode != "vector":
        ranks["lexical"] = _by_words(connection, query, among, depth)
    if mode != "lexical" and able:
        assert embedder is not None
        ranks["vector"] = _by_vector(connection, vectors.encode(embedder, query), among, depth)
    return _hits(connection, ranks, limit)


def _filter(folders: Sequence[Path] | None) -> _Filter:
    sql = "files.present AND files.condition = 'ready'"
    values: list[str] = []
    if folders is not None:
        ranges = []
        for folder in folders:
            path = real(folder)
            ranges.append("files.path >= ? AND files.path < ? OR files.path = ?")
            values += [*below(path), str(path)]
        sql += f" AND ({' OR '.join(ranges)})"
    return _Filter(sql, tuple(values))


def _by_words(connection: apsw.Connection, query: str, among: _Filter, depth: int) -> dict[int, float]:
    """Passages by BM25, best first. FTS5 counts downwards; here more is better."""
    expression = terms.question(query)
    if not expression:
        return {}
    sql = f"""SELECT words.rowid, -bm25(words, {TITLE_WEIGHT}, 1.0) AS score FROM words
              JOIN chunks ON chunks.id = words.rowid JOIN files ON files.id = chunks.file
              WHERE words MATCH ? AND {among.sql} ORDER BY score DESC, words.rowid LIMIT ?"""
    return {int(str(number)): float(str(score)) for number, score in connection.execute(sql, (expression, *among.values, depth))}


def _by_vector(connection: apsw.Connection, vector: bytes, among: _Filter, depth: int) -> dict[int, float]:
    """Passages by cosine, best first."""
    sql = f"""SELECT rowid, 1 - distance FROM vectors WHERE embedding MATCH ? AND k = ? AND rowid IN (
              SELECT chunks.id FROM chunks JOIN files ON files.id = chunks.file WHERE {among.sql}) ORDER BY distance"""
    rows = connection.execute(sql, (vector, depth, *among.values)).fetchall()
    found = {int(str(number)): float(str(score)) for number, score in rows}
    return dict(sorted(found.items(), key=lambda one: (-one[1], one[0])))


def fuse(ranks: Mapping[Ranker, Sequence[int]]) -> dict[int, float]:
    """Passage numbers with the sum of 1/(60 + rank), best first; of equal ones the lower number."""
    scores: dict[int, float] = {}
    for ranked in ranks.values():
        for rank, number in enumerate(ranked, 1):
            scores[number] = scores.get(number, 0.0) + 1 / (CONSTANT + rank)
    return dict(sorted(scores.items(), key=lambda one: (-one[1], one[0])))


def _hits(connection: apsw.Connection, ranks: dict[Ranker, dict[int, float]], limit: int) -> list[Hit]:
    hits = []
    for number, score in list(fuse({ranker: list(found) for ranker, found in ranks.items()}).items())[:limit]:
        sql = """SELECT files.path, anchor, text, start, stop, sha256 FROM chunks JOIN files ON files.id = chunks.file
                 WHERE chunks.id = ?"""
        row = connection.execute(sql, (number,)).fetchone()
        if row is None:
            continue
        path, anchor, text, start, stop, sha256 = row
        hits.append(
            Hit(
                path=Path(str(path)), anchor=str(anchor), text=str(text), start=int(str(start)), end=int(str(stop)),
                sha256=str(sha256), score=score,
                rankers=tuple(ranker for ranker, found in ranks.items() if number in found),
                lexical=ranks.get("lexical", {}).get(number), vector=ranks.get("vector", {}).get(number),
            )
        )  # fmt: skip
    return hits
