"""A machine of a test's own: folders, a daemon process over the fake engine, and a counter of side effects outside it."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

from tests.api.fake_engine import install_bundle

ROOT = Path(__file__).parents[2]
Rules = list[dict[str, Any]]
NAMES = ("models", "cache", "state", "runtime", "targets", "jobs", "reports")


@dataclass
class Counted:
    """What a receiver that honours idempotency keys saw."""

    url: str
    posts: Counter[str] = field(default_factory=Counter)  # by key, repetitions included


@contextlib.contextmanager
def counter() -> Iterator[Counted]:
    """A server that counts what is posted to it."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            counted.posts[self.headers["idempotency-key"]] += 1
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        counted = Counted(f"http://127.0.0.1:{server.server_address[1]}/effects")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield counted
        finally:
            server.shutdown()
            thread.join()


class Box:
    """One appliance.

    Args:
        folder: where everything of it lies.
        pieces: how often the engine says its sentence.
        delay: seconds before each piece.
        rules: instead of both: see `tests.jobs.scripted_daemon`.
    """

    def __init__(self, folder: Path, pieces: int = 1, delay: float = 0.0, rules: Rules | None = None):
        self.folder = folder
        self.docs = folder / "docs"
        self.socket = folder / "runtime" / "appliance.sock"
        self._words = ["tests.api.fake_daemon", str(pieces), str(delay), "serve"]
        if rules is not None:
            self.say(rules)
            self._words = ["tests.jobs.scripted_daemon", str(folder / "rules.json"), "serve"]
        self.process: subprocess.Popen[bytes] | None = None
        for name in ("docs", "jobs"):
            (folder / name).mkdir(parents=True)
        install_bundle(folder / "models")
        paths = "".join(f'{name} = "{folder / name}"\n' for name in NAMES)
        file = folder / "appliance.toml"
        file.write_text(f"[server]\nlisten = []\nstop_seconds = 1\n\n[paths]\n{paths}")
        self.environment = {**os.environ, "APPLIANCE_CONFIG": str(file)}

    def job(self, text: str, name: str = "digest") -> None:
        """Put a job file there."""
        (self.folder / "jobs" / f"{name}.toml").write_text(f'name = "{name}"\n{text}', encoding="utf-8")

    def say(self, rules: Rules) -> None:
        """What the engine answers from now on."""
        (self.folder / "rules.json").write_text(json.dumps(rules), encoding="utf-8")

    def start(self) -> None:
        """Start the daemon; it may not answer yet."""
        with (self.folder / "log").open("ab") as log:
            call = [sys.executable, "-m", *self._words]
            self.process = subprocess.Popen(call, cwd=ROOT, env=self.environment, stdout=log, stderr=log)

    def end(self, sign: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal and wait for the end."""
        assert self.process is not None
        self.process.send_signal(sign)
        return self.process.wait(20)

    def request(self, method: str, path: str, body: Any = None) -> httpx.Response:
        """Ask the daemon, waiting until it answers."""
        end = time.monotonic() + 60
        while True:
            try:
                self._probe()
                with httpx.Client(transport=httpx.HTTPTransport(uds=str(self.socket)), timeout=30) as client:
                    return client.request(method, f"http://appliance{path}", json=body)
            except (httpx.TransportError, OSError):
                assert time.monotonic() < end, self.log()
                time.sleep(0.05)

    def _probe(self) -> None:
        """Raise unless the socket is listened on: httpx would leak its own when a connection is refused."""
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(self.socket))

    def run(self, name: str = "digest", slot: str | None = "2026-01-01T00:00Z") -> dict[str, Any]:
        """Run a job and wait for its end."""
        answer = self.request("POST", f"/appliance/v1/jobs/{name}/runs", {"slot": slot})
        assert answer.status_code in (200, 201), answer.text
        return self.wait(answer.json()["run"])

    def wait(self, run: str, seconds: float = 60) -> dict[str, Any]:
        """Wait for a run's end."""
        end = time.monotonic() + seconds
        while True:
            found: dict[str, Any] = self.request("GET", f"/appliance/v1/runs/{run}").json()
            if found.get("state") in ("done", "failed", "missed", "skipped"):
                return found
            assert time.monotonic() < end, (found, self.log())
            time.sleep(0.1)

    def log(self) -> str:
        """The end of the daemon's log."""
        return (self.folder / "log").read_text(encoding="utf-8")[-3000:]

    def logged(self, event: str) -> list[dict[str, Any]]:
        """Log lines of one event."""
        lines = (self.folder / "log").read_text(encoding="utf-8").splitlines()
        objects = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        return [one for one in objects if one["event"] == event]


@contextlib.contextmanager
def box(folder: Path, pieces: int = 1, delay: float = 0.0, rules: Rules | None = None) -> Iterator[Box]:
    """A box whose daemon is killed when the block ends."""
    made = Box(folder, pieces, delay, rules)
    try:
        yield made
    finally:
        if made.process is not None:
            made.process.kill()
            made.process.wait()
