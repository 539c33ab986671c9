"""The tables of the knowledge index, and how its file is opened.

Knows: every table. Does not know: what is put in or asked.
Sources: FTS5's documentation (contentless-delete tables); sqlite-vec's `vec0` virtual tables.
"""

from pathlib import Path

import apsw

from appliance.errors import StorageError
from appliance.knowledge.terms import TOKENIZER
from appliance.store.database import Migration, connect

MIGRATIONS = (
    Migration(
        "folders, files, passages, words",
        f"""
        CREATE TABLE settings(key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
        CREATE TABLE folders(path TEXT PRIMARY KEY, problem TEXT NOT NULL, indexed TEXT NOT NULL) STRICT;
        CREATE TABLE files(
            id INTEGER PRIMARY KEY,
            path TEXT NOT NULL UNIQUE,
            kind TEXT NOT NULL,
            condition TEXT NOT NULL,
            reason TEXT NOT NULL,
            lasting INTEGER NOT NULL,   -- 0: try again next time, though the file is the same
            present INTEGER NOT NULL,   -- 0: its folder is not there now (a stick that was pulled)
            stamp TEXT NOT NULL,        -- size and times; while it is the same the file is not read again
            version INTEGER NOT NULL,   -- of the reader
            sha256 TEXT NOT NULL,
            indexed TEXT NOT NULL
        ) STRICT;
        CREATE TABLE chunks(
            id INTEGER PRIMARY KEY,
            file INTEGER NOT NULL REFERENCES files(id) ON DELETE CASCADE,
            anchor TEXT NOT NULL,
            start INTEGER NOT NULL,
            stop INTEGER NOT NULL,
            text TEXT NOT NULL,
            embedded INTEGER NOT NULL DEFAULT 0
        ) STRICT;
        CREATE INDEX chunks_of_file ON chunks(file);
        CREATE INDEX chunks_to_embed ON chunks(embedded) WHERE NOT embedded;
        -- Only the words: the passages themselves stand in chunks, under the same number.
        CREATE VIRTUAL TABLE words USING fts5(title, body, content='', contentless_delete=1, tokenize="{TOKENIZER}");
        """,
    ),
)


def open_index(path: Path) -> apsw.Connection:
    """A connection to the index with vector search; `StorageError` when it cannot be had."""
    import sqlite_vec

    connection = connect(path, MIGRATIONS)
    try:
        connection.enable_load_extension(True)
        connection.load_extension(sqlite_vec.loadable_path())
        connection.enable_load_extension(False)
    except apsw.Error as failure:
        connection.close()
        raise StorageError(f"the vector search library cannot be loaded: {failure}", "install sqlite-vec again") from None
    return connection


def below(folder: Path) -> tuple[str, str]:
    """The half-open range of paths below a folder: all begin with its name and "/", and "0" is what follows "/"."""
    name = str(folder).rstrip("/")
    return f"{name}/", f"{name}0"
