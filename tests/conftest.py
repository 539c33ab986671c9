"""Fixtures of all tests: where the starter model is, and a home of its own for every test that reads settings."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from demo.place import GEMMA, MINILM, STARTER, VARIABLES, candidates
from tests.starter import StarterBuilt, built_once


@pytest.fixture(scope="session")
def starter_gguf() -> Path:
    """The starter model, SmolLM2-135M-Instruct as GGUF. A test that needs it fails without it; it never skips."""
    return fetched(STARTER, "make deps")


@pytest.fixture(scope="session")
def starter_built(starter_gguf: Path, tmp_path_factory: pytest.TempPathFactory, testrun_uid: str) -> StarterBuilt:
    """The starter model in scheme w4a8, built once a run."""
    folder = tmp_path_factory.getbasetemp().parent / f"starter-{testrun_uid}"
    return built_once(folder, starter_gguf)


@pytest.fixture(scope="session")
def gemma_gguf() -> Path:
    """Gemma 3 270M as GGUF, whose vocabulary is a large SentencePiece one; only slow tests need it."""
    return fetched(GEMMA, "make deps-full")


@pytest.fixture(scope="session")
def minilm_folder() -> Path:
    """all-MiniLM-L6-v2 as sentence-transformers publishes it: the folder of its safetensors."""
    return fetched(MINILM, "make deps").parent


def fetched(model: str, how: str) -> Path:
    for path in candidates(model):
        if path.is_file():
            return path
    pytest.fail(f"the model {model} is not there; get it: {how} (or name a copy in {VARIABLES[model]})", pytrace=False)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that every command of the test uses: settings, models, cache and state lie in it."""
    folders = "\n".join(
        f'{key} = "{tmp_path / key}"' for key in ("models", "cache", "state", "runtime", "targets", "jobs", "reports")
    )
    config = tmp_path / "appliance.toml"
    config.write_text(f"[paths]\n{folders}\n\n[server]\nsocket = false\n", encoding="utf-8")
    monkeypatch.setenv("APPLIANCE_CONFIG", str(config))
    return tmp_path


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`make test` asks for nothing but Python: what needs a missing program of the system is left out, and listed as such.

    `make test-full` runs it, and so fails: there, tests/system-packages has brought the program.
    """
    if "not slow" not in config.option.markexpr:
        return
    left_out = [item for item in items for mark in item.iter_markers("program") if shutil.which(mark.args[0]) is None]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


class LeftOut:
    """Names of the tests that a marker or a word on the command line left out, gathered from the workers too."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        self.names |= {item.nodeid for item in items}

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)  # there only on a worker of pytest-xdist
        if output is not None:
            output["left_out"] = sorted(self.names)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.names |= set(getattr(node, "workeroutput", {}).get("left_out", ()))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """A green run must not pass for more than it was."""
        if self.names:
            terminalreporter.section(f"not run here: {len(self.names)} (make test-full runs all)")
            for name in sorted(self.names):
                terminalreporter.line(name)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(LeftOut(), "left-out")
