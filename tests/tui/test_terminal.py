"""From end to end: the starter model, a daemon process, `appliance tui` in a real terminal of 80 by 24."""

import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.test_daemon import ROOT, settings
from tests.test_starter_daemon import appliance, wait_ready

MODEL = "starter"
pytestmark = [pytest.mark.model, pytest.mark.slow]


class Tmux:
    """One terminal in a tmux server of its own."""

    def __init__(self, folder: str, command: str, environment: dict[str, str]):
        self._call = ["tmux", "-S", f"{folder}/socket", "-f", "/dev/null"]
        clean = {name: value for name, value in environment.items() if name not in ("TMUX", "NO_COLOR")}
        words = [*self._call, "new-session", "-d", "-x", "80", "-y", "24", command]
        subprocess.run(words, check=True, env={**clean, "TERM": "xterm-256color", "LANG": "C.UTF-8"}, cwd=ROOT)

    def _tell(self, *words: str) -> str:
        return subprocess.run([*self._call, *words], capture_output=True, text=True).stdout

    def press(self, *keys: str) -> None:
        """Keys by tmux's names."""
        self._tell("send-keys", *keys)

    def type(self, text: str) -> None:
        """Letters."""
        self._tell("send-keys", "-l", text)

    def see(self, *texts: str, seconds: float = 60) -> str:
        """Wait until every text stands there."""
        end = time.monotonic() + seconds
        while True:
            shown = self._tell("capture-pane", "-p")
            if all(text in shown for text in texts):
                return shown
            assert time.monotonic() < end, f"{texts} not in\n{shown}"
            time.sleep(0.1)

    def gone(self, seconds: float = 20) -> bool:
        """Whether the program has ended in time."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if subprocess.run([*self._call, "has-session"], capture_output=True).returncode != 0:
                return True
            time.sleep(0.1)
        return False

    def kill(self) -> None:
        self._tell("kill-server")


@pytest.fixture
def url(tmp_path: Path, starter_gguf: Path) -> Iterator[str]:
    """Where a daemon serves the starter model, built so that it always says the likeliest: else it may talk for minutes."""
    checkpoint = tmp_path / MODEL
    checkpoint.mkdir()
    shutil.copy(starter_gguf, checkpoint)
    (checkpoint / "generation_config.json").write_text('{"temperature": 0}')
    with socket.create_server(("127.0.0.1", 0)) as free:
        listen = f"127.0.0.1:{free.getsockname()[1]}"
    environment = settings(tmp_path, listen)
    del environment["PYTHONWARNINGS"]  # the libraries' own warnings at import are not ours to mend
    built = appliance(environment, "build", str(checkpoint), "--scheme", "w4a8", "--name", MODEL, "--windows", "1")
    assert built.returncode == 0, built.stderr
    call = [sys.executable, "-m", "appliance", "serve"]
    with subprocess.Popen(call, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL) as daemon:
        try:
            wait_ready(f"http://{listen}", daemon)
            yield f"http://{listen}"
        finally:
            daemon.terminate()


@pytest.fixture
def terminal(url: str) -> Iterator[Tmux]:
    command = shlex.join([sys.executable, "-m", "appliance", "tui", "--host", url])
    with tempfile.TemporaryDirectory() as folder:  # a socket's path has little room
        made = Tmux(folder, command, dict(os.environ))
        try:
            yield made
        finally:
            made.kill()


def test_ask_stop_look_at_the_jobs_quit(url: str, terminal: Tmux) -> None:
    terminal.see(MODEL, "CPUExecutionProvider", "Ask something")
    terminal.type("What is the capital of France?")
    terminal.see("│ What is the capital of France?")
    terminal.press("Enter")
    terminal.see("▌ What is the capital of France?", "Paris", "tokens/s", "%) of 8192")
    terminal.press("C-n")
    terminal.see("context 0 (0%)")
    terminal.type("Tell me a very long story, as long as you can.")
    terminal.press("Enter")
    terminal.see("answering")
    time.sleep(1)
    terminal.press("Escape")
    terminal.see("stopped")
    terminal.press("C-t")
    terminal.see("Ledger")
    terminal.press("Escape")
    terminal.see("Ask something")  # before the next key: Escape and a letter at once are another key
    terminal.press("C-l")
    terminal.see("Tell me a very long story", "What is the capital of France?", "Rename")
    terminal.press("C-q")
    assert terminal.gone()
    kept = httpx.get(f"{url}/appliance/v1/conversations").json()["data"]
    assert [(one["title"], one["message_count"]) for one in kept] == [
        ("Tell me a very long story, as long as you can.", 2),
        ("What is the capital of France?", 2),
    ]
    answer = httpx.get(f"{url}/appliance/v1/conversations/{kept[1]['id']}").json()["messages"][1]
    assert "Paris" in answer["content"] and answer["provider"] == "CPUExecutionProvider"
    assert answer["tokens_per_second"] > 1 and answer["finish_reason"] == "stop"
    speed = httpx.get(f"{url}/appliance/v1/device").json()["models"][0]["work"]["tokens_per_second"]
    assert speed > 1
