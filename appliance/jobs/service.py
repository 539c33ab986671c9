"""All that the HTTP routes ask of jobs, and the life of the part as a whole.

Knows: start and stop, the clock's thread, posting a slot. Does not know: HTTP, or how a run goes.

    start: lock -> database -> ledger -> DBOS (goes on with what was under way) -> clock thread
    stop:  clock thread -> runs park at their next call -> DBOS -> lock
"""

import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import structlog
from dbos import DBOS

from appliance.errors import ApplianceError, NotFound, RequestError, Unavailable
from appliance.jobs.catalog import Job, JobFolder
from appliance.jobs.clock import Clock, is_late, late_reason
from appliance.jobs.endpoint import ChatModel, Endpoint
from appliance.jobs.launcher import Launched, Launcher
from appliance.jobs.ledger import FINAL, Entry, Ledger
from appliance.jobs.schedule import due, format_slot, parse_slot, upcoming
from appliance.jobs.trace import read_trace
from appliance.jobs.workflow import Surroundings, make_workflow, now, workflow_input
from appliance.knowledge.index import Knowledge

TICK_SECONDS = 1.0
NEXT = 3  # due times that are shown


@dataclass(frozen=True)
class JobSettings:
    """Folders of the part."""

    jobs: Path
    reports: Path
    state: Path


@dataclass(frozen=True)
class Posted:
    """What came of asking for a slot."""

    entry: Entry
    created: bool  # false: the slot has been asked for before


class JobService:
    """Jobs of one appliance. Its methods may be called from any thread once it is started.

    Args:
        settings: folders.
        library: the local documents.
    """

    def __init__(self, settings: JobSettings, library: Knowledge):
        self._settings = settings
        self._library = library
        self._folder = JobFolder(settings.jobs, settings.reports)
        self._launcher = Launcher(settings.state)
        self._stop = threading.Event()
        self._posting = threading.Lock()
        self._ledger: Ledger | None = None
        self._launched: Launched | None = None
        self._model: ChatModel | None = None
        self._thread: threading.Thread | None = None

    def start(self, endpoint: Endpoint) -> None:
        """Begin; what a killed daemon left goes on. `ConfigError` when another daemon has these jobs."""
        engine = self._launcher.open()
        self._ledger = Ledger(engine)
        self._model = ChatModel(endpoint, self._stop.is_set)
        around = Surroundings(
            self._ledger, self._library, self._model, endpoint, self._settings.state / "runs", self._stop.is_set
        )
        self._launched = self._launcher.launch(make_workflow(around))
        for run in self._launched.stale:
            self._end(run, "another version of the program began it; run it again")
            DBOS.cancel_workflow(run)
        self._thread = threading.Thread(target=self._watch, name="clock", daemon=True)
        self._thread.start()

    def park(self) -> None:
        """Let every run stop at its next call. Returns at once."""
        self._stop.set()

    def stop(self) -> None:
        """Stop; runs under way are left as they are and go on at the next start."""
        self.park()
        if self._thread is not None:
            self._thread.join()
        if self._model is not None:
            self._model.close()
        self._launcher.close()

    def overview(self) -> dict[str, Any]:
        """Every job with its next slot and last end, and what is wrong with other files."""
        found = self._folder.read_all()
        return {"jobs": [self._describe(job) for job in found.jobs.values()], "problems": list(found.problems)}

    def show(self, name: str) -> dict[str, Any]:
        """One job, with grants and budgets."""
        job = self._folder.find(name)
        return {**self._describe(job), **describe_job(job, datetime.now(UTC))}

    def post(self, name: str, slot: str | None, trigger: str = "request") -> Posted:
        """Ask for a slot's run: an ISO minute, "due" for the last one that fell due, None for this minute.

        Whoever asks second for the same slot gets the same run.
        """
        job = self._folder.find(name)
        moment = datetime.now(UTC)
        if slot == "due":
            slot = _last_due(job, moment)
            if is_late(job, parse_slot(slot), moment):  # a timer that makes up for a time long gone
                return self._miss(job, slot, trigger)
        elif slot is not None:
            parse_slot(slot)
        return self._run(job, slot or format_slot(moment), trigger)

    def ledger(self, job: str | None = None, limit: int = 200) -> list[dict[str, Any]]:
        """Slots, the newest first."""
        return [asdict(entry) for entry in self._require_ledger().entries(job, limit)]

    def run(self, run: str) -> dict[str, Any]:
        """One run: its ledger row, its recorded calls, its report."""
        entry = self._require_ledger().get(run)
        if entry is None:
            raise NotFound(f'there is no run "{run}"', "see appliance job ledger")
        report = Path(entry.report) if entry.report else None
        copy = self._settings.state / "runs" / run / "report.md"
        text = copy.read_text(encoding="utf-8") if copy.is_file() else None
        return {**asdict(entry), "steps": read_trace(run), "report": str(report) if report else None, "report_text": text}

    def _describe(self, job: Job) -> dict[str, Any]:
        last = next(iter(self._require_ledger().entries(job.file.name, 1)), None)
        upcoming_slots = next_slots(job, datetime.now(UTC), 1)
        return {
            "name": job.file.name,
            "description": job.file.description,
            "enabled": job.file.enabled,
            "schedule": job.file.schedule.model_dump() if job.file.schedule else None,
            "next": upcoming_slots[0] if upcoming_slots else None,
            "last": asdict(last) if last else None,
            "warnings": list(job.warnings),
        }

    def _run(self, job: Job, slot: str, trigger: str) -> Posted:
        ledger, launched = self._require_ledger(), self._launched
        if launched is None or self._stop.is_set():
            raise Unavailable("the daemon is stopping", "ask again when it runs")
        name = job.file.name
        run = f"{name}@{slot}"
        with self._posting:
            entry = ledger.get(run)
            if entry is not None:
                return Posted(entry, False)
            # The row first, then the workflow: a crash in between leaves an open row, which `_resume` starts.
            ledger.add(Entry(run, name, slot, "queued", trigger=trigger))
            launched.start(run, workflow_input(job.file, slot, job.grants))
        entry = ledger.get(run)
        assert entry is not None
        return Posted(entry, True)

    def _miss(self, job: Job, slot: str, trigger: str) -> Posted:
        ledger, name = self._require_ledger(), job.file.name
        run = f"{name}@{slot}"
        created = ledger.add(Entry(run, name, slot, "missed", late_reason(job), trigger))
        entry = ledger.get(run)
        assert entry is not None
        return Posted(entry, created)

    def _watch(self) -> None:
        """The clock's thread."""
        log = structlog.get_logger()
        clock = Clock(self._require_ledger(), lambda job, slot: self._run(job, slot, "clock"))
        told: set[str] = set()
        resumed = False
        while not self._stop.is_set():
            try:
                if not resumed:
                    self._resume()
                    resumed = True
                found = self._folder.read_all()
                for problem in set(found.problems) - told:
                    log.warning("a job file is wrong", problem=problem)
                told = set(found.problems)
                for job in found.jobs.values():
                    clock.tick(job, datetime.now(UTC))
            except Exception as failure:  # the clock must go on: the next tick decides the same again
                log.error("a tick of the clock failed", exc_info=failure)
            self._stop.wait(TICK_SECONDS)

    def _resume(self) -> None:
        """Give every open row its end: start what was never started, close what ended without telling."""
        ledger, launched = self._require_ledger(), self._launched
        assert launched is not None
        for entry in ledger.open():
            status = DBOS.get_workflow_status(entry.run)
            if status is None:
                try:
                    job = self._folder.find(entry.job)
                except ApplianceError as failure:
                    self._end(entry.run, str(failure))
                else:
                    launched.start(entry.run, workflow_input(job.file, entry.slot, job.grants))
            elif status.status in ("ERROR", "CANCELLED", "MAX_RECOVERY_ATTEMPTS_EXCEEDED"):
                self._end(entry.run, f"the run broke off: {status.error or status.status}")

    def _end(self, run: str, reason: str) -> None:
        self._require_ledger().change(run, state="failed", finished=now(), reason=reason)

    def _require_ledger(self) -> Ledger:
        if self._ledger is None:
            raise Unavailable("jobs are not started yet", "ask again soon")
        return self._ledger


