"""Which slot the demo runs, and what it makes of the ends there are. The commands themselves are played."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from demo import run as demo
from demo.run import Failed, build_embedder, work

DUE, NOW = "nightly-digest@2026-11-30T02:30Z", "nightly-digest@2026-11-30T13:07Z"


def play(monkeypatch: pytest.MonkeyPatch, *ends: tuple[int, str]) -> list[tuple[str, ...]]:
    """Let `appliance job run` end so, one after another; gives the list of what was asked."""
    asked: list[tuple[str, ...]] = []
    left = list(ends)

    def follow(config: Path, *arguments: str) -> tuple[int, str]:
        asked.append(arguments[3:])
        return left.pop(0)

    def run(config: Path, *arguments: str, quiet: bool = False) -> str:
        rows: Sequence[dict[str, str]] = [{"run": NOW, "report": "now.md"}, {"run": DUE, "report": "due.md"}]
        return json.dumps({"entries": rows}) if arguments[0] == "job" else ""

    monkeypatch.setattr(demo, "follow", follow)
    monkeypatch.setattr(demo, "run", run)
    return asked


@pytest.mark.parametrize("said", [f"{DUE}\n", f"{DUE} was asked for before; this is the same run\n"])
def test_the_slot_that_fell_due_runs_once(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    asked = play(monkeypatch, (0, f"{said}{DUE}: done\n"))
    assert work(Path("config"))["report"] == "due.md"
    assert asked == [("--slot", "due")]


@pytest.mark.parametrize("code", [1, 3])
def test_a_slot_that_came_to_nothing_before_is_followed_by_one_of_this_minute(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    asked = play(monkeypatch, (code, f"{DUE} was asked for before; this is the same run\n"), (0, f"{NOW}\n"))
    assert work(Path("config"))["report"] == "now.md"
    assert asked == [("--slot", "due"), ()]


def test_a_job_that_fails_now_fails_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, (1, f"{DUE}\n{DUE}: failed\n"))
    with pytest.raises(Failed, match="did not get done"):
        work(Path("config"))


def test_without_an_embedding_model_the_demo_goes_on_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(config: Path, *arguments: str, quiet: bool = False) -> str:
        raise Failed

    monkeypatch.setattr(demo, "run", run)
    build_embedder(Path("config"))
    assert "found by their words alone" in capsys.readouterr().out
