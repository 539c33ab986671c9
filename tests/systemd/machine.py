"""A booted system in namespaces of its own, to be asked and to be ended.

Knows: unshare, nsenter, systemctl. Does not know: how its root folder was made, or what is expected of it.
"""

import contextlib
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

SCRIPT = Path(__file__).with_name("boot.sh")
ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
BOOT_SECONDS = 90.0
SHOWN = ("ActiveState", "SubState", "Result", "MainPID", "NRestarts", "StatusText", "ExecMainCode", "ExecMainStatus")


class NotAsExpected(AssertionError):
    """A unit did not come to where it should; the text holds its state and its journal."""


@dataclass(frozen=True)
class Machine:
    """A booted system.

    Attributes:
        init: process id of its systemd, as seen from here.
    """

    init: int

    def run(self, *words: str, code: int | None = 0, timeout: float = 60) -> str:
        """Output of a command run inside; `code` is the exit code it must have, None = any."""
        call = ["nsenter", f"--target={self.init}", "--all", "--", *words]
        done = subprocess.run(call, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout)
        assert code is None or done.returncode == code, f"{words} gave {done.returncode}: {done.stdout[-3000:]}"
        return done.stdout

    def as_appliance(self, *words: str, code: int | None = 0) -> str:
        """The same as the service's own user."""
        prefix = ("runuser", "-u", "appliance", "--", "env", "APPLIANCE_CONFIG=/etc/appliance/appliance.toml")
        return self.run(*prefix, *words, code=code)

    def show(self, unit: str) -> Mapping[str, str]:
        """Properties of a unit."""
        text = self.run("systemctl", "show", unit, f"--property={','.join(SHOWN)}")
        return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)

    def signal(self, process: str, name: str) -> None:
        """Send a signal to a process by its id inside; a bare system has no program for that but the shell."""
        self.run("sh", "-c", f"kill -{name} {int(process)}")

    def journal(self, unit: str, word: str) -> list[str]:
        """Lines with `word` in them that a unit has written, or systemd about it."""
        text = self.run("journalctl", "--no-pager", "--output=cat", f"--unit={unit}")
        return [line for line in text.splitlines() if word in line]

    def drop_in(self, unit: str, text: str) -> None:
        """Change a unit's settings until the next boot."""
        self.run("sh", "-c", 'mkdir -p "$1" && printf %s "$2" > "$1/test.conf"', "-", f"/run/systemd/system/{unit}.d", text)
        self.run("systemctl", "daemon-reload")

    def wait_for(self, unit: str, seconds: float, **expected: str) -> Mapping[str, str]:
        """Properties of a unit once they are as expected; `NotAsExpected` when that takes too long."""
        end = time.monotonic() + seconds
        while True:
            found = self.show(unit)
            if all(found.get(key) == value for key, value in expected.items()):
                return found
            if time.monotonic() > end:
                journal = self.run("journalctl", "--no-pager", "--lines=40", f"--unit={unit}", code=None)
                raise NotAsExpected(f"{unit} should have {expected}, has {dict(found)}\n{journal}")
            time.sleep(0.3)


@contextlib.contextmanager
def booted(root: Path) -> Iterator[Machine]:
    """The system of `root`, up to where it takes commands; ended, with everything in it, when the block is left."""
    log_path = root.parent / "console.log"
    namespaces = ("--pid", "--mount", "--uts", "--ipc", "--cgroup", "--net")  # net: its daemon's port is not this machine's
    with open(log_path, "wb") as log:
        call = ["unshare", "--fork", "--kill-child=SIGKILL", *namespaces, "bash", str(SCRIPT), str(root)]
        outer = subprocess.Popen(call, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield _wait_booted(outer, log_path)
        finally:
            outer.kill()  # its child is PID 1 of the namespace, and takes everything in it along
            outer.wait()


def _wait_booted(outer: "subprocess.Popen[bytes]", log_path: Path) -> Machine:
    end = time.monotonic() + BOOT_SECONDS
    while time.monotonic() < end and outer.poll() is None:
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
        if children:
            machine = Machine(int(children[0]))
            with contextlib.suppress(subprocess.TimeoutExpired):
                # starting: its services are on their way, and one may never get there; degraded: one did not.
                if machine.run("systemctl", "is-system-running", code=None).strip() in ("starting", "running", "degraded"):
                    return machine
        time.sleep(0.3)
    raise NotAsExpected(f"the system did not boot:\n{log_path.read_text(errors='replace')[-4000:]}")
