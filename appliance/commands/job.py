"""`appliance job`: scheduled jobs.

Knows: options and tables. Does not know: how jobs run; apart from `check`, which reads files only, it asks the daemon.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from appliance.errors import ApplianceError

if TYPE_CHECKING:
    from appliance.client import Client

EXAMPLE = "appliance job run night-digest"
POLL_SECONDS = 0.3
EXIT_CODES = {"done": 0, "failed": 1, "missed": 3, "skipped": 3}
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Name = Annotated[str, typer.Argument(help="Name of the job.")]


def job() -> None:
    """Work through scheduled jobs: list, check, run, ledger, show."""


def list_(as_json: AsJson = False) -> int:
    """List the jobs with their next slot and last run."""
    found = _daemon().get("/appliance/v1/jobs")
    if as_json:
        print(json.dumps(found))
        return 0
    rows = [
        (
            one["name"],
            f"{one['schedule']['cron']} {one['schedule']['zone']}" if one["schedule"] else "when asked",
            one["next"] or "-",
            f"{one['last']['slot']} {one['last']['state']}" if one["last"] else "-",
            "; ".join(one["warnings"]),
        )
        for one in found["jobs"]
    ]
    _table(("job", "schedule", "next", "last", "warnings"), rows, "no jobs yet; docs/jobs.md says how to write one")
    for problem in found["problems"]:
        print(f"wrong: {problem}")
    return 0


def check(
    files: Annotated[list[Path] | None, typer.Argument(help="Job files; without any, all of the jobs folder.")] = None,
    as_json: AsJson = False,
) -> int:
    """Check job files without a daemon; show next due times and what they may use."""
    from datetime import UTC, datetime

    from appliance.config import load_config
    from appliance.jobs.catalog import JobFolder
    from appliance.jobs.service import describe_job

    paths = load_config().paths
    folder = JobFolder(paths.jobs, paths.reports)
    chosen = files if files else sorted(paths.jobs.glob("*.toml"))
    jobs, problems = [], []
    for path in chosen:
        try:
            jobs.append(describe_job(folder.read(path), datetime.now(UTC)))
        except ApplianceError as failure:
            problems.append(str(failure))
    if as_json:
        print(json.dumps({"jobs": jobs, "problems": problems}))
    else:
        if not chosen:
            print(f"no job files in {paths.jobs}")
        for one in jobs:
            _show_check(one)
        for problem in problems:
            print(f"wrong: {problem}")
    return 2 if problems else 0


def run(
    name: Name,
    slot: Annotated[str, typer.Option("--slot", help='Slot, e.g. 2026-11-30T01:30Z; "due" = the last that fell due.')] = "",
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for the end and show each step.")] = True,
    as_json: AsJson = False,
) -> int:
    """Run a job now, or a slot of it. Exit code: 0 done, 1 failed, 3 missed or skipped."""
    daemon = _daemon()
    posted = daemon.post(f"/appliance/v1/jobs/{name}/runs", {"slot": slot or None})
    if not wait:
        print(json.dumps(posted) if as_json else f"{posted['run']}: {posted['state']}")
        return 0
    if not as_json:
        print(posted["run"] if posted["created"] else f"{posted['run']} was asked for before; this is the same run")
    found = _follow(daemon, posted["run"], quiet=as_json)
    if as_json:
        print(json.dumps(found))
    else:
        _show_end(found)
    return EXIT_CODES[found["state"]]


def ledger(
    name: Annotated[str, typer.Argument(help="Only this job's slots.")] = "",
    limit: Annotated[int, typer.Option("--limit", min=1, max=10_000, help="Slots at most.")] = 50,
    as_json: AsJson = False,
) -> int:
    """List what became of every slot, the newest first."""
    query: dict[str, Any] = {"limit": limit, **({"job": name} if name else {})}
    entries = _daemon().get("/appliance/v1/ledger", query)["entries"]
    if as_json:
        print(json.dumps({"entries": entries}))
        return 0
    rows = [
        (one["run"], one["state"], f"{one['seconds']:.1f} s", str(one["prompt_tokens"] + one["completion_tokens"]), one["reason"])
        for one in entries
    ]
    _table(("run", "state", "time", "tokens", "reason"), rows, "the ledger is empty")
    return 0


def show(name: Annotated[str, typer.Argument(help="A job, or a run as job@slot.")], as_json: AsJson = False) -> int:
    """Show a job, or a run with its trace and report."""
    daemon = _daemon()
    if "@" not in name:
        found = daemon.get(f"/appliance/v1/jobs/{name}")
        print(json.dumps(found)) if as_json else _show_check(found)
        return 0
    found = daemon.get(f"/appliance/v1/runs/{name}")
    if as_json:
        print(json.dumps(found))
        return 0
    for step in found["steps"]:
        print(_line(step))
    _show_end(found)
    if found["report_text"]:
        print(f"\n{found['report_text']}", end="")
    return 0


COMMANDS = {"list": list_, "check": check, "run": run, "ledger": ledger, "show": show}
"""The verb's own verbs, by name."""


def _daemon() -> "Client":
    from appliance.client import find_client
    from appliance.config import load_config

    return find_client(load_config())


def _follow(daemon: "Client", run_id: str, quiet: bool) -> dict[str, Any]:
    """Wait for a run's end, printing each recorded call as it comes."""
    shown = 0
    while True:
        found: dict[str, Any] = daemon.get(f"/appliance/v1/runs/{run_id}")
        for step in found["steps"][shown:]:
            if not quiet:
                print(_line(step), flush=True)
        shown = len(found["steps"])
        if found["state"] in EXIT_CODES:
            return found
        time.sleep(POLL_SECONDS)


def _line(step: dict[str, Any]) -> str:
    tokens = step["prompt_tokens"] + step["completion_tokens"]
    told = [f"{step['seconds']:6.1f} s", f"{step['kind']:<5}", step["step"]]
    told += [f"{tokens} tokens"] if tokens else []
    told += [f"{'denied' if step['denied'] else 'failed'}: {step['error']}"] if step["error"] else []
    return "  ".join(told)


def _show_end(found: dict[str, Any]) -> None:
    print(f"{found['run']}: {found['state']}" + (f" ({found['reason']})" if found["reason"] else ""))
    if found["report"]:
        print(f"report: {found['report']}")


def _show_check(one: dict[str, Any]) -> None:
    grants, budget = one["grants"], one["budget"]
    print(f"{one['name']}  ({one['path']})")
    print(f"  next:    {', '.join(one['next_slots']) or 'only when asked'}")
    print(f"  steps:   {', '.join(one['steps'])}")
    print(f"  tools:   {', '.join(grants['tools']) or 'none'}")
    print(f"  reads:   {', '.join(grants['folders']) or 'nothing'}")
    print(f"  posts:   {', '.join(grants['urls']) or 'nowhere'}")
    print(f"  writes:  {grants['output']}")
    print(f"  budget:  {budget['tokens']} tokens, {budget['seconds']:g} s, {budget['steps']} calls")
    for warning in one["warnings"]:
        print(f"  warning: {warning}")


def _table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]], empty: str) -> None:
    if not rows:
        print(empty)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for head in heads:
        table.add_column(head, no_wrap=head not in ("schedule", "warnings", "reason"), overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
