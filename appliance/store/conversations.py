"""Conversations that the appliance keeps for its clients.

Knows: titles, messages and their order, in one SQLite file. Does not know: HTTP, or who asked what answered.
"""

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Literal

import apsw

from appliance.errors import NotFound, RequestError
from appliance.store.database import Migration, connect, storage_errors

Role = Literal["system", "user", "assistant"]

MIGRATIONS = (
    Migration(
        "conversations and their messages",
        """
        CREATE TABLE conversations(
            number INTEGER PRIMARY KEY,
            id TEXT NOT NULL UNIQUE,
            title TEXT NOT NULL,
            model TEXT NOT NULL,
            created REAL NOT NULL,
            updated REAL NOT NULL
        ) STRICT;
        CREATE INDEX conversations_by_update ON conversations(updated);
        CREATE TABLE messages(
            conversation INTEGER NOT NULL REFERENCES conversations(number) ON DELETE CASCADE,
            position INTEGER NOT NULL,
            role TEXT NOT NULL,
            content TEXT NOT NULL,
            created REAL NOT NULL,
            model TEXT,
            provider TEXT,
            finish_reason TEXT,
            prompt_tokens INTEGER,
            completion_tokens INTEGER,
            tokens_per_second REAL,
            PRIMARY KEY(conversation, position)
        ) STRICT, WITHOUT ROWID;
        """,
    ),
)
HEADS = """
    SELECT id, title, model, created, updated, (SELECT count(*) FROM messages WHERE conversation = number)
    FROM conversations
"""
MESSAGES = """
    SELECT role, content, model, provider, finish_reason, prompt_tokens, completion_tokens, tokens_per_second, position, created
    FROM messages WHERE conversation = (SELECT number FROM conversations WHERE id = ?) ORDER BY position
"""


@dataclass(frozen=True)
class NewMessage:
    """A message to be kept; what is known of an answer beside its text is None elsewhere."""

    role: Role
    content: str
    model: str | None = None
    provider: str | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    tokens_per_second: float | None = None


@dataclass(frozen=True)
class Message:
    """A kept message. `position` counts from 0; `created` is Unix seconds."""

    said: NewMessage
    position: int
    created: float


@dataclass(frozen=True)
class Head:
    """A conversation without its messages. Times are Unix seconds; `updated` is that of the last message or change."""

    id: str
    title: str
    model: str
    created: float
    updated: float
    messages: int  # how many


@dataclass(frozen=True)
class Conversation:
    """A whole conversation."""

    head: Head
    messages: tuple[Message, ...]


class Conversations:
    """The kept conversations of one file. Every method may be called from any thread.

    Args:
        path: the SQLite file; made if need be.
        clock: Unix seconds.

    Raises:
        StorageError: the file cannot be opened; any method: it cannot be read or written.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time):
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()  # apsw: a connection is for one thread at a time
        self._connection = connect(path, MIGRATIONS)

    def close(self) -> None:
        """Let go of the file."""
        with self._lock:
            self._connection.close()

    def heads(self, limit: int = 1000) -> list[Head]:
        """The newest conversations, at most `limit`, newest first."""
        with self._reading() as connection:
            rows: list[Any] = connection.execute(f"{HEADS} ORDER BY updated DESC, number DESC LIMIT ?", (limit,)).fetchall()
        return [Head(*row) for row in rows]

    def get(self, id: str) -> Conversation:
        """One conversation with its messages in order; `NotFound`."""
        with self._reading() as connection:
            head = _head(connection, id)
            rows = connection.execute(MESSAGES, (id,)).fetchall()
        return Conversation(head, tuple(_message(row) for row in rows))

    def create(self, title: str, model: str = "", id: str | None = None) -> Head:
        """Begin a conversation; one that has the id already stays as it is and is given back. None = an id made here."""
        now = self._clock()
        id = id or f"conv_{secrets.token_hex(12)}"
        insert = "INSERT INTO conversations(id, title, model, created, updated) VALUES(?, ?, ?, ?, ?) ON CONFLICT(id) DO NOTHING"
        with self._writing() as connection:
            connection.execute(insert, (id, title, model, now, now))
            return _head(connection, id)

    def rename(self, id: str, title: str) -> Head:
        """Give it another title; its place in the list stays. `NotFound`."""
        with self._writing() as connection:
            connection.execute("UPDATE conversations SET title = ? WHERE id = ?", (title, id))
            return _head(connection, id)

    def delete(self, id: str) -> None:
        """Forget a conversation and its messages; `NotFound`."""
        with self._writing() as connection:
            _head(connection, id)
            connection.execute("DELETE FROM conversations WHERE id = ?", (id,))

    def append(self, id: str, said: NewMessage, position: int | None = None) -> Message:
        """Keep one more message.

        Args:
            id: of the conversation; `NotFound`.
            said: the message.
            position: which message it is, from 0, so that a client that does not know whether its first try was heard can
                try again: the same message at the same place is kept once. None = the next.

        Raises:
            RequestError: another message has that place already, or the one before it lacks.
        """
        now = self._clock()
        with self._writing() as connection:
            count = _head(connection, id).messages
            place = count if position is None else position
            if place < count:
                there = _message(connection.execute(MESSAGES, (id,)).fetchall()[place])
                if there.said == said:
                    return there
                raise RequestError(f"message {place} is another one already", "read the conversation again", param="position")
            if place > count:
                raise RequestError(f"message {count} is to come before message {place}", "append it first", param="position")
            values = (id, place, now, *astuple(said))
            connection.execute(
                "INSERT INTO messages(conversation, position, created, role, content, model, provider, finish_reason,"
                " prompt_tokens, completion_tokens, tokens_per_second)"
                f" VALUES((SELECT number FROM conversations WHERE id = ?){', ?' * (len(values) - 1)})",
                values,
            )
            connection.execute("UPDATE conversations SET updated = ? WHERE id = ?", (now, id))
        return Message(said, place, now)

    @contextmanager
    def _reading(self) -> Iterator[apsw.Connection]:
        with self._lock, storage_errors(self._path):
            yield self._connection

    @contextmanager
    def _writing(self) -> Iterator[apsw.Connection]:
        """One transaction."""
        with self._lock, storage_errors(self._path), self._connection:
            yield self._connection


def _head(connection: apsw.Connection, id: str) -> Head:
    row: Any = connection.execute(f"{HEADS} WHERE id = ?", (id,)).fetchone()
    if row is None:
        raise NotFound(f'there is no conversation "{id}"', "GET /appliance/v1/conversations lists them")
    return Head(*row)


def _message(row: tuple[Any, ...]) -> Message:
    return Message(NewMessage(*row[:8]), *row[8:])
