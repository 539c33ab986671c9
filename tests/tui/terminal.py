"""What the tests of the terminal share: a daemon to talk to, an application without a real terminal, waiting, reading.

Knows: how a screen's text is read. Does not know: what should stand in it.
"""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from textual.app import App
from textual.pilot import Pilot

from appliance.daemon import Daemon
from appliance.engine.pool import ModelPool
from tests.api.conftest import make_config, running
from tests.api.fake_engine import FakeEngine, install_bundle
from tests.tui.fake_jobs import FakeJobs
from tui.address import parse_host
from tui.app import ApplianceApp
from tui.client import Client
from tui.widgets.composer import Composer


class Ticks:
    """A clock that moves on by a twentieth of a second whenever it is read."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        self._now += 0.05
        return self._now


class Box:
    """A real daemon on a real port, over a fake engine, that can be stopped and started again at the same address."""

    def __init__(self, folder: Path, engine: FakeEngine | None = None, jobs: FakeJobs | None = None):
        self.engine = engine or FakeEngine()
        self.jobs = jobs
        self._folder = folder
        self._listen = "127.0.0.1:0"
        self._life = contextlib.ExitStack()
        install_bundle(folder / "models")

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{self._listen}"

    def start(self) -> None:
        """Start it, the second time on the port of the first."""
        config = make_config(self._folder, listen=[self._listen])
        pool = ModelPool(config.paths.models, lambda bundle: self.engine)
        url = self._life.enter_context(running(Daemon(config, pool, jobs=self.jobs)))  # type: ignore[arg-type]
        self._listen = url.removeprefix("http://")

    def stop(self) -> None:
        """Stop it."""
        self._life.close()


def make_app(url: str) -> ApplianceApp:
    """The application as a client of `url`, its clock frozen but for what it reads."""
    return ApplianceApp(Client((parse_host(url),)), Ticks())


async def until(pilot: Pilot[None], true: Callable[[], object], seconds: float = 10.0) -> None:
    """Let the application run until something holds; fails with the screen's text when it does not in time."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, seen(pilot.app)
        await pilot.pause(0.02)


async def see(pilot: Pilot[None], *texts: str, seconds: float = 10.0) -> None:
    """Wait until every text stands on the screen."""
    await until(pilot, lambda: all(text in seen(pilot.app) for text in texts), seconds)
    await pilot.pause()


async def write(pilot: Pilot[None], text: str, send: bool = True) -> None:
    """Put a text into the composer, and send it off."""
    pilot.app.screen.query_one(Composer).insert(text)
    await pilot.press(*(["enter"] if send else []))


def draft(app: App[None]) -> str:
    """What stands in the composer."""
    return app.screen.query_one(Composer).text


def seen(app: App[None]) -> str:
    """The text of the screen on top, one line a row, as a person reads it; what it covers is not in it."""
    return "\n".join(strip.text.rstrip() for strip in app.screen._compositor.render_strips())
