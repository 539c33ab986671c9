"""SQLite files of our own: one way to open them, and ordered migrations.

Knows: write-ahead logging, waiting for locks, which migrations a file has had. Does not know: any table of its users.
All access goes through apsw: it carries its own, current SQLite with FTS5 and extension loading, which the Python of many
systems lacks. Source: SQLite's documentation of WAL and of `PRAGMA`.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import apsw

from appliance.errors import StorageError

BUSY_SECONDS = 30
"""How long a statement waits for another process's write."""

_LEDGER = "CREATE TABLE IF NOT EXISTS migrations(number INTEGER PRIMARY KEY, name TEXT NOT NULL, applied TEXT NOT NULL) STRICT"


@dataclass(frozen=True)
class Migration:
    """One step of a file's schema. Once released, its `sql` is never edited: what changes is a further step.

    Attributes:
        name: a few words, kept in the file.
        sql: statements, separated by semicolons.
    """

    name: str
    sql: str


def connect(path: Path, migrations: Sequence[Migration]) -> apsw.Connection:
    """Open the file, made if need be for its owner alone, and bring its schema up to date.

    A connection is for one thread at a time. `with connection:` is one transaction, which takes the write lock at once.

    Raises:
        StorageError: it cannot be opened or written, is no database, or was written by a newer version.
    """
    with storage_errors(path):
        _create(path)
        connection = apsw.Connection(str(path))
        try:
            connection.set_busy_timeout(BUSY_SECONDS * 1000)
            connection.transaction_mode = "IMMEDIATE"
            for pragma in ("journal_mode = WAL", "synchronous = NORMAL", "foreign_keys = ON"):
                connection.execute(f"PRAGMA {pragma}")
            _migrate(connection, path, migrations)
        except BaseException:
            connection.close()
            raise
    return connection


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn SQLite's and the system's failures with the file inside the block into a `StorageError` that says what to do."""
    try:
        yield
    except apsw.NotADBError:
        raise StorageError(f"{path} is no SQLite database", "move it away; a new one is made") from None
    except apsw.CorruptError:
        raise StorageError(f"{path} is damaged", "move it away; a new one is made") from None
    except apsw.FullError:
        raise StorageError(f"{path} cannot grow: the disk is full", "free some space") from None
    except apsw.BusyError:
        raise StorageError(f"{path} was locked by another process for {BUSY_SECONDS} s", "try again") from None
    except (apsw.ReadOnlyError, apsw.CantOpenError, apsw.PermissionsError, apsw.IOError) as failure:
        raise StorageError(f"{path} cannot be used: {failure}", "check the folder, its permissions and the disk") from None
    except OSError as failure:
        raise StorageError(f"{path} cannot be used: {failure.strerror}", "check the folder and its permissions") from None


def _create(path: Path) -> None:
    """An empty file that others cannot read: documents and conversations are private."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))


def _migrate(connection: apsw.Connection, path: Path, migrations: Sequence[Migration]) -> None:
    if _applied(connection, path, migrations) == len(migrations):
        return  # without a write lock: the usual case must not wait for another's long transaction
    with connection:
        connection.execute(_LEDGER)
        first = _applied(connection, path, migrations)  # again: another process may have been faster
        for number, migration in list(enumerate(migrations, 1))[first:]:
            connection.execute(migration.sql)
            insert = "INSERT INTO migrations VALUES(?, ?, strftime('%Y-%m-%dT%H:%M:%SZ'))"
            connection.execute(insert, (number, migration.name))


def _applied(connection: apsw.Connection, path: Path, migrations: Sequence[Migration]) -> int:
    """How many of `migrations` the file has had; they must be its first ones, in order."""
    if not connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'migrations'").fetchall():
        return 0
    done = [str(name) for (name,) in connection.execute("SELECT name FROM migrations ORDER BY number")]
    known = [migration.name for migration in migrations]
    if done[: len(known)] != known[: len(done)]:
        raise StorageError(f"{path} belongs to something else: its schema has the steps {', '.join(done)}", "move it away")
    if len(done) > len(known):
        raise StorageError(f"{path} was written by a newer version of the appliance", "update, or move the file away")
    return len(done)
