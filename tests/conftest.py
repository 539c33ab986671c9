"""Fixtures of all tests: where the starter model is, and a home of its own for every test that reads settings."""

from pathlib import Path

import pytest

from demo.place import STARTER_VARIABLE, starter_candidates


@pytest.fixture(scope="session")
def starter_gguf() -> Path:
    """The starter model, SmolLM2-135M-Instruct as GGUF. A test that needs it fails without it; it never skips."""
    for path in starter_candidates():
        if path.is_file():
            return path
    pytest.fail(f"the starter model is not there; get it: make deps (or name a copy in {STARTER_VARIABLE})", pytrace=False)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that every command of the test uses: settings, models, cache and state lie in it."""
    folders = "\n".join(f'{key} = "{tmp_path / key}"' for key in ("models", "cache", "state", "runtime", "targets"))
    config = tmp_path / "appliance.toml"
    config.write_text(f"[paths]\n{folders}\n\n[server]\nsocket = false\n", encoding="utf-8")
    monkeypatch.setenv("APPLIANCE_CONFIG", str(config))
    return tmp_path


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which tests were not run: a green run must not pass for more than it was."""
    left_out = terminalreporter.stats.get("deselected", [])
    if left_out:
        terminalreporter.section(f"not run here: {len(left_out)} (make test-full runs them all)")
        for item in left_out:
            terminalreporter.line(item.nodeid)
