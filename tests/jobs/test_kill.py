"""kill -9 of the daemon in the middle of a job, again and again: one finished report, every side effect once."""

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.box import Box, Counted, box, counter

RUN = "digest@2026-01-01T00:00Z"
STEPS = ["search", "map", "notify", "reduce", "notify", "check", "write", "notify"]


def write_job(machine: Box, url: str) -> None:
    for at in range(4):
        (machine.docs / f"{at}.md").write_text(f"# Town {at}\n\nThe capital of France is Paris.\n\nTown {at} is smaller.\n")
    more = {"search": 'query = "capital"', "notify": f'url = "{url}"'}
    steps = "".join(f'[[step]]\nkind = "{kind}"\n{more.get(kind, "")}\n' for kind in STEPS)
    grants = f'[grants]\ntools = ["knowledge_search", "notify"]\nfolders = ["../docs"]\nurls = ["{url}"]\n'
    machine.job(f"{grants}{steps}")


def kill_often(machine: Box, counted: Counted, kills: int, random_: random.Random) -> None:
    """Kill at moments from before the socket is bound to after the last step, then let the run come to its end."""
    write_job(machine, counted.url)
    machine.start()
    machine.request("POST", "/appliance/v1/jobs/digest/runs", {"slot": "2026-01-01T00:00Z"})
    for _ in range(kills):
        time.sleep(random_.uniform(0, 0.6))
        machine.end()
        machine.start()
        if random_.random() < 0.9:
            machine.request("GET", "/healthz")
    found = machine.wait(RUN)
    assert found["state"] == "done" and found["reason"] == "", found
    reports = list((machine.folder / "reports").rglob("*"))
    assert [path.name for path in reports if path.is_file()] == ["digest-2026-01-01T0000Z.md"]
    text = Path(found["report"]).read_text()
    assert "5 of 5 verified" in text and "**done**" in text
    assert [entry["run"] for entry in machine.request("GET", "/appliance/v1/ledger").json()["entries"]] == [RUN]
    # Counted outside: each effect under one key; a post is made again only when a kill came before its record.
    assert set(counted.posts) == {f"{RUN}/{at}.notify" for at in (3, 5, 8)}
    assert sum(counted.posts.values()) <= 3 + kills
    calls = [step["step"] for step in found["steps"]]
    assert len(calls) == len(set(calls)) == 13, calls
    asked = [line for line in machine.logged("request") if line["path"] == "/v1/chat/completions"]
    assert len(asked) <= 5 + kills  # finished answers are never asked for again


@pytest.mark.slow
def test_a_killed_agent_goes_on_with_its_conversation(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    random_ = random.Random(seed)

    def call(tool: str, **arguments: Any) -> str:
        return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"

    with counter() as counted:
        rules = [
            {"when": "Add up", "say": call("calculator", expression="1+1"), "delay": 0.2},
            {"when": "2.0", "say": call("notify", url=counted.url, text="two"), "delay": 0.2},
            {"when": "200", "say": call("write_report", name="note", text="It is two.") + call("list_folder"), "delay": 0.2},
            {"when": "docs", "say": "It is two.", "delay": 0.2},
        ]
        with box(tmp_path, rules=rules) as machine:
            tools = '["calculator", "notify", "write_report", "list_folder"]'
            grants = f'[grants]\ntools = {tools}\nurls = ["{counted.url}"]\nfolders = ["../docs"]\n'
            machine.job(f'prompt = "Add up"\n{grants}')
            machine.start()
            machine.request("POST", "/appliance/v1/jobs/digest/runs", {"slot": "2026-01-01T00:00Z"})
            for _ in range(3):
                time.sleep(random_.uniform(0, 1.5))
                machine.end()
                machine.start()
                machine.request("GET", "/healthz")
            found = machine.wait(RUN)
        assert (found["state"], found["reason"]) == ("done", "nothing ties the answer to a source")
        assert [step["step"].split(".", 2)[2] for step in found["steps"][:8]] == [
            "model.1", "tool.0.calculator", "model.2", "tool.1.notify", "model.3",
            "tool.2.write_report", "tool.3.list_folder", "model.4",
        ]  # fmt: skip
        assert list(counted.posts) == [f"{RUN}/1.agent.tool.1.notify"]
        names = sorted(path.name for path in (tmp_path / "reports").rglob("*.md"))
        assert names == ["digest-2026-01-01T0000Z-note.md", "digest-2026-01-01T0000Z.md"]


@pytest.mark.parametrize("kills", [8, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_at_random_moments_it_finishes_once(tmp_path: Path, kills: int) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    with counter() as counted, box(tmp_path, delay=0.03) as machine:
        kill_often(machine, counted, kills, random.Random(seed))
