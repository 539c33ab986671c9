"""The life of the part: the lock, the id, what a restart finds."""

import contextlib
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from dbos import DBOS

from appliance.errors import ConfigError, NotFound, RequestError
from appliance.jobs import launcher
from appliance.jobs.endpoint import Endpoint
from appliance.jobs.launcher import Launcher, appliance_id, open_database
from appliance.jobs.ledger import Entry, Ledger
from appliance.jobs.schedule import format_slot
from appliance.jobs.serializer import JsonSerializer
from appliance.jobs.service import JobService, JobSettings
from appliance.knowledge.index import Knowledge
from tests.api.fake_engine import wait_until

NOWHERE = Endpoint("http://127.0.0.1:9", None, "key")
SEARCH = '[[step]]\nkind = "search"\nquery = "x"\n'
SLOT = "2026-01-01T00:00Z"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "jobs").mkdir()
    return tmp_path


def write(folder: Path, text: str = SEARCH, name: str = "digest") -> None:
    (folder / "jobs" / f"{name}.toml").write_text(f'name = "{name}"\n{text}')


@contextlib.contextmanager
def started(folder: Path) -> Iterator[JobService]:
    service = JobService(
        JobSettings(folder / "jobs", folder / "reports", folder / "state"), Knowledge(folder / "state/knowledge.db")
    )
    service.start(NOWHERE)
    try:
        yield service
    finally:
        service.stop()


def end_of(service: JobService, run: str) -> dict[str, Any]:
    assert wait_until(lambda: service.run(run)["state"] not in ("queued", "running"), 20)
    return service.run(run)


def test_two_askers_of_one_slot_get_one_run(folder: Path) -> None:
    write(folder)
    with started(folder) as service:
        first, second = service.post("digest", SLOT), service.post("digest", SLOT)
        assert (first.created, second.created) == (True, False) and first.entry.run == second.entry.run
        assert end_of(service, f"digest@{SLOT}")["state"] == "failed"  # the search is not granted
        assert not service.post("digest", SLOT).created and len(service.ledger()) == 1
        with pytest.raises(RequestError, match="no schedule"):
            service.post("digest", "due")
        with pytest.raises(NotFound):
            service.run("digest@2020-01-01T00:00Z")


def test_the_slot_that_fell_due_last_or_its_deadline(folder: Path) -> None:
    ago = datetime.now(UTC) - timedelta(hours=2)
    write(folder, f'[schedule]\ncron = "{ago.minute} {ago.hour} * * *"\n{SEARCH}')
    write(folder, f'[schedule]\ncron = "{ago.minute} {ago.hour} * * *"\ndeadline_minutes = 60\n{SEARCH}', "late")
    with started(folder) as service:
        assert service.post("digest", "due").entry.run == f"digest@{format_slot(ago)}"
        late = service.post("late", "due")
        assert late.entry.state == "missed" and "within 60 minutes" in late.entry.reason and late.created
        assert not service.post("late", "due").created


def test_a_restart_finishes_rows_that_were_never_started(folder: Path) -> None:
    write(folder)
    engine = open_database_in(folder)
    ledger = Ledger(engine)
    ledger.add(Entry(f"digest@{SLOT}", "digest", SLOT, "queued"))
    ledger.add(Entry(f"gone@{SLOT}", "gone", SLOT, "queued"))
    engine.dispose()
    with started(folder) as service:
        assert "denied: knowledge_search" in end_of(service, f"digest@{SLOT}")["reason"]
        assert end_of(service, f"gone@{SLOT}")["reason"].startswith('there is no job "gone"')


def open_database_in(folder: Path) -> Any:
    (folder / "state").mkdir()
    return open_database(folder / "state/dbos.db")


def test_runs_of_another_version_end_in_the_ledger(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder, 'prompt = "x"')  # waits for a model that never answers
    with started(folder) as service:
        service.post("digest", SLOT)
        assert wait_until(lambda: service.run(f"digest@{SLOT}")["state"] == "running", 20)
    with monkeypatch.context() as patch:
        patch.setattr(launcher, "WORKFLOW_VERSION", f"{launcher.WORKFLOW_VERSION}+")
        with started(folder) as service:
            found = service.run(f"digest@{SLOT}")
            assert found["state"] == "failed" and "another version of the program began it" in found["reason"]


def test_the_lock_is_held_and_the_id_stays(folder: Path) -> None:
    first, second = Launcher(folder / "state"), Launcher(folder / "state")
    first.open()
    with pytest.raises(ConfigError, match="another daemon works on the jobs"):
        second.open()
    first.close()
    second.open()
    second.close()
    assert appliance_id(folder / "state") == appliance_id(folder / "state")


def test_the_executor_is_the_appliance(folder: Path) -> None:
    with started(folder):
        assert DBOS.executor_id == appliance_id(folder / "state") and DBOS.application_version == launcher.WORKFLOW_VERSION


def test_what_is_stored_is_json_and_cannot_be_code() -> None:
    serializer = JsonSerializer()
    for data in ({"a": [1, 2.5, None, "é"]}, "x", None):
        assert serializer.deserialize(serializer.serialize(data)) == data
    assert str(serializer.deserialize(serializer.serialize(ValueError("no")))) == "ValueError: no"
    with pytest.raises(TypeError):
        serializer.serialize(object())
