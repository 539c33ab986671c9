"""SQLite files: migrations in order and whole, refusals that say what to do, privacy, several processes."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import apsw
import pytest

from appliance.errors import StorageError
from appliance.store.database import Migration, connect

FIRST = Migration("notes", "CREATE TABLE notes(text TEXT) STRICT")
SECOND = Migration("authors", "ALTER TABLE notes ADD COLUMN author TEXT; CREATE INDEX by_author ON notes(author)")
BROKEN = Migration("broken", "CREATE TABLE half(x TEXT) STRICT; CREATE TABLE oops(")


def names(connection: apsw.Connection) -> list[object]:
    return [name for (name,) in connection.execute("SELECT name FROM migrations ORDER BY number")]


def test_migrations_run_once_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "state" / "x.db"
    with connect(path, [FIRST]) as connection:
        connection.execute("INSERT INTO notes VALUES('kept')")
    connection.close()
    for _ in range(2):
        connection = connect(path, [FIRST, SECOND])
        assert names(connection) == ["notes", "authors"]
        assert connection.execute("SELECT text, author FROM notes").fetchall() == [("kept", None)]
        connection.close()


def test_a_failing_migration_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    with pytest.raises(apsw.SQLError):
        connect(path, [FIRST, BROKEN])
    connection = connect(path, [])
    assert connection.execute("SELECT count(*) FROM sqlite_schema").fetchone() == (0,)
    connection.close()


def test_the_connection_is_set_up(tmp_path: Path) -> None:
    connection = connect(tmp_path / "x.db", [FIRST])
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert connection.execute("PRAGMA foreign_keys").fetchone() == (1,)
    assert connection.transaction_mode == "IMMEDIATE"
    connection.close()


def test_only_the_owner_may_read_the_file(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        connect(tmp_path / "state" / "x.db", [FIRST]).close()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "state" / "x.db").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700


def test_a_newer_file_is_refused(tmp_path: Path) -> None:
    connect(tmp_path / "x.db", [FIRST, SECOND]).close()
    with pytest.raises(StorageError, match="newer version"):
        connect(tmp_path / "x.db", [FIRST])


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    connect(tmp_path / "x.db", [FIRST]).close()
    with pytest.raises(StorageError, match="belongs to something else"):
        connect(tmp_path / "x.db", [SECOND])


def test_what_is_no_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    path.write_bytes(b"something that matters to somebody" * 100)
    with pytest.raises(StorageError, match="no SQLite database"):
        connect(path, [FIRST])
    assert path.read_bytes() == b"something that matters to somebody" * 100


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file"):
        connect(tmp_path / "file" / "x.db", [FIRST])
    with pytest.raises(StorageError, match="cannot be used"):
        connect(tmp_path, [FIRST])


def test_processes_that_open_it_at_once_migrate_it_once(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from appliance.store.database import Migration, connect\n"
        "connect(Path(sys.argv[1]), [Migration('t', 'CREATE TABLE t(x INTEGER) STRICT; INSERT INTO t VALUES(1)')])"
    )
    children = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "x.db")]) for _ in range(4)]
    assert [child.wait(60) for child in children] == [0] * 4
    connection = apsw.Connection(str(tmp_path / "x.db"))
    assert connection.execute("SELECT count(*) FROM t").fetchone() == (1,)
    connection.close()
