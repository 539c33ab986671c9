"""What the service manager hears from a daemon process, from its start to its stop, and when a decode loop hangs."""

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from appliance.notify import Notifier, Watchdog, read_notifier
from tests.api.fake_engine import install_bundle
from tests.systemd.notify_socket import Manager, manager
from tests.test_daemon import ROOT, settings

WATCHDOG_SECONDS = 4.0
FED = "WATCHDOG=1"


@contextlib.contextmanager
def watched_daemon(folder: Path, *, install: bool = True) -> Iterator[tuple["subprocess.Popen[bytes]", Manager]]:
    """A daemon process under a service manager that watches it."""
    if install:
        install_bundle(folder / "models")
    with manager(folder) as heard:
        environment = settings(folder) | {
            "NOTIFY_SOCKET": heard.address,
            "WATCHDOG_USEC": str(int(WATCHDOG_SECONDS * 1e6)),
        }
        call = [sys.executable, "-m", "tests.systemd.hanging_daemon", "serve"]
        process = subprocess.Popen(call, cwd=ROOT, env=environment, stdout=subprocess.PIPE)
        try:
            yield process, heard
        finally:
            process.kill()
            process.communicate()


def client(folder: Path) -> httpx.Client:
    """A client on the daemon's Unix socket."""
    return httpx.Client(
        transport=httpx.HTTPTransport(uds=str(folder / "runtime" / "appliance.sock")), base_url="http://appliance", timeout=30
    )


def question(text: str) -> dict[str, object]:
    return {"model": "fake/model", "messages": [{"role": "user", "content": text}], "max_tokens": 3, "temperature": 0}


def test_a_run_as_the_service_manager_hears_it(tmp_path: Path) -> None:
    with watched_daemon(tmp_path) as (process, heard):
        assert heard.listen(30, lambda one: one == "READY=1")
        assert heard.heard[0][1] == "STATUS=loading the default model"
        assert heard.heard[-1][1] == "STATUS=serving fake/model on FakeExecutionProvider"
        with client(tmp_path) as http:
            assert http.get("/readyz").json() == {"status": "ready", "model": "fake/model"}  # at the very moment of READY
            heard.listen(WATCHDOG_SECONDS + 1)  # idle all the time
            assert http.post("/v1/chat/completions", json=question("x")).is_success
        assert longest_pause(heard) < WATCHDOG_SECONDS
        process.send_signal(signal.SIGTERM)
        assert heard.listen(10, lambda one: one == "STATUS=stopping")
        assert heard.heard[-2][1] == "STOPPING=1"
        assert process.wait(10) == 0


def longest_pause(heard: Manager) -> float:
    """Seconds of the longest time without food."""
    fed = [*heard.times(FED), time.monotonic()]
    return max(later - earlier for earlier, later in itertools.pairwise(fed))


def test_a_decode_loop_that_hangs_starves_the_watchdog(tmp_path: Path) -> None:
    with watched_daemon(tmp_path) as (process, heard):
        assert heard.listen(30, lambda one: one == "READY=1")
        with client(tmp_path) as http, pytest.raises(httpx.ReadTimeout):
            http.post("/v1/chat/completions", json=question("hang"), timeout=1)
        heard.listen(1.5)  # what was sent before it hung
        fed = len(heard.times(FED))
        assert heard.listen(WATCHDOG_SECONDS, lambda one: one.startswith("STATUS=")) == "STATUS=stuck: fake/model"
        assert len(heard.times(FED)) == fed
        with client(tmp_path) as http:
            assert http.get("/healthz").is_success  # the event loop alone would have fed it
        assert process.poll() is None


def test_a_long_prefill_is_no_hanging_loop(tmp_path: Path) -> None:
    with watched_daemon(tmp_path) as (_, heard), client(tmp_path) as http:
        assert heard.listen(30, lambda one: one == "READY=1")
        with ThreadPoolExecutor(1) as aside:
            answer = aside.submit(http.post, "/v1/chat/completions", json=question("long " * 9))
            heard.listen(WATCHDOG_SECONDS + 1)
            assert not answer.done()
            heard.listen(1.5)
            assert longest_pause(heard) < WATCHDOG_SECONDS
            assert answer.result().is_success


def test_ready_without_a_model_says_so(tmp_path: Path) -> None:
    with watched_daemon(tmp_path, install=False) as (_, heard):
        assert heard.listen(30, lambda one: one == "READY=1")
        assert heard.heard[-1][1].startswith("STATUS=serving without a default model: no model is installed in ")
        assert heard.listen(WATCHDOG_SECONDS, lambda one: one == FED)


@pytest.mark.parametrize("address", ["file", "abstract"])
def test_both_kinds_of_sockets(address: str, tmp_path: Path) -> None:
    where = str(tmp_path / "s") if address == "file" else f"@appliance-test-{os.getpid()}-{time.monotonic_ns()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(where.replace("@", "\0") if address == "abstract" else where)
        Notifier(where).send("READY=1", "STATUS=two\nlines")
        bound.settimeout(5)
        assert bound.recv(100) == b"READY=1\nSTATUS=two lines"


def test_a_service_manager_that_is_gone_is_logged_and_no_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Notifier(str(tmp_path / "gone")).send("READY=1")
    assert "the service manager was not reached" in capsys.readouterr().out
    Notifier("").send("READY=1")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Notifier()),
        ({"NOTIFY_SOCKET": "/s"}, Notifier("/s")),
        ({"NOTIFY_SOCKET": "/s", "WATCHDOG_USEC": "1500000"}, Notifier("/s", 1.5)),
        ({"NOTIFY_SOCKET": "/s", "WATCHDOG_USEC": "1500000", "WATCHDOG_PID": str(os.getpid())}, Notifier("/s", 1.5)),
        ({"NOTIFY_SOCKET": "/s", "WATCHDOG_USEC": "1500000", "WATCHDOG_PID": "1"}, Notifier("/s")),
        ({"NOTIFY_SOCKET": "/s", "WATCHDOG_USEC": "soon"}, Notifier("/s")),
    ],
)
def test_what_the_environment_says(environment: dict[str, str], expected: Notifier) -> None:
    assert read_notifier(environment) == expected


def test_every_loop_must_move_between_two_feedings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ticks: dict[str, int] = {}
    now = [0.0]
    with manager(tmp_path) as heard:
        watchdog = Watchdog(Notifier(heard.address, 10.0), lambda: ticks, lambda: now[0])

        def look() -> list[str]:
            before = len(heard.heard)
            watchdog.look()
            heard.listen(0.05)
            return [one for _, one in heard.heard[before:]]

        assert look() == [FED]  # no model is loaded
        ticks.update(a=5)
        assert look() == [FED]  # seen for the first time
        assert look() == []
        ticks.update(a=6, b=0)
        assert look() == [FED]
        now[0] = 4.9
        ticks.update(a=7)
        assert look() == []  # b has not moved
        now[0] = 5.1
        assert look() == ["STATUS=stuck: b"]
        assert look() == []  # said once
        assert '"b"' in (said := capsys.readouterr().out) or "'b'" in said
        ticks.update(b=1)
        assert look() == [FED]  # a had moved since it was fed, b has now
        del ticks["b"]
        ticks.update(a=8)
        assert look() == [FED]  # unloaded
