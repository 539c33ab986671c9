"""Whole runs in a real daemon process: what ends up in the report and the ledger."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.box import ROOT, Box, Rules, box

STEPS = '[[step]]\nkind = "search"\nquery = "capital river"\n[[step]]\nkind = "map"\n[[step]]\nkind = "reduce"\n'
FRANCE = "# France\n\nThe capital of France is Paris. Paris lies on the river Seine.\n"
SAY = "The capital of France is Paris. The moon is made of green cheese."


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    """One daemon for all runs that leave it alive."""
    with box(tmp_path_factory.mktemp("box"), rules=[]) as machine:
        machine.start()
        machine.request("GET", "/healthz")
        yield machine


class Case:
    """A job of a test's own in the shared daemon, with a folder of documents that only it may read."""

    def __init__(self, machine: Box, name: str):
        self.machine = machine
        self.name = name
        self.docs = machine.docs / name
        self.docs.mkdir()
        self.grants = f'[grants]\ntools = ["knowledge_search"]\nfolders = ["../docs/{name}"]\n'

    def document(self, name: str = "france.md", text: str = "") -> Path:
        path = self.docs / name
        path.write_text(text or FRANCE)
        return path

    def run(self, job: str, rules: Rules) -> tuple[dict[str, Any], str]:
        """The run's end and its report."""
        self.machine.say(rules)
        self.machine.job(job, self.name)
        found = self.machine.run(self.name)
        return found, Path(found["report"]).read_text(encoding="utf-8")


@pytest.fixture
def case(daemon: Box, request: pytest.FixtureRequest) -> Case:
    return Case(daemon, re.sub(r"[^a-z0-9]+", "-", request.node.name.lower())[:60])


