"""The README's first promise, kept from a fresh clone: `make demo` answers, in time, and leaves nothing running."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COLD_SECONDS = 300
WARM_SECONDS = 40
PROC = Path("/proc")


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What is committed, and nothing else."""
    folder = tmp_path_factory.mktemp("fresh") / "appliance"
    subprocess.run(["git", "clone", "--quiet", "--depth=1", f"file://{ROOT}", str(folder)], check=True)
    yield folder
    shutil.rmtree(folder)


def running_from(folder: Path) -> list[str]:
    """Command lines of the processes that were started from `folder` or work in it."""
    found = []
    for process in PROC.glob("[0-9]*"):
        try:
            line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            place = os.readlink(process / "cwd")
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue
        if str(folder) in line or place.startswith(str(folder)):
            found.append(line)
    return found


def make_demo(clone: Path, **more: str) -> tuple[str, float]:
    start = time.monotonic()
    done = subprocess.run(["make", "demo"], cwd=clone, env=os.environ | more, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout, time.monotonic() - start


def report_of(text: str, clone: Path) -> str:
    """The report that the demo points to."""
    [place] = [line.removeprefix("The report: ") for line in text.splitlines() if line.startswith("The report: ")]
    return (clone / place).read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.model
def test_make_demo_from_a_fresh_clone(clone: Path) -> None:
    """Without pip's cache, as on a machine that has never seen it; then once more."""
    text, seconds = make_demo(clone, PIP_NO_CACHE_DIR="1")
    assert "Paris" in text and "tokens/s" in text and "CPUExecutionProvider" in text
    assert "6 of 6 files can be searched" in text and "appliance tui" in text
    assert report_of(text, clone).count("> “") >= 6
    assert seconds < COLD_SECONDS
    assert running_from(clone) == []
    text, seconds = make_demo(clone)
    assert "Paris" in text
    assert "was asked for before" in text and report_of(text, clone)
    assert seconds < WARM_SECONDS
    outside = subprocess.run(["git", "status", "--porcelain"], cwd=clone, capture_output=True, text=True, check=True)
    assert outside.stdout == "", "the demo wrote beside what is ignored"


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize(
    ("seen", "delay"),
    [("", 0.3), ("", 1.5), ("$ appliance build", 2.0), ("$ appliance serve", 0.5), ("$ appliance job run", 2.0)],
)
def test_an_interrupted_demo_leaves_nothing_running_and_goes_on_later(
    clone: Path, tmp_path: Path, seen: str, delay: float
) -> None:
    # What Python's own venv and pip print when they are interrupted is theirs.
    subprocess.run(["make", ".venv/.stamp"], cwd=clone, capture_output=True, check=True)
    for name in ("models", "state"):  # so that there is a build and a run to interrupt
        shutil.rmtree(clone / ".appliance" / name, ignore_errors=True)
    output = tmp_path / "output"
    with output.open("wb") as file:
        demo = subprocess.Popen(["make", "demo"], cwd=clone, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    deadline = time.monotonic() + 120
    while seen not in output.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(delay)
    os.killpg(demo.pid, signal.SIGINT)  # as a terminal does on Ctrl-C: to every process of the group
    demo.wait(timeout=30)
    text = output.read_text()
    assert seen in text
    assert demo.returncode != 0
    assert "Traceback" not in text, text[-3000:]
    deadline = time.monotonic() + 10
    while running_from(clone) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert running_from(clone) == []
    models = clone / ".appliance" / "models"
    assert not [path for path in models.glob("*") if path.name[0] != "." and not (path / "manifest.json").is_file()]
