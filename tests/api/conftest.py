"""A real daemon on a real port, over fake engines."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
import structlog

from appliance.config import Config, Log, Models, Paths, Server
from appliance.daemon import Daemon
from appliance.engine.pool import ModelPool
from tests.api.fake_engine import FakeEngine, install_bundle, wait_until


@dataclass
class Served:
    """A running daemon with the clients of a test."""

    url: str
    http: httpx.Client
    openai: openai.OpenAI
    engine: FakeEngine
    pool: ModelPool
    config: Config

    def chat(self, **fields: object) -> httpx.Response:
        """Post a request; model and messages are there unless given."""
        body = {"model": "fake/model", "messages": [{"role": "user", "content": "hello there"}], **fields}
        return self.http.post("/v1/chat/completions", json=body)


Serve = Callable[..., Served]


def make_config(folder: Path, **server: object) -> Config:
    """Settings whose folders are all below `folder`; any free port."""
    names = ("models", "cache", "state", "runtime", "targets", "jobs", "reports")
    paths = Paths(**{name: folder / name for name in names})
    return Config(
        paths=paths,
        server=Server.model_validate({"listen": ["127.0.0.1:0"], "stop_seconds": 2, **server}),
        models=Models(aliases={"gpt-4o-mini": "fake/model"}),
        log=Log(level="error"),
    )


@contextlib.contextmanager
def running(daemon: Daemon) -> Iterator[str]:
    """Run `daemon` on a thread; gives its first URL."""
    thread = threading.Thread(target=daemon.run)
    thread.start()
    try:
        assert wait_until(lambda: daemon.addresses)
        yield daemon.addresses[0]
    finally:
        daemon.stop()
        thread.join(10)
        assert not thread.is_alive()


@pytest.fixture(autouse=True)
def quiet_log() -> Iterator[None]:
    """Errors only, as plain text; what was configured before is put back."""
    plain = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[plain], wrapper_class=structlog.make_filtering_bound_logger("error"))
    yield
    structlog.reset_defaults()


def start_daemon(cleanup: contextlib.ExitStack, folder: Path, engine: FakeEngine | None = None, **server: object) -> Served:
    """A daemon over `engine` and the bundles in `folder`, stopped by `cleanup`."""
    engine = engine or FakeEngine()
    config = make_config(folder, **server)
    pool = ModelPool(config.paths.models, lambda bundle: engine, aliases=config.models.aliases)
    url = cleanup.enter_context(running(Daemon(config, pool)))
    http = cleanup.enter_context(httpx.Client(base_url=url, timeout=10))
    client = cleanup.enter_context(openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=10))
    return Served(url, http, client, engine, pool, config)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Start daemons; each is stopped when the test ends."""
    with contextlib.ExitStack() as cleanup:

        def start(engine: FakeEngine | None = None, install: bool = True, **server: object) -> Served:
            if install:
                install_bundle(tmp_path / "models")
            return start_daemon(cleanup, tmp_path, engine, **server)

        yield start


@pytest.fixture(scope="module")
def shared_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One daemon for the tests of a file that leave no trace in it."""
    folder = tmp_path_factory.mktemp("appliance")
    install_bundle(folder / "models")
    with contextlib.ExitStack() as cleanup:
        yield start_daemon(cleanup, folder)
