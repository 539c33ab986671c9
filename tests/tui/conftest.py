"""Fixtures of the terminal's tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.conftest import quiet_log
from tests.tui.fake_jobs import FakeJobs
from tests.tui.terminal import Box

__all__ = ["quiet_log"]


@pytest.fixture
def anyio_backend() -> str:
    """Textual runs on asyncio alone."""
    return "asyncio"


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    """A running daemon with jobs."""
    made = Box(tmp_path, jobs=FakeJobs())
    made.start()
    yield made
    made.stop()
