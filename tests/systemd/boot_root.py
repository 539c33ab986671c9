"""The root folder that a test boots: Debian with systemd, the program in /opt/appliance, the units where they belong.

Knows: debootstrap, pip, where files of a package go. Does not know: what is tested.

The slow part (system and wheels, about 700 MB) is kept in a cache folder outside of the repository, by what it is made of;
a test boots a copy of it.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
LOCK_FILE = REPOSITORY / "requirements.lock"
RELEASE, PYTHON = "bookworm", "3.11"
SEARCHED = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Folders of programs; root's own may be missing from the path of the one who became root."""
PACKAGES = "systemd,systemd-sysv,dbus,python3,python3-venv"
PLACES = {
    "appliance.service": "usr/lib/systemd/system",
    "appliance-job@.service": "usr/lib/systemd/system",
    "appliance-job@.timer": "usr/lib/systemd/system",
    "sysusers.d/appliance.conf": "usr/lib/sysusers.d",
    "tmpfiles.d/appliance.conf": "usr/lib/tmpfiles.d",
    "appliance.toml": "etc/appliance",
}
"""File of systemd/ -> the folder that docs/operations.md installs it to."""


def call(*words: object, timeout: float = 900) -> str:
    """Run a command of this machine; its whole output where it fails."""
    done = subprocess.run(list(map(str, words)), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout)
    assert done.returncode == 0, f"{words}: {done.stdout[-4000:]}"
    return done.stdout


def inside(root: Path, *words: object) -> str:
    """Run a command of the root folder's own, not booted."""
    return call("chroot", root, "env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8", *words)


def need(*programs: str) -> None:
    """Fail, never skip, where the machine cannot boot anything."""
    if os.geteuid() != 0:
        pytest.fail("booting a system takes root: run this test as root", pytrace=False)
    missing = [program for program in programs if shutil.which(program, path=SEARCHED) is None]
    if missing:
        pytest.fail(f"{', '.join(missing)} not there; install what the tests need: tests/system-packages", pytrace=False)


def cache_folder() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "appliance-tests"


def system_root() -> Path:
    """The system with the locked wheels installed, without the project itself; made if it is not there."""
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    key = hashlib.sha256(f"{RELEASE} {PACKAGES} {PYTHON}".encode() + LOCK_FILE.read_bytes()).hexdigest()[:12]
    root = cache / f"root-{key}"
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not root.is_dir():
            part = cache / "part"
            shutil.rmtree(part, ignore_errors=True)
            _install_system(cache / "system", part)
            _install_wheels(part)
            for old in cache.glob("root-*"):
                shutil.rmtree(old)
            part.rename(root)
    return root


def _install_system(bare: Path, part: Path) -> None:
    """A bare system in `bare`, kept because it changes seldom, and a copy of it in `part`."""
    if not (bare / "complete").is_file():
        shutil.rmtree(bare, ignore_errors=True)
        call("debootstrap", "--variant=minbase", f"--include={PACKAGES}", RELEASE, bare, timeout=1800)
        (bare / "complete").touch()
    call("cp", "-a", bare, part)


def _install_wheels(root: Path) -> None:
    """Fetched by this machine's pip, which knows how it reaches the package index; installed by the root's own."""
    with tempfile.TemporaryDirectory(dir=root) as folder:
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
        call(
            *pip,
            "download",
            "--require-hashes",
            "--only-binary=:all:",
            f"--python-version={PYTHON}",
            "-d",
            folder,
            "-r",
            LOCK_FILE,
        )
        shutil.copy(LOCK_FILE, folder)
        there = Path("/") / Path(folder).name
        inside(root, "python3", "-m", "venv", "/opt/appliance")
        install(root, there, "--require-hashes", "-r", there / LOCK_FILE.name)


def install(root: Path, wheels: Path, *what: object) -> None:
    """Install from a folder of wheels inside the root, and from nowhere else."""
    pip = ("/opt/appliance/bin/python", "-m", "pip", "--disable-pip-version-check", "--no-cache-dir")
    inside(root, *pip, "install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--find-links", wheels, *what)


@contextlib.contextmanager
def installed_root() -> Iterator[Path]:
    """A copy of the system with this work tree's program and units installed and the service enabled."""
    system = system_root()
    with tempfile.TemporaryDirectory(dir=cache_folder(), prefix="boot-", ignore_cleanup_errors=True) as folder:
        root = Path(folder) / "root"
        call("cp", "-a", "--reflink=auto", system, root)
        _install_project(root)
        for name, place in PLACES.items():
            (root / place).mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / "systemd" / name, root / place)
        inside(root, "systemd-sysusers")
        inside(root, "systemctl", "enable", "appliance.service")
        yield root


def _install_project(root: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        for name in ("appliance", "export", "quant", "tui"):  # a build inside the work tree would leave files there
            shutil.copytree(REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(REPOSITORY / name, source)
        wheels = root / "wheels"
        call(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", wheels, source)
        install(root, Path("/wheels"), "appliance")
        shutil.rmtree(wheels)