def call(tool: str, /, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


def test_claims_are_cited_and_what_nothing_supports_is_left_out(case: Case) -> None:
    case.document()
    found, text = case.run(case.grants + STEPS, [{"when": "", "say": SAY}])
    assert (found["state"], found["reason"]) == ("done", "")
    assert "2 of 2 verified" in text and "green cheese" not in text and "2 sentences of the model" in text
    assert "- The capital of France is Paris.\n  > “The capital of France is Paris.” (France)" in text
    assert "| Model | fake/model on FakeExecutionProvider |" in text
    folder = case.machine.folder / "state/runs" / found["run"]
    assert (folder / "report.md").read_text() == text == found["report_text"]
    assert {step["kind"] for step in json.loads((folder / "trace.json").read_text())} == {"tool", "model", "code"}
    assert json.loads((folder / "inputs.json").read_text())[0]["sha256"]
    model = [step for step in found["steps"] if step["kind"] == "model"]
    assert [step["step"] for step in model] == ["2.map.0", "3.reduce"]
    assert all(step["prompt_tokens"] and step["completion_tokens"] and step["seconds"] for step in model)
    assert model[0]["output"] == SAY and "river Seine" in json.dumps(model[0]["inputs"])


def test_where_nothing_is_supported_the_document_speaks_and_the_report_says_so(case: Case) -> None:
    case.document()
    found, text = case.run(case.grants + STEPS, [{"when": "", "say": "The moon is made of green cheese."}])
    assert found["state"] == "done" and "3 of 3 verified" in text and "green cheese" not in text
    assert "*Nothing the model said could be tied to the document; these are sentences of its own.*" in text
    assert "*Nothing the model said over all documents could be tied to them" in text
    assert text.count("> “The capital of France is Paris.”") == 2


def test_a_source_that_is_edited_before_the_check_is_unverified_in_place(case: Case) -> None:
    path = case.document()
    edited = FRANCE.replace("The capital of France is Paris.", "The capital of France is Lyon.")
    rules = [
        {"when": "Notes:", "say": "Paris lies on the river Seine.", "write": [str(path), edited]},
        {"when": "", "say": "The capital of France is Paris. Paris lies on the river Seine."},
    ]
    found, text = case.run(case.grants + STEPS, rules)
    assert found["state"] == "failed" and found["reason"] == "1 of 3 citations unverified"
    assert "- The capital of France is Paris. **[unverified: the quote is not in the source]**" in text
    assert text.count("unverified:") == 1 and "2 of 3 verified" in text and "**done**" not in text


@pytest.mark.parametrize("late", ["reduce", "agent"])
def test_what_is_said_after_the_check_is_checked_too(case: Case, late: str) -> None:
    path = case.document()
    edited = FRANCE.replace("The capital of France is Paris.", "The capital of France is Lyon.")
    steps = STEPS.replace('[[step]]\nkind = "reduce"\n', '[[step]]\nkind = "check"\n')
    steps += f'[[step]]\nkind = "{late}"\nprompt = "Say it"\n[[step]]\nkind = "write"\n'
    rules = [
        {"when": "Notes:", "say": "The capital of France is Paris.", "write": [str(path), edited]},
        {"when": "<<<", "say": "Paris lies on the river Seine."},
        {"when": "Say it", "say": call("knowledge_search", query="capital")},
        {"when": "", "say": "The capital of France is Paris.", "write": [str(path), edited]},
    ]
    found, text = case.run(case.grants + steps, rules)
    assert found["state"] == "failed" and found["reason"] == "1 of 2 citations unverified"
    assert "- The capital of France is Paris. **[unverified: the quote is not in the source]**" in text


def test_what_cannot_be_read_is_told_and_does_not_stop_the_rest(case: Case) -> None:
    case.document()
    (case.docs / "empty.md").write_text("")
    (case.docs / "broken.pdf").write_bytes(b"%PDF-1.7 nothing")
    grants = case.grants.replace(f'"../docs/{case.name}"', f'"../docs/{case.name}", "../gone"')
    found, text = case.run(grants + STEPS, [{"when": "", "say": SAY}])
    assert found["state"] == "done"
    for name in ("empty.md", "broken.pdf", "gone"):
        assert f"not read: {name}" in found["reason"] and name in text.split("## Not read")[1]


def test_a_missing_folder_alone_fails_with_a_report(case: Case) -> None:
    found, text = case.run(case.grants.replace("../docs", "../gone") + STEPS, [{"when": "", "say": SAY}])
    assert found["state"] == "failed" and found["reason"].startswith("no document could be read; not read: ")
    assert "## Not read" in text


def test_a_step_whose_tool_is_not_granted_fails(case: Case) -> None:
    found, text = case.run(STEPS, [])
    assert found["state"] == "failed" and 'denied: knowledge_search (the tool "knowledge_search"' in found["reason"]
    assert "`knowledge_search`, denied" in text


def test_a_tool_that_is_not_granted_is_refused_recorded_and_answered(case: Case) -> None:
    rules = [
        {"when": "Write it down", "say": call("write_report", name="a", text="b")},
        {"when": "refused: the tool", "say": call("teleport", to="x")},
        {"when": "refused: there is no tool", "say": call("calculator", expression="6*7")},
        {"when": "42", "say": "It is 42."},
    ]
    found, text = case.run('prompt = "Write it down"\n[grants]\ntools = ["calculator"]\n', rules)
    assert found["state"] == "done" and "It is 42." in text
    assert "nothing ties the answer to a source" in found["reason"]
    assert 'denied: write_report (the tool "write_report" is not granted' in found["reason"]
    assert "`write_report`, denied" in text and "`teleport`, failed" in text
    tools = [step for step in found["steps"] if step["kind"] == "tool"]
    assert [(step["inputs"]["tool"], step["denied"], step["output"]) for step in tools] == [
        ("write_report", True, None), ("teleport", False, None), ("calculator", False, 42.0),
    ]  # fmt: skip
    assert [path.name for path in Path(found["report"]).parent.iterdir()] == [f"{case.name}-2026-01-01T0000Z.md"]


def test_an_agents_answer_is_cited_from_what_it_found(case: Case) -> None:
    case.document()
    rules = [
        {"when": "Which capital", "say": call("knowledge_search", query="capital")},
        {"when": "Seine", "say": "The capital of France is Paris. I like it there."},
    ]
    (case.docs / "empty.md").write_text("")
    found, text = case.run(f'prompt = "Which capital?"\n{case.grants}', rules)
    assert found["reason"] == "not read: empty.md (empty: it has no content)"
    assert found["state"] == "done" and "1 of 1 verified" in text
    assert "> “The capital of France is Paris.” (france.md, France)" in text
    assert "## Said without a source\n\n- I like it there." in text


@pytest.mark.parametrize(
    ("budget", "reason"),
    [("tokens = 30", "the budget of 30 tokens is spent"), ("steps = 2", "the budget of 2 steps is spent")],
)
def test_a_spent_budget_ends_the_run_and_keeps_what_it_has(case: Case, budget: str, reason: str) -> None:
    for name in ("a.md", "b.md", "c.md"):
        case.document(name)
    found, text = case.run(f"{case.grants}[budget]\n{budget}\n{STEPS}", [{"when": "", "say": SAY}])
    assert found["state"] == "failed" and found["reason"] == reason
    assert "1 of 1 verified" in text


def test_a_model_that_is_too_slow_ends_with_the_budget_of_seconds(case: Case) -> None:
    case.document()
    found, _ = case.run(f"{case.grants}[budget]\nseconds = 0.5\n{STEPS}", [{"when": "", "say": SAY, "delay": 6.0}])
    assert found["state"] == "failed" and "no summary of france.md: the job's time is over" in found["reason"]
    assert found["seconds"] < 5


def appliance(machine: Box, *words: str) -> subprocess.CompletedProcess[str]:
    call = [sys.executable, "-m", "appliance", "job", *words]
    return subprocess.run(call, cwd=ROOT, env=machine.environment, text=True, capture_output=True, timeout=60)


def test_the_command_line_shows_what_happens(case: Case) -> None:
    machine, name = case.machine, case.name
    case.document()
    machine.say([{"when": "", "say": SAY}])
    machine.job(case.grants + STEPS, name)
    slot = ("--slot", "2026-01-02T00:00Z")
    done = appliance(machine, "run", name, *slot)
    assert done.returncode == 0 and f"{name}@2026-01-02T00:00Z: done" in done.stdout and "2.map.0" in done.stdout
    again = appliance(machine, "run", name, *slot)
    assert again.returncode == 0 and "asked for before" in again.stdout
    missing = appliance(machine, "run", name[:-1])
    assert missing.returncode == 2 and f'did you mean "{name}"?' in missing.stderr
    assert appliance(machine, "run", name, "--slot", "noon").returncode == 2
    entries = json.loads(appliance(machine, "ledger", name, "--json").stdout)["entries"]
    assert [entry["run"] for entry in entries] == [f"{name}@2026-01-02T00:00Z"]
    shown = appliance(machine, "show", f"{name}@2026-01-02T00:00Z")
    assert shown.returncode == 0 and f"# {name}" in shown.stdout
    assert json.loads(appliance(machine, "show", name, "--json").stdout)["grants"]["tools"] == ["knowledge_search"]
    machine.job(case.grants.replace("../docs", "../gone") + STEPS, name)
    assert appliance(machine, "run", name).returncode == 1


def test_a_stop_in_the_middle_is_quick_and_the_run_goes_on_after_it(tmp_path: Path) -> None:
    with box(tmp_path, pieces=50, delay=0.1) as machine:  # 20 s an answer
        (machine.docs / "france.md").write_text(FRANCE)
        machine.job(f'[grants]\ntools = ["knowledge_search"]\nfolders = ["../docs"]\n{STEPS}')
        machine.start()
        run = machine.request("POST", "/appliance/v1/jobs/digest/runs", {"slot": "2026-01-01T00:00Z"}).json()["run"]
        while not machine.request("GET", f"/appliance/v1/runs/{run}").json()["steps"][1:]:
            pass
        assert machine.end(signal.SIGTERM) == 0
        other = Box.__new__(Box)
        other.__dict__.update(machine.__dict__)
        other._words = ["tests.api.fake_daemon", "1", "0", "serve"]
        other.start()
        machine.process = other.process
        assert machine.wait(run)["state"] == "done"


@pytest.mark.slow
def test_the_daemons_clock_runs_what_falls_due(tmp_path: Path) -> None:
    with box(tmp_path) as machine:
        (machine.docs / "france.md").write_text(FRANCE)
        grants = '[grants]\ntools = ["knowledge_search"]\nfolders = ["../docs"]\n'
        machine.job(f'[schedule]\ncron = "* * * * *"\n{grants}{STEPS}')
        machine.start()
        end = time.monotonic() + 150
        entries: list[dict[str, Any]] = []
        while not any(entry["state"] == "done" for entry in entries):
            assert time.monotonic() < end, (entries, machine.log())
            entries = machine.request("GET", "/appliance/v1/ledger").json()["entries"]
            time.sleep(0.5)
        assert entries[-1]["trigger"] == "clock" and entries[-1]["state"] == "done"
        # The same slot asked for by a timer is the same run.
        again = machine.request("POST", "/appliance/v1/jobs/digest/runs", {"slot": entries[-1]["slot"]})
        assert again.status_code == 200 and again.json()["created"] is False


def test_a_second_daemon_on_the_same_state_is_refused(tmp_path: Path) -> None:
    with box(tmp_path) as machine:
        machine.start()
        machine.request("GET", "/healthz")
        text = (tmp_path / "appliance.toml").read_text()
        second = tmp_path / "second.toml"
        second.write_text(text.replace(str(tmp_path / "runtime"), str(tmp_path / "r2")))
        done = subprocess.run(
            [sys.executable, "-m", "tests.api.fake_daemon", "1", "0", "serve"], cwd=ROOT, text=True, capture_output=True,
            env={**machine.environment, "APPLIANCE_CONFIG": str(second)}, timeout=60,
        )  # fmt: skip
        assert done.returncode == 2 and "another daemon works on the jobs" in done.stderr
