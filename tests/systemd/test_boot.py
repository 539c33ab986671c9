"""A real boot: systemd as PID 1 starts the service, a timer fires a job, the service is killed, hangs, and stops.

Needs root and debootstrap. The service runs the real program over a tiny random model: the loop that feeds the watchdog is
the real one, what the model says does not matter.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import pytest

from appliance.targets import load
from export.arch import llama
from export.build import BuildRequest, build
from quant import schemes
from tests.static_pair import fresh_seed, random_checkpoint, write_checkpoint
from tests.systemd.boot_root import installed_root, need
from tests.systemd.machine import Machine, NotAsExpected, booted
from tests.systemd.unit_files import PROGRAM

Found = TypeVar("Found")

SERVICE = "appliance.service"
POST, TIMER = "appliance-job@inventory.service", "appliance-job@inventory.timer"
START_SECONDS = 120.0
JOB = """\
name = "inventory"
description = "Finds a word, once a year: the daemon's own clock leaves it alone while the test runs."
schedule = { cron = "0 0 1 1 *", deadline_minutes = 527040 }
grants = { tools = ["knowledge_search"], folders = ["/srv/documents"] }
step = [{ kind = "search", query = "boiler" }, { kind = "map", max_tokens = 16 }]
"""
CONTEXT = 4096  # one token a byte
TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
OFTEN = "[Timer]\nOnCalendar=\nOnCalendar=*:*:0/3\n"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An installed system with a model, a document and a job."""
    need("debootstrap", "unshare", "nsenter")
    folder = tmp_path_factory.mktemp("bundle")
    config = {**llama.TINY["tied"], "max_position_embeddings": CONTEXT}
    source = write_checkpoint(folder / "source", random_checkpoint(config, fresh_seed()))
    write(source / "chat_template.jinja", TEMPLATE)
    request = BuildRequest(source, (load("cpu"),), schemes.find("w4a8"), folder / "tiny", "tiny", CONTEXT, "test", windows=1)
    build(request, lambda label, done, total: None)
    with installed_root() as root:
        shutil.copytree(folder / "tiny", root / "var/lib/appliance/models/tiny")
        write(root / "srv/documents/heating.md", "# Heating\n\nThe boiler was serviced in October.\n")
        write(root / "etc/appliance/jobs.d/inventory.toml", JOB)
        write(root / "etc/systemd/system/appliance-job@inventory.timer.d/schedule.conf", OFTEN)
        yield root
    shutil.rmtree(folder)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def check_service(machine: Machine, seconds: float = START_SECONDS) -> str:
    """The service has said that it is ready, and it answers; its process id. `NotAsExpected` otherwise."""
    found = machine.wait_for(SERVICE, seconds, ActiveState="active", SubState="running")
    if found["StatusText"] != "serving tiny on CPUExecutionProvider":
        raise NotAsExpected(f"the service's status is {found['StatusText']}")
    assert json.loads(machine.as_appliance(PROGRAM, "job", "list", "--json"))["jobs"]
    return found["MainPID"]


def check_timer(machine: Machine) -> None:
    """It fires more than once, and all of that is one slot's one run."""
    machine.run("systemctl", "start", TIMER)
    posts = until(lambda: machine.journal(POST, "inventory@"), lambda lines: len(lines) >= 2)
    assert len(posts) >= 2, machine.show(POST)
    machine.run("systemctl", "stop", TIMER)
    slot = f"inventory@{datetime.now(UTC).year}-01-01T00:00Z"
    assert all(line.startswith(slot) for line in posts), posts
    [entry] = until(lambda: ledger(machine), lambda found: bool(found) and found[0]["state"] in ("done", "failed"))
    assert (entry["run"], entry["state"], entry["reason"]) == (slot, "done", "")
    assert "serviced in October" in machine.as_appliance("cat", entry["report"])


def ledger(machine: Machine) -> list[dict[str, Any]]:
    found = machine.as_appliance(PROGRAM, "job", "ledger", "--json")
    entries: list[dict[str, Any]] = json.loads(found)["entries"]
    return entries


def until(look: Callable[[], Found], true: Callable[[Found], bool], seconds: float = 90) -> Found:
    """What `look` gives once it is as wanted, or at last."""
    end = time.monotonic() + seconds
    while not true(found := look()) and time.monotonic() < end:
        time.sleep(0.5)
    return found


def check_restart(machine: Machine, process: str) -> str:
    """Killed without a chance to clean up, it is back on its own; the new process id."""
    machine.signal(process, "KILL")
    machine.wait_for(SERVICE, 30, NRestarts="1")
    new = check_service(machine)
    assert new != process
    assert len(ledger(machine)) == 1
    return new


def check_watchdog(machine: Machine) -> None:
    """A process that has stopped in its tracks is found out, ended and started anew."""
    machine.drop_in(SERVICE, "[Service]\nWatchdogSec=8\n")
    machine.run("systemctl", "restart", SERVICE)
    process = check_service(machine)
    time.sleep(10)  # longer than the watchdog's patience: idle, it is fed
    assert machine.show(SERVICE)["NRestarts"] == "0"
    machine.signal(process, "STOP")
    machine.wait_for(SERVICE, 60, NRestarts="1")
    assert machine.journal(SERVICE, "Watchdog timeout")
    assert check_service(machine) != process


def check_stop(machine: Machine) -> None:
    """It ends by itself, well before it would be killed, and leaves no socket."""
    start = time.monotonic()
    machine.run("systemctl", "stop", SERVICE)
    assert time.monotonic() - start < 25
    found = machine.show(SERVICE)
    assert (found["ActiveState"], found["Result"], found["ExecMainStatus"]) == ("inactive", "success", "0"), found
    machine.run("test", "!", "-e", "/run/appliance/appliance.sock")
    assert machine.journal(SERVICE, '"event": "stopped"')
    machine.run("test", "!", "-e", "/var/lib/appliance/.cache")  # where onnxruntime gathers usage data, if it is let


@pytest.mark.slow
def test_the_appliance_boots_works_and_stops(root: Path) -> None:
    with booted(root) as machine:
        process = check_service(machine)
        check_timer(machine)
        check_restart(machine, process)
        check_watchdog(machine)
        check_stop(machine)


@pytest.mark.slow
@pytest.mark.parametrize("command", [f"{PROGRAM}-gone serve", f"{PROGRAM} serve --no-such-option", "/bin/sleep infinity"])
def test_the_check_of_a_boot_sees_a_broken_command(root: Path, command: str) -> None:
    """No such program, one that ends at once, and one that never says it is ready."""
    broken = root / "etc/systemd/system/appliance.service.d/broken.conf"
    write(broken, f"[Service]\nExecStart=\nExecStart={command}\n")
    try:
        with booted(root) as machine, pytest.raises(NotAsExpected):
            check_service(machine, seconds=15)
    finally:
        broken.unlink()
