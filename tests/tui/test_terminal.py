"""From end to end: the starter model, a daemon process, `appliance tui` in a real terminal of 80 by 24."""

import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.test_daemon import ROOT
from tests.test_starter_daemon import MODEL
from tests.test_starter_daemon import Box as StarterBox
from tests.test_starter_daemon import box as starter

__all__ = ["starter"]
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
            assert time.monotonic() < end, (texts, shown)
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
def terminal(starter: StarterBox) -> Iterator[Tmux]:
    command = shlex.join([sys.executable, "-m", "appliance.cli", "tui", "--host", starter.url])
    with tempfile.TemporaryDirectory() as folder:  # a socket's path has little room
        made = Tmux(folder, command, dict(os.environ))
        try:
            yield made
        finally:
            made.kill()


def test_ask_stop_look_at_the_jobs_quit(starter: StarterBox, terminal: Tmux) -> None:
    terminal.see(MODEL, "CPUExecutionProvider", "Ask something")
    terminal.type("What is the capital of France?")
    terminal.see("│ What is the capital of France?")
    terminal.press("Enter")
    terminal.see("▌ What is the capital of France?", "tokens/s", "%) of")  # of context: the answer has ended
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
    terminal.press("C-l")
    terminal.see("Tell me a very long story", "What is the capital of France?", "Rename")
    terminal.press("C-q")
    assert terminal.gone()
    kept = httpx.get(f"{starter.url}/appliance/v1/conversations").json()["data"]
    assert [(one["title"], one["message_count"]) for one in kept] == [
        ("Tell me a very long story, as long as you can.", 2),
        ("What is the capital of France?", 2),
    ]
    answer = httpx.get(f"{starter.url}/appliance/v1/conversations/{kept[1]['id']}").json()["messages"][1]
    assert answer["content"].strip() and answer["provider"] == "CPUExecutionProvider"  # what it says is left to chance
    assert answer["tokens_per_second"] > 1 and answer["finish_reason"] == "stop"
    speed = httpx.get(f"{starter.url}/appliance/v1/device").json()["models"][0]["work"]["tokens_per_second"]
    assert speed > 1
