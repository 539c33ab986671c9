"""The starter model as a bundle, built once for all workers of a run, and what a build had in memory."""

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MEASURED = """
import sys
from appliance.cli import main
code = main(sys.argv[1:])
with open("/proc/self/status") as status:  # not getrusage: that counts what forked this process too
    print(next(line.split()[1] for line in status if line.startswith("VmHWM")), file=sys.stderr)
sys.exit(code)
"""


@dataclass(frozen=True)
class StarterBuilt:
    """`bundle`: a folder to copy, not to change. `peak`: MiB that building it took."""

    bundle: Path
    peak: float


def peak_of(environment: Mapping[str, str], source: Path, name: str, *more: str, scheme: str = "w4a8") -> float:
    """Build `source` in a process of its own: MiB that it had in memory at most."""
    call = [sys.executable, "-c", MEASURED, "build", str(source), "--name", name, "--scheme", scheme, "--windows", "1", *more]
    done = subprocess.run(call, capture_output=True, text=True, env=dict(environment))
    assert done.returncode == 0, done.stderr
    return int(done.stderr.splitlines()[-1]) / 1024


def built_once(folder: Path, gguf: Path) -> StarterBuilt:
    """Built by whichever worker comes first; the others wait for it."""
    folder.mkdir(exist_ok=True)
    bundle, peak, config = folder / "bundle", folder / "peak", folder / "appliance.toml"
    config.write_text(f'[paths]\ncache = "{folder / "cache"}"\nmodels = "{folder / "models"}"\n', encoding="utf-8")
    environment = {**os.environ, "APPLIANCE_CONFIG": str(config)}
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not peak.exists():
            found = peak_of(environment, gguf, "starter", "--output", str(bundle))
            peak.write_text(str(found), encoding="utf-8")
    return StarterBuilt(bundle, float(peak.read_text(encoding="utf-8")))


def placed(built: StarterBuilt, models: Path, name: str) -> None:
    """A model of its own in a home's folder of models; files are shared."""
    shutil.copytree(built.bundle, models / name, copy_function=os.link)
