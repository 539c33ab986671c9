"""One run from its first step to its report: the durable workflow.

    input (job file as it was, slot) -> steps -> check -> report -> ledger

Knows: the order, and what ends a run early. Does not know: any kind of step, or when runs begin.
After a restart this runs again from the top, with every recorded call answered from its record; so it must decide by
its input and by recorded results alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import structlog
from dbos import DBOS

from appliance.errors import ApplianceError
from appliance.jobs import grants
from appliance.jobs.draft import Draft
from appliance.jobs.endpoint import ChatModel, Endpoint
from appliance.jobs.files import run_stem
from appliance.jobs.jobfile import JobFile
from appliance.jobs.ledger import Ledger
from appliance.jobs.publish import publish
from appliance.jobs.record import BudgetSpent, Record
from appliance.jobs.report import Verdict
from appliance.jobs.steps import read_step
from appliance.jobs.work import Work
from appliance.knowledge.index import Knowledge


@dataclass(frozen=True)
class Surroundings:
    """What runs need of the appliance."""

    ledger: Ledger
    library: Knowledge
    model: ChatModel
    endpoint: Endpoint
    runs: Path
    stopping: Callable[[], bool]


def make_workflow(around: Surroundings) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The function that DBOS runs."""

    def job(given: dict[str, Any]) -> dict[str, Any]:
        work = _begin(around, given)
        DBOS.run_step({"name": "begin"}, _enter, around.ledger, work.run)
        verdict = carry_out(work)
        DBOS.run_step({"name": "end"}, _leave, around.ledger, work, verdict)
        return {"state": verdict.state, "reason": verdict.reason}

    return job


def workflow_input(job: JobFile, slot: str, allowed: grants.Grants) -> dict[str, Any]:
    """What a run is started with: everything that decides about it, so that a later edit of the job file changes no run."""
    return {
        "job": job.model_dump(mode="json"),
        "slot": slot,
        "grants": {
            "tools": list(allowed.tools),
            "folders": [str(folder) for folder in allowed.folders],
            "urls": list(allowed.urls),
            "output": str(allowed.output),
        },
    }


def carry_out(work: Work) -> Verdict:
    """Work through the steps and write the report, whatever happens on the way."""
    try:
        for at, table in enumerate(work.job.step or [_agent_step(work.job)], 1):
            kind, settings = read_step(table, f"step {at}")
            kind.run(work, settings, f"{at}.{kind.name}")
    except BudgetSpent as spent:
        work.draft.failures.append(str(spent))
    except ApplianceError as failure:
        work.draft.failures.append(str(failure))
    except Exception as failure:
        structlog.get_logger().error("a run failed unexpectedly", run=work.run, exc_info=failure)
        work.draft.failures.append(f"unexpected {type(failure).__name__}: {failure}")
    try:
        return publish(work, "report")
    except ApplianceError as failure:
        return Verdict("failed", "; ".join([*work.draft.failures, f"the report could not be written: {failure}"]))


def _agent_step(job: JobFile) -> dict[str, Any]:
    return {"kind": "agent", "prompt": job.prompt}


def _begin(around: Surroundings, given: dict[str, Any]) -> Work:
    job = JobFile.model_validate(given["job"])
    allowed = given["grants"]
    slot = str(given["slot"])
    return Work(
        job=job,
        slot=slot,
        grants=grants.Grants(
            tuple(allowed["tools"]),
            tuple(Path(folder) for folder in allowed["folders"]),
            tuple(allowed["urls"]),
            Path(allowed["output"]),
        ),
        draft=Draft(),
        record=Record(job.budget, around.stopping),
        library=around.library,
        model=around.model,
        endpoint=around.endpoint,
        folder=around.runs / f"{job.name}@{slot}",
    )


def _enter(ledger: Ledger, run: str) -> None:
    ledger.change(run, state="running", started=now())


def _leave(ledger: Ledger, work: Work, verdict: Verdict) -> None:
    asked = [result for result in work.record.results if result.model]
    report = work.grants.output / f"{run_stem(work.job.name, work.slot)}.md"
    ledger.change(
        work.run,
        state=verdict.state,
        reason=verdict.reason,
        finished=now(),
        seconds=round(work.record.seconds, 3),
        prompt_tokens=sum(result.prompt_tokens for result in asked),
        completion_tokens=sum(result.completion_tokens for result in asked),
        model=", ".join(sorted({result.model for result in asked})),
        provider=", ".join(sorted({result.provider for result in asked})),
        report=str(report) if work.draft.published else "",
    )


def now() -> str:
    """This moment, ISO 8601 in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")
