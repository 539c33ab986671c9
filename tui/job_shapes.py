"""What the daemon says of jobs, as typed objects.

Knows: the fields the screens show, and where they stand in the JSON. Does not know: HTTP or how anything is shown.
"""

import json
from dataclasses import dataclass

from tui.shapes import Json

OPEN = ("queued", "running")  # a slot in any other state has ended


@dataclass(frozen=True)
class Slot:
    """One row of the ledger: a due time of a job and what became of it."""

    run: str  # job@slot
    job: str
    slot: str  # 2026-11-30T01:30Z
    state: str  # queued, running, done, failed, skipped or missed
    reason: str
    tokens: int  # of prompts and answers together
    seconds: float  # of model and tool calls

    @property
    def open(self) -> bool:
        """Whether it has no end yet."""
        return self.state in OPEN


@dataclass(frozen=True)
class Job:
    """A job with its next due time and its last slot."""

    name: str
    description: str
    schedule: str  # as its file writes it; empty = only when asked for
    enabled: bool
    next: str  # a slot; empty = none
    last: Slot | None


@dataclass(frozen=True)
class Jobs:
    """Every job, and one sentence for each job file that is wrong."""

    jobs: tuple[Job, ...]
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Step:
    """One recorded call of a run."""

    name: str
    kind: str  # model, tool or code
    started: float | None  # Unix seconds
    seconds: float
    tokens: int  # of prompt and answer together
    denied: bool
    error: str
    inputs: str  # JSON
    output: str  # JSON, or the text itself

    @property
    def outcome(self) -> str:
        """One word of how it ended."""
        return "denied" if self.denied else "failed" if self.error else "ok"


@dataclass(frozen=True)
class Run:
    """A slot with its recorded calls and its report."""

    slot: Slot
    model: str
    provider: str
    steps: tuple[Step, ...]
    report: str  # path on the daemon's machine; empty = none
    report_text: str | None  # Markdown


def to_jobs(data: Json) -> Jobs:
    """The answer of `GET /appliance/v1/jobs`."""
    return Jobs(tuple(_to_job(one) for one in data["jobs"]), tuple(data.get("problems") or ()))


def to_slot(data: Json) -> Slot:
    """A row of the ledger."""
    return Slot(
        run=data["run"],
        job=data["job"],
        slot=data["slot"],
        state=data["state"],
        reason=data.get("reason") or "",
        tokens=(data.get("prompt_tokens") or 0) + (data.get("completion_tokens") or 0),
        seconds=data.get("seconds") or 0.0,
    )


def to_run(data: Json) -> Run:
    """The answer of `GET /appliance/v1/runs/{run}`."""
    steps = tuple(_to_step(one) for one in data.get("steps") or ())
    model, provider = data.get("model") or "", data.get("provider") or ""
    return Run(to_slot(data), model, provider, steps, data.get("report") or "", data.get("report_text"))


def _to_job(data: Json) -> Job:
    schedule = data.get("schedule") or {}
    return Job(
        name=data["name"],
        description=data.get("description") or "",
        schedule=" ".join(str(schedule[key]) for key in ("cron", "zone") if schedule.get(key)),
        enabled=data.get("enabled", True),
        next=data.get("next") or "",
        last=to_slot(data["last"]) if data.get("last") else None,
    )


def _to_step(data: Json) -> Step:
    output = data.get("output")
    return Step(
        name=data["step"],
        kind=data.get("kind") or "",
        started=data.get("started"),
        seconds=data.get("seconds") or 0.0,
        tokens=(data.get("prompt_tokens") or 0) + (data.get("completion_tokens") or 0),
        denied=bool(data.get("denied")),
        error=data.get("error") or "",
        inputs=json.dumps(data.get("inputs") or {}, ensure_ascii=False, indent=2),
        output=output if isinstance(output, str) else json.dumps(output, ensure_ascii=False, indent=2),
    )
