"""A run's trace, as DBOS has recorded it.

Knows: which recorded steps are calls. Does not know: what a call is for.
"""

from typing import Any

from dbos import DBOS

from appliance.jobs.record import Result


def read_trace(run: str) -> list[dict[str, Any]]:
    """The recorded calls of a run in order; each with its name, begin and end in Unix seconds, and the fields of `Result`."""
    found = []
    for step in DBOS.list_workflow_steps(run):
        if not isinstance(step["output"], dict) or "kind" not in step["output"]:
            continue  # the bookkeeping of begin and end
        times = {"started": _seconds(step["started_at_epoch_ms"]), "finished": _seconds(step["completed_at_epoch_ms"])}
        found.append({"step": step["function_name"], **times, **Result.model_validate(step["output"]).model_dump(mode="json")})
    return found


def _seconds(milliseconds: int | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
