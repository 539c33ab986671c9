"""The command line of the terminal: where it looks for a daemon, and what it refuses."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from appliance.config import Config, load_config
from tui.address import Address, default_addresses, parse_host

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:8420", Address("http://127.0.0.1:8420")),
        ("http://127.0.0.1:1", Address("http://127.0.0.1:1")),
        ("https://box.lan/", Address("https://box.lan")),
        ("box", Address("http://box:8420")),
        ("[::1]:9", Address("http://[::1]:9")),
        ("[::1]", Address("http://[::1]:8420")),
        ("unix:/run/appliance/appliance.sock", Address("http://appliance", Path("/run/appliance/appliance.sock"))),
        ("unix:///run/a b.sock", Address("http://appliance", Path("/run/a b.sock"))),
    ],
)
def test_hosts(text: str, address: Address) -> None:
    assert parse_host(text) == address


@pytest.mark.parametrize("text", ["", "unix:here.sock", "ftp://x", "x/y", "::1", "x:port", "a b", "http://", "x:1:2"])
def test_text_that_is_no_host(text: str) -> None:
    with pytest.raises(ValueError, match=r"write|brackets|port"):
        parse_host(text)


@pytest.mark.parametrize(
    "environment",
    [
        {"HOME": "/home/u"},
        {"HOME": "/home/u", "XDG_RUNTIME_DIR": "/run/user/1"},
        {"HOME": "/home/u", "XDG_STATE_HOME": "/state", "XDG_RUNTIME_DIR": "relative"},
    ],
    ids=["plain", "runtime", "state"],
)
def test_it_looks_where_a_daemon_without_settings_listens(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("appliance.config.SYSTEM_FILE", Path("/nonexistent/appliance.toml"))
    config: Config = load_config(environment=environment)
    socket, port = default_addresses(environment)
    assert socket.socket == config.socket_path
    assert port.url == f"http://{config.server.addresses[0]}"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    call = [sys.executable, "-m", "appliance", "tui", *words]
    return subprocess.run(call, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)


@pytest.mark.parametrize(("words", "names"), [((), "this needs a terminal"), (("--host", "x:y"), "the port, a number")])
def test_what_cannot_work_is_one_line_and_exit_2(words: tuple[str, ...], names: str) -> None:
    done = run(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert names in done.stderr and done.stderr.count("\n") == 1


def test_it_is_installed_as_a_verb() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["appliance.commands"]["tui"] == "tui.command:tui"
