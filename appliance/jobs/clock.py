"""The clock: turns due times into slots that are run, missed or skipped.

    decided ....... deadline ....... now        of the slots between "decided" and now:
        missed  |     skipped, run               older than the deadline: missed; else the last one runs, the others are skipped

Knows: what a moment means for one job. Does not know: what time it is, how a run is started.
"""

from collections.abc import Callable
from datetime import datetime, timedelta

from appliance.jobs.catalog import Job
from appliance.jobs.ledger import Entry, Ledger
from appliance.jobs.schedule import due, format_slot, parse_slot

MOST_SLOTS = 1000
"""Rows written at once for time spent off; of an every-minute job that is 16 hours, and the first row says what came before."""


class Clock:
    """Decides on slots.

    Args:
        ledger: where decisions are kept.
        run: starts the run of a job's slot; starting one twice does nothing.
    """

    def __init__(self, ledger: Ledger, run: Callable[[Job, str], object]):
        self._ledger = ledger
        self._run = run

    def tick(self, job: Job, now: datetime) -> None:
        """Decide on everything that fell due since the last tick. A job seen for the first time begins now."""
        schedule = job.file.schedule
        name = job.file.name
        decided = self._ledger.decided(name)
        if decided is None or schedule is None or not job.file.enabled:
            self._ledger.decide(name, format_slot(now))
            return
        since = parse_slot(decided)
        slots = due(schedule.cron, schedule.zone, since, now, MOST_SLOTS)
        for at, moment in enumerate(slots):
            slot = format_slot(moment)
            if is_late(job, moment, now):
                reason = late_reason(job)
                if at == 0 and len(slots) == MOST_SLOTS:
                    reason += f"; so were all slots before it, since {decided}"
                self._close(job, slot, "missed", reason)
            elif at < len(slots) - 1:
                self._close(job, slot, "skipped", f"{format_slot(slots[-1])} was due too by then, and ran for both")
            else:
                self._run(job, slot)
        self._ledger.decide(name, format_slot(now))  # after the rows: a crash in between decides the same again

    def _close(self, job: Job, slot: str, state: str, reason: str) -> None:
        name = job.file.name
        self._ledger.add(Entry(f"{name}@{slot}", name, slot, state, reason, trigger="clock"))


def is_late(job: Job, moment: datetime, now: datetime) -> bool:
    """Whether a due time is past the job's deadline."""
    schedule = job.file.schedule
    return schedule is not None and moment < now - timedelta(minutes=schedule.deadline_minutes)


def late_reason(job: Job) -> str:
    """What the ledger says of a slot that is past its deadline."""
    assert job.file.schedule is not None
    return f"it could not begin within {job.file.schedule.deadline_minutes} minutes: the appliance was off, or had no such job"
