"""The unit files: systemd's own checks, and what they promise to the rest of the project."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from appliance.config import load_config
from tests.systemd.unit_files import PROGRAM, UNITS, copy_units, read_unit

SERVICE = UNITS / "appliance.service"
MOST_EXPOSED = 2.0
"""Exposure that `systemd-analyze security` may find, of 10."""


def analyze(*words: object) -> tuple[int, str]:
    """Exit code and everything that systemd-analyze says."""
    call = ["systemd-analyze", *map(str, words)]
    try:
        done = subprocess.run(call, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60)
    except FileNotFoundError:
        pytest.fail("systemd-analyze is not there; install what the tests need: tests/system-packages", pytrace=False)
    return done.returncode, done.stdout


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """Copies that start a program which is there."""
    return copy_units(tmp_path / "units", Path("/bin/true"))


def verify(units: Path) -> tuple[int, str]:
    return analyze("verify", "--man=no", *sorted(path for path in units.iterdir() if "@." not in path.name))


@pytest.mark.program("systemd-analyze")
def test_systemd_finds_nothing_to_say(units: Path) -> None:
    assert len(list(units.iterdir())) == 5
    assert verify(units) == (0, "")


@pytest.mark.program("systemd-analyze")
@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("WatchdogSec=3min", "WatchdogSec=3mim", "Failed to parse"),
        ("ProtectClock=yes", "ProtectClocks=yes", "'ProtectClocks'"),
        ("ExecStart=/bin/true serve", "ExecStart=/bin/not-there serve", "is not executable"),
        ("ExecStart=/bin/true serve", "", "ExecStart="),
    ],
)
def test_the_check_sees(units: Path, before: str, after: str, says: str) -> None:
    path = units / SERVICE.name
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    code, said = verify(units)
    assert (code, said) != (0, "") and says in said


@pytest.mark.program("systemd-analyze")
@pytest.mark.parametrize("name", ["appliance.service", "appliance-job@nightly-digest.service"])
def test_exposure(units: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    def exposure() -> float:
        _, said = analyze("security", "--offline=true", "--no-pager", units / name)
        match = re.search(r"Overall exposure level for \S+: ([0-9.]+)", said)
        assert match, said
        return float(match[1])

    measured = exposure()
    with capsys.disabled():
        print(f"\nexposure of {name}: {measured}", end=" ")
    assert measured < MOST_EXPOSED
    path = units / name
    path.write_text("\n".join(line for line in path.read_text().splitlines() if not line.startswith(("Protect", "System"))))
    assert exposure() > MOST_EXPOSED


@pytest.mark.parametrize("unit", sorted(UNITS.glob("*.service")), ids=lambda path: path.name)
def test_every_command_line_is_one_of_ours(unit: Path) -> None:
    """The verb is there, and so is every option."""
    for line in read_unit(unit)["Service"]["ExecStart"]:
        program, *words = shlex.split(line)
        assert program == PROGRAM
        command = [word for word in words if not word.startswith("-")]
        options = [word for word in words if word.startswith("-")]
        call = [sys.executable, "-m", "appliance", *command[: command.index("%i") if "%i" in command else None], "--help"]
        done = subprocess.run(call, text=True, capture_output=True, env=os.environ | {"COLUMNS": "200"})
        assert done.returncode == 0, done.stderr
        missing = [one for one in options if one not in done.stdout]
        assert not missing, f"{line}: no option {missing}"


def test_devices_stay_reachable() -> None:
    """What hides an NPU, or breaks a provider, without a word."""
    service = read_unit(SERVICE)["Service"]
    assert service["DevicePolicy"] == ["closed"]
    assert {"char-accel rw", "char-drm rw"} <= set(service["DeviceAllow"])
    hiding = ("PrivateDevices", "MemoryDenyWriteExecute", "ProcSubset", "PrivateUsers")
    assert not [key for key in hiding if key in service]
    groups = {words[1] for line in sysusers() if (words := line.split())[0] == "g"}
    assert set(service["SupplementaryGroups"]) <= groups, "a group that is not there keeps the unit from starting"


def sysusers() -> list[str]:
    lines = (UNITS / "sysusers.d" / "appliance.conf").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_the_settings_fit_the_unit() -> None:
    """Everything the daemon writes lies where the unit lets it write, and stopping is given longer than it takes."""
    service = read_unit(SERVICE)["Service"]
    config = load_config(UNITS / "appliance.toml")
    writable = {
        Path(base) / service[key][0]
        for key, base in (("StateDirectory", "/var/lib"), ("CacheDirectory", "/var/cache"), ("RuntimeDirectory", "/run"))
    }
    paths = config.paths.model_dump()
    read_only = {"targets", "jobs"}
    outside = [name for name, path in paths.items() if name not in read_only and not writable & {path, *path.parents}]
    assert not outside
    assert all(paths[name].is_relative_to("/etc/appliance") for name in read_only)
    assert int(service["TimeoutStopSec"][0]) >= config.server.stop_seconds + 10


@pytest.mark.program("systemd-analyze")
def test_the_timers_calendar() -> None:
    timer = (UNITS / "appliance-job@.timer").read_text(encoding="utf-8")
    found = re.findall(r"OnCalendar=(\S.*)", timer)
    assert len(found) == 2  # the unit's own and the example in its head
    for calendar in found:
        code, said = analyze("calendar", calendar)
        assert code == 0, said
