"""Slots: each due time has one row, whatever the clock did meanwhile."""

import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from appliance.errors import RequestError
from appliance.jobs.catalog import Job, JobFolder
from appliance.jobs.clock import MOST_SLOTS, Clock
from appliance.jobs.launcher import open_database
from appliance.jobs.ledger import Entry, Ledger
from appliance.jobs.schedule import due, format_slot, parse_slot

START = datetime(2026, 11, 30, 12, 0, 30, tzinfo=UTC)


@pytest.fixture
def ledger(tmp_path: Path):  # type: ignore[no-untyped-def]
    engine = open_database(tmp_path / "dbos.db")
    yield Ledger(engine)
    engine.dispose()


def make_job(folder: Path, cron: str, more: str = "", zone: str = "UTC") -> Job:
    path = folder / "digest.toml"
    path.write_text(f'name = "digest"\nprompt = "x"\n[schedule]\ncron = "{cron}"\nzone = "{zone}"\n{more}')
    return JobFolder(folder, folder).read(path)


def clock_of(ledger: Ledger) -> Clock:
    def run(job: Job, slot: str) -> None:
        ledger.add(Entry(f"{job.file.name}@{slot}", job.file.name, slot, "done"))

    return Clock(ledger, run)


def states(ledger: Ledger) -> list[tuple[str, str]]:
    return [(entry.slot[11:16], entry.state) for entry in reversed(ledger.entries(limit=5000))]


def test_a_new_job_begins_now_and_runs_each_slot_once(tmp_path: Path, ledger: Ledger) -> None:
    job, clock = make_job(tmp_path, "*/10 * * * *"), clock_of(ledger)
    for second in range(0, 25 * 60, 7):
        clock.tick(job, START + timedelta(seconds=second))
    assert states(ledger) == [("12:10", "done"), ("12:20", "done")]


def test_time_spent_off_is_missed_skipped_and_made_up_for_once(tmp_path: Path, ledger: Ledger) -> None:
    job, clock = make_job(tmp_path, "0 * * * *", "deadline_minutes = 150"), clock_of(ledger)
    clock.tick(job, START)
    clock.tick(job, START + timedelta(hours=5))
    assert states(ledger) == [
        ("13:00", "missed"), ("14:00", "missed"), ("15:00", "skipped"), ("16:00", "skipped"), ("17:00", "done"),
    ]  # fmt: skip
    reasons = {entry.slot[11:13]: entry.reason for entry in ledger.entries()}
    assert "within 150 minutes: the appliance was off" in reasons["13"] and "2026-11-30T17:00Z was due too" in reasons["16"]


def test_a_clock_that_is_put_back_repeats_nothing(tmp_path: Path, ledger: Ledger) -> None:
    job, clock = make_job(tmp_path, "* * * * *"), clock_of(ledger)
    moments = [START + timedelta(minutes=minute) for minute in (0, 1, 2, -30, -29, 1, 2, 3)]
    for moment in moments:
        clock.tick(job, moment)
    assert states(ledger) == [("12:01", "done"), ("12:02", "done"), ("12:03", "done")]


def test_a_crash_before_the_decision_is_kept_decides_the_same(
    tmp_path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, clock = make_job(tmp_path, "*/5 * * * *"), clock_of(ledger)
    clock.tick(job, START)
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "decide", lambda *_: (_ for _ in ()).throw(OSError("killed")))
        with pytest.raises(OSError, match="killed"):
            clock.tick(job, START + timedelta(minutes=11))
    before = states(ledger)
    clock.tick(job, START + timedelta(minutes=11))
    assert states(ledger) == before == [("12:05", "skipped"), ("12:10", "done")]


def test_a_year_off_stays_within_bounds(tmp_path: Path, ledger: Ledger) -> None:
    job, clock = make_job(tmp_path, "* * * * *", "deadline_minutes = 2"), clock_of(ledger)
    clock.tick(job, START)
    clock.tick(job, START + timedelta(days=365))
    found = ledger.entries(limit=5000)
    assert len(found) == MOST_SLOTS and found[0].state == "done"
    assert "so were all slots before it, since 2026-11-30T12:00Z" in found[-1].reason


@pytest.mark.parametrize("more", ["", "enabled = false"])
def test_off_or_unscheduled_jobs_are_never_due(tmp_path: Path, ledger: Ledger, more: str) -> None:
    path = tmp_path / "digest.toml"
    schedule = '[schedule]\ncron = "* * * * *"\n' if more else ""
    path.write_text(f'name = "digest"\nprompt = "x"\n{more}\n{schedule}')
    job, clock = JobFolder(tmp_path, tmp_path).read(path), clock_of(ledger)
    for minute in range(3):
        clock.tick(job, START + timedelta(minutes=minute))
    assert states(ledger) == []


def test_backward_search_agrees_with_walking_every_minute() -> None:
    seed = random.randrange(2**32)
    random_ = random.Random(seed)
    for _ in range(20):
        zone = random_.choice(["UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kolkata"])
        minute, hour = random_.randrange(60), random_.randrange(24)
        after = datetime(2026, random_.randrange(1, 13), random_.randrange(1, 28), random_.randrange(24), tzinfo=UTC)
        until = after + timedelta(days=6)
        # Reference: every UTC minute whose wall clock reads the time; an hour that comes twice counts once.
        wanted: dict[object, datetime] = {}
        moment = after + timedelta(minutes=1)
        while moment <= until:
            there = moment.astimezone(ZoneInfo(zone))
            if (there.hour, there.minute) == (hour, minute):
                wanted.setdefault(there.date(), moment)
            moment += timedelta(minutes=1)
        found = [one for one in due(f"{minute} {hour} * * *", zone, after, until, 100)]
        normal = [one for one in found if one.astimezone(ZoneInfo(zone)).date() in wanted]
        assert normal == list(wanted.values()), (seed, zone, minute, hour, after)
        assert len(found) - len(normal) <= 1  # the day whose hour is skipped runs at its next valid minute


@pytest.mark.parametrize("text", ["now", "2026-11-30", "2026-11-30T01:30", "2026-13-30T01:30Z", "2026-11-30T01:30+00:00"])
def test_what_is_no_slot_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="is no slot"):
        parse_slot(text)
    assert format_slot(parse_slot("2026-11-30T01:30Z")) == "2026-11-30T01:30Z"


def test_a_final_row_stays(ledger: Ledger) -> None:
    assert ledger.add(Entry("a@1", "a", "1", "queued")) and not ledger.add(Entry("a@1", "a", "1", "missed"))
    ledger.change("a@1", state="running")
    ledger.change("a@1", state="done", reason="first")
    ledger.change("a@1", state="failed", reason="second")
    entry = ledger.get("a@1")
    assert entry is not None and (entry.state, entry.reason) == ("done", "first") and ledger.open() == []
