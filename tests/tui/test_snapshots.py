"""How the screens look, against a real daemon: pictures that were looked at once, and must not change unseen.

`pytest tests/tui/test_snapshots.py --snapshot-update` takes them anew; look at each before it is committed.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from textual.pilot import Pilot

from tests.tui.fake_jobs import RUN
from tests.tui.terminal import Box, make_app, see, until, write
from tui.widgets.composer import Composer

Steps = Callable[[Pilot[None]], Awaitable[None]]
Compare = Callable[..., bool]
SIZES = {"80x24": (80, 24), "140x40": (140, 40)}
ANSWER = (
    "# Valves\n\n", "Turn the *left* one, then the **right** one:\n\n", "1. close `A`\n", "2. open `B`\n\n",
    "```python\nclose(A)\nopen(B)\n```\n\n", "| valve | state |\n|---|---|\n| A | closed |\n| B | open |\n",
)  # fmt: skip


async def chat(pilot: Pilot[None]) -> None:
    """Two conversations, one open."""
    await write(pilot, "What is the capital of France?")
    await see(pilot, "context 12 (12%)")
    await pilot.press("ctrl+n")
    await write(pilot, "Which valve first?")
    await see(pilot, "context 9 (9%)")
    await until(pilot, lambda: len(pilot.app.screen.query("ConversationList").first().options) == 2)
    await still(pilot)


async def still(pilot: Pilot[None]) -> None:
    """Nothing blinks."""
    pilot.app.screen.query_one(Composer).cursor_blink = False
    await pilot.pause(0.1)


async def conversations(pilot: Pilot[None]) -> None:
    await chat(pilot)
    await pilot.press("ctrl+l")
    await see(pilot, "▌Which valve first?")


async def help_(pilot: Pilot[None]) -> None:
    await see(pilot, "FakeExecutionProvider")
    await still(pilot)
    await pilot.press("f1")
    await see(pilot, "Keys")


async def jobs(pilot: Pilot[None]) -> None:
    await pilot.press("ctrl+t")
    await see(pilot, "missed", "mail2.toml")


async def trace(pilot: Pilot[None]) -> None:
    await jobs(pilot)
    await pilot.press("tab", "enter")
    await see(pilot, "3.agent.read", RUN)


async def report(pilot: Pilot[None]) -> None:
    await trace(pilot)
    await pilot.press("p")
    await see(pilot, "The valve is turned to the left.")
    await pilot.pause(0.1)


def look(compare: Compare, url: str, steps: Steps, size: str, theme: str = "textual-dark") -> bool:
    """Take the picture and compare it."""
    app = make_app(url)
    app.theme = theme

    async def before(pilot: Pilot[None]) -> None:
        await steps(pilot)

    return compare(app, terminal_size=SIZES[size], run_before=before)


@pytest.mark.parametrize("theme", ["textual-dark", "textual-light"])
@pytest.mark.parametrize("size", SIZES)
def test_chat(box: Box, snap_compare: Compare, size: str, theme: str) -> None:
    box.engine.pieces = ANSWER
    assert look(snap_compare, box.url, chat, size, theme)


def test_conversations(box: Box, snap_compare: Compare) -> None:
    box.engine.pieces = ANSWER
    assert look(snap_compare, box.url, conversations, "80x24")


def test_help(box: Box, snap_compare: Compare) -> None:
    assert look(snap_compare, box.url, help_, "80x24")


@pytest.mark.parametrize("size", SIZES)
def test_jobs(box: Box, snap_compare: Compare, size: str) -> None:
    assert look(snap_compare, box.url, jobs, size)


@pytest.mark.parametrize("size", SIZES)
def test_trace(box: Box, snap_compare: Compare, size: str) -> None:
    assert look(snap_compare, box.url, trace, size)


def test_report(box: Box, snap_compare: Compare) -> None:
    assert look(snap_compare, box.url, report, "80x24")


def test_light_jobs(box: Box, snap_compare: Compare) -> None:
    assert look(snap_compare, box.url, jobs, "140x40", "textual-light")


@pytest.mark.parametrize("size", SIZES)
def test_no_daemon(tmp_path: Path, snap_compare: Compare, size: str) -> None:
    async def steps(pilot: Pilot[None]) -> None:
        await see(pilot, "no daemon answers")
        await write(pilot, "a draft that stays", send=False)
        await still(pilot)

    assert look(snap_compare, "unix:/nonexistent/appliance.sock", steps, size)