def next_slots(job: Job, after: datetime, count: int = NEXT) -> Sequence[str]:
    """The next due times as slots."""
    schedule = job.file.schedule
    if schedule is None or not job.file.enabled:
        return []
    return [format_slot(moment) for moment, _ in zip(upcoming(schedule.cron, schedule.zone, after), range(count), strict=False)]


def describe_job(job: Job, at: datetime) -> dict[str, Any]:
    """What `appliance job check` shows: due times, effective grants, budgets."""
    file = job.file
    return {
        "name": file.name,
        "path": str(job.path),
        "steps": [table["kind"] for table in file.step] or ["agent"],
        "model": file.model,
        "next_slots": list(next_slots(job, at)),
        "grants": {
            "tools": list(job.grants.tools),
            "folders": [str(folder) for folder in job.grants.folders],
            "urls": list(job.grants.urls),
            "output": str(job.grants.output),
        },
        "budget": file.budget.model_dump(),
        "warnings": list(job.warnings),
    }


def _last_due(job: Job, moment: datetime) -> str:
    schedule = job.file.schedule
    if schedule is None:
        raise RequestError(f'the job "{job.file.name}" has no schedule', "name a slot, or none for now", param="slot")
    found = due(schedule.cron, schedule.zone, parse_slot("2000-01-01T00:00Z"), moment, 1)
    return format_slot(found[-1]) if found else format_slot(moment)


def is_final(state: str) -> bool:
    """Whether a slot's state stays."""
    return state in FINAL
