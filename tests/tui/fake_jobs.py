"""Jobs that never run: what `JobService` answers, made up from its own types so that the shapes are the real ones.

Knows: the service's methods. Does not know: DBOS, models, documents.
"""

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from appliance.errors import NotFound
from appliance.jobs.ledger import Entry
from appliance.jobs.record import Result
from appliance.jobs.service import Posted

RUN = "night@2026-11-30T01:30Z"
REPORT = """\
# Night report

Two documents, **both read**.

## boiler.md

> The valve is turned to the left.

- source: `boiler.md`, heading *Valves*
"""
STARTED = 1796002200.0  # 2026-11-30T01:30:00Z
ENTRIES = (
    Entry(RUN, "night", "2026-11-30T01:30Z", "done", "", "clock", seconds=41.6, prompt_tokens=1800, completion_tokens=212,
          model="fake/model", provider="FakeExecutionProvider", report="reports/night.md"),
    Entry("night@2026-11-29T01:30Z", "night", "2026-11-29T01:30Z", "missed", "the appliance was off", "clock"),
    Entry("mail@2026-11-29T00:00Z", "mail", "2026-11-29T00:00Z", "failed", "1 of 3 citations unverified", "request",
          seconds=9.1, prompt_tokens=300, completion_tokens=90),
)  # fmt: skip
STEPS = (
    ("1.search", Result(kind="tool", inputs={"query": "valve"}, output={"hits": 2}, seconds=0.12)),
    ("2.map.boiler", Result(kind="model", inputs={"model": ""}, output="The valve.", seconds=30.2, prompt_tokens=900,
                            completion_tokens=112, model="fake/model", provider="FakeExecutionProvider")),
    ("3.agent.read", Result(kind="tool", inputs={"path": "secret.txt"}, error="read_file is not granted; add it to [grants]",
                            denied=True)),
    ("4.write", Result(kind="code", output="reports/night.md", seconds=0.01)),
)  # fmt: skip


@dataclass
class FakeJobs:
    """Two jobs, three slots, one whole run.

    Attributes:
        posted: slots that were asked for, by job.
    """

    posted: list[str] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=lambda: list(ENTRIES))
    problems: tuple[str, ...] = ('mail2.toml: unknown key "promt"; did you mean "prompt"?',)

    def start(self, endpoint: object) -> None:
        pass

    def park(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def overview(self) -> dict[str, Any]:
        jobs = [
            self._job("mail", None, None),
            self._job("night", {"cron": "30 2 * * *", "zone": "Europe/Berlin"}, "2026-12-01T01:30Z"),
        ]
        return {"jobs": jobs, "problems": list(self.problems)}

    def show(self, name: str) -> dict[str, Any]:
        raise AssertionError(f"no screen asks for one job, {name}: the fake would have to grow")

    def post(self, name: str, slot: str | None) -> Posted:
        new = name not in self.posted
        self.posted.append(name)
        entry = Entry(f"{name}@2026-11-30T09:00Z", name, "2026-11-30T09:00Z", "queued", trigger="request")
        if new:
            self.entries.insert(0, entry)
        return Posted(entry, new)

    def finish(self) -> None:
        """The newest slot is done."""
        self.entries[0] = replace(self.entries[0], state="done", seconds=2.5)

    def ledger(self, job: str | None = None, limit: int = 200) -> list[dict[str, Any]]:
        return [asdict(entry) for entry in self.entries if job in (None, entry.job)][:limit]

    def run(self, run: str) -> dict[str, Any]:
        entry = next((one for one in self.entries if one.run == run), None)
        if entry is None:
            raise NotFound(f'there is no run "{run}"', "see appliance job ledger")
        whole = run == RUN
        steps = [
            {"step": name, "started": STARTED + at, "finished": STARTED + at + result.seconds, **result.model_dump(mode="json")}
            for at, (name, result) in enumerate(STEPS)
        ]
        return {**asdict(entry), "steps": steps if whole else [], "report_text": REPORT if whole else None}

    def _job(self, name: str, schedule: dict[str, str] | None, due: str | None) -> dict[str, Any]:
        last = next((asdict(entry) for entry in self.entries if entry.job == name), None)
        return {
            "name": name, "description": "", "enabled": True, "schedule": schedule, "next": due, "last": last, "warnings": [],
        }  # fmt: skip
