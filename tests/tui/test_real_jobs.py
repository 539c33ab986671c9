"""The jobs' screens against a daemon process that really works through a job, and is killed in the middle of it."""

from pathlib import Path

import pytest

from tests.jobs.box import box
from tests.tui.terminal import make_app, see, seen, until

pytestmark = pytest.mark.anyio
SIZE = (140, 40)
JOB = """
description = "what the papers say"

[[step]]
kind = "search"
query = "capital river"
[[step]]
kind = "map"
[[step]]
kind = "reduce"

[grants]
tools = ["knowledge_search"]
folders = ["../docs"]
"""
SAY = [{"when": "", "say": "The capital of France is Paris.", "delay": 0.5}]


async def test_run_a_job_kill_the_daemon_read_the_report(tmp_path: Path) -> None:
    with box(tmp_path, rules=SAY) as machine:
        machine.docs.joinpath("france.md").write_text("# France\n\nThe capital of France is Paris.\n")
        machine.job(JOB)
        machine.start()
        machine.request("GET", "/healthz")
        app = make_app(f"unix:{machine.socket}")
        async with app.run_test(size=SIZE) as pilot:
            await pilot.press("ctrl+t")
            await see(pilot, "digest", "when asked", "never")
            await pilot.press("r")
            await see(pilot, "▶ running", seconds=20)
            machine.end()  # kill -9
            await see(pilot, "has gone", "appliance serve", seconds=20)
            machine.start()
            machine.request("GET", "/healthz")
            await pilot.press("ctrl+r")
            await see(pilot, "✓ done", seconds=60)
            assert "has gone" not in seen(app)
            await pilot.press("tab", "enter")
            await see(pilot, "digest@", "1.search", "model", "FakeExecutionProvider", "report: ")
            await pilot.press("p")
            await until(pilot, lambda: "The capital of France is Paris." in seen(app) and "france.md" in seen(app))
