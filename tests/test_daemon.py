"""The daemon as a process: addresses, signals, exit codes, logs."""

import contextlib
import json
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

from appliance.config import parse_address
from appliance.daemon import bind, check_addresses, describe
from appliance.errors import ConfigError
from tests.api.conftest import make_config
from tests.api.fake_engine import install_bundle

ROOT = Path(__file__).parents[1]


def settings(folder: Path, listen: str = "127.0.0.1:0", more: str = "") -> dict[str, str]:
    """An environment whose appliance lives in `folder`."""
    names = ("models", "cache", "state", "runtime", "targets", "jobs", "reports")
    paths = "".join(f'{name} = "{folder / name}"\n' for name in names)
    file = folder / "appliance.toml"
    file.write_text(f'[server]\nlisten = ["{listen}"]\nstop_seconds = 1\n{more}\n[paths]\n{paths}')
    return {**os.environ, "APPLIANCE_CONFIG": str(file), "PYTHONWARNINGS": "error"}


def command(*words: str, pieces: int = 1, delay: float = 0.0) -> list[str]:
    return [sys.executable, "-m", "tests.api.fake_daemon", str(pieces), str(delay), *words]


@contextlib.contextmanager
def daemon(
    environment: dict[str, str], *words: str, pieces: int = 1, delay: float = 0.0
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A daemon process and its URL; killed if the test has not stopped it."""
    process = subprocess.Popen(
        command("serve", *words, pieces=pieces, delay=delay), cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        line = json.loads(process.stdout.readline())
        assert line["event"] == "listening"
        yield process, line["address"]
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    install_bundle(tmp_path / "models")
    return settings(tmp_path)


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly(environment: dict[str, str], tmp_path: Path, sign: signal.Signals) -> None:
    with daemon(environment) as (process, url):
        assert httpx.get(f"{url}/healthz").status_code == 200
        path = tmp_path / "runtime" / "appliance.sock"
        assert path.is_socket() and path.stat().st_mode & 0o777 == 0o600
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
            assert client.get("http://appliance/healthz").json() == {"status": "ok"}
        process.send_signal(sign)
        out, _ = process.communicate(timeout=30)
        assert process.returncode == 0
        assert not path.exists()
        events = [json.loads(line)["event"] for line in out.splitlines()]  # every line is an object, on every path
        assert events[-2:] == ["stopping", "stopped"] and "model loaded" in events


def test_a_stop_does_not_wait_for_an_endless_answer(environment: dict[str, str]) -> None:
    with daemon(environment, pieces=10_000, delay=0.01) as (process, url):
        body = {"model": "", "messages": [{"role": "user", "content": "x"}], "stream": True}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            start = time.monotonic()
            process.terminate()
            rest = [line for line in lines if line]
        out, _ = process.communicate(timeout=30)
        assert process.returncode == 0
        assert time.monotonic() - start < 4  # stop_seconds is 1
        assert "the daemon stops" in rest[-1], "the client is told why its answer ends"
        logged = [json.loads(line) for line in out.splitlines()]
        assert not [line for line in logged if "exception" in line], "a stop is no fault, and leaves no trace in the log"


def test_a_stop_refuses_an_endless_answer_that_has_not_begun(environment: dict[str, str]) -> None:
    with daemon(environment, pieces=10_000, delay=0.01) as (process, url):
        body = {"model": "", "messages": [{"role": "user", "content": "x"}]}
        with ThreadPoolExecutor() as pool:
            asked = pool.submit(httpx.post, f"{url}/v1/chat/completions", json=body, timeout=20)
            time.sleep(1)
            process.terminate()
            answer = asked.result()
        out, _ = process.communicate(timeout=30)
        assert answer.status_code == 503 and "the daemon stops" in answer.json()["error"]["message"]
        assert process.returncode == 0
        assert not [line for line in map(json.loads, out.splitlines()) if "exception" in line]


def test_a_port_that_is_taken_is_one_line_and_code_2(environment: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = subprocess.run(
            command("serve", "--port", str(port)), cwd=ROOT, env=environment, text=True, capture_output=True, timeout=20
        )
    assert done.returncode == 2
    assert done.stderr == (
        f"appliance: 127.0.0.1:{port} is taken by another program; "
        "stop that one or choose another: appliance serve --port NUMBER\n"
    )
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--host", "0.0.0.0"], "0.0.0.0:0 can be reached from other machines, and this appliance has no keys yet"),
        (["--model", "gone"], 'there is no model "gone" here; installed: fake/model'),
        (["--host", "no such host"], "can be reached from other machines"),
    ],
)
def test_what_cannot_be_served_is_one_line_and_code_2(environment: dict[str, str], words: list[str], says: str) -> None:
    done = subprocess.run(command("serve", *words), cwd=ROOT, env=environment, text=True, capture_output=True, timeout=20)
    assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1


def test_a_second_daemon_does_not_take_over_the_socket(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with contextlib.ExitStack() as first:
        bind(config, first)
        with contextlib.ExitStack() as second, pytest.raises(ConfigError, match="another daemon answers on"):
            bind(config, second)
        assert config.socket_path.is_socket()
    assert not config.socket_path.exists()


def test_a_socket_left_by_a_killed_daemon_is_replaced(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    config.paths.runtime.mkdir()
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(config.socket_path))
    with contextlib.ExitStack() as cleanup:
        assert [describe(one).split(":")[0] for one in bind(config, cleanup)] == ["http", "unix"]
    config.socket_path.write_text("mine")
    with contextlib.ExitStack() as cleanup, pytest.raises(ConfigError, match="is no socket"):
        bind(config, cleanup)
    assert config.socket_path.read_text() == "mine"


def test_only_loopback_addresses(tmp_path: Path) -> None:
    check_addresses([parse_address("127.0.0.1:1"), parse_address("[::1]:1"), parse_address("localhost:1")])
    for text in ("0.0.0.0:1", "192.168.0.9:1", "[::]:1"):
        with pytest.raises(ConfigError, match="no keys"):
            check_addresses([parse_address(text)])


def test_importing_the_verbs_is_free() -> None:
    """Only when a verb runs does it pull in the HTTP stack or the engine."""
    heavy = ("fastapi", "uvicorn", "httpx", "onnxruntime", "numpy", "structlog")
    code = f"import sys, appliance.commands.serve, appliance.commands.chat; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, check=True)
    assert done.stdout.strip() == "[]"
