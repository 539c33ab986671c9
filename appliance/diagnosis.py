"""What can be wrong with this machine or this installation: one function a question, each answering with one row.

Knows: how each thing is found out and what mends it. Does not know: how rows are shown (`appliance.commands.doctor`).
"""

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from appliance import targets
from appliance.config import Config, load_config
from appliance.engine.catalog import read_catalog
from appliance.errors import ApplianceError
from appliance.pull.checkpoints import installed

State = Literal["ok", "warn", "fail"]
PYTHON = (3, 11)
LITTLE_MEMORY = 2e9
LITTLE_DISK = 2e9
RUNTIMES = ("onnxruntime-", "onnxruntime_")
# Instructions that multiply int8: without any, W4A8 is computed several times slower.
INT8 = {
    "x86_64": ("amx_int8", "avx512_vnni", "avx_vnni", "avx2"),
    "aarch64": ("i8mm", "asimddp"),
}


@dataclass(frozen=True)
class Row:
    """One answer: what was looked at, how it is, what was found, and what to do about it (empty when all is well)."""

    name: str
    state: State
    found: str
    fix: str = ""


def examine(path: Path | None = None) -> list[Row]:
    """Ask everything. A broken settings file leaves out only what depends on it."""
    rows = [python_version(), runtime(), plugins(), processor(), memory()]
    try:
        config = load_config(path)
    except ApplianceError as failure:
        return [*rows, Row("settings", "fail", failure.what, failure.fix)]
    questions: Sequence[Callable[[Config], Row]] = (settings, target, disk, models, checkpoints, daemon)
    return rows + [question(config) for question in questions]


def python_version() -> Row:
    found = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info < PYTHON:
        return Row("python", "fail", found, "install Python 3.11 or newer")
    return Row("python", "ok", found)


def runtime() -> Row:
    try:
        import onnxruntime
    except ImportError as failure:
        return Row("onnxruntime", "fail", f"cannot be imported: {failure}", "install it: pip install onnxruntime")
    providers = ", ".join(onnxruntime.get_available_providers())
    return Row("onnxruntime", "ok", f"{onnxruntime.__version__} with {providers}")


def plugins() -> Row:
    """Other providers come as packages of their own beside onnxruntime."""
    names = sorted(
        f"{distribution.metadata['Name']} {distribution.version}"
        for distribution in importlib.metadata.distributions()
        if (distribution.metadata["Name"] or "").lower().startswith(RUNTIMES)
    )
    return Row("plugins", "ok", ", ".join(names) or "none: only the processor is used")


def processor(cpuinfo: Path = Path("/proc/cpuinfo"), machine: str = "") -> Row:
    machine = machine or platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    wanted = INT8.get({"AMD64": "x86_64", "arm64": "aarch64"}.get(machine, machine), ())
    if not wanted or not cpuinfo.is_file():
        return Row("processor", "ok", f"{machine}, {cores} cores; its int8 instructions cannot be read here")
    words = set()
    for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.lower().startswith(("flags", "features")):
            words |= set(line.split())
    have = [word for word in wanted if word in words]
    found = f"{machine}, {cores} cores, {', '.join(have) or 'no int8 instructions'}"
    if not have or have == ["avx2"]:
        return Row("processor", "warn", found, "it works, slower: newer processors multiply int8 directly")
    return Row("processor", "ok", found)


def memory(meminfo: Path = Path("/proc/meminfo")) -> Row:
    if not meminfo.is_file():
        return Row("memory", "ok", "cannot be read here")
    fields = dict(line.split(":", 1) for line in meminfo.read_text(encoding="utf-8").splitlines() if ":" in line)
    total, free = (1024 * int(fields[key].split()[0]) for key in ("MemTotal", "MemAvailable"))
    found = f"{free / 1e9:.1f} of {total / 1e9:.1f} GB free"
    if free < LITTLE_MEMORY:
        return Row("memory", "warn", found, "close other programs, or use a smaller model")
    return Row("memory", "ok", found)


def settings(config: Config) -> Row:
    named = os.environ.get("APPLIANCE_CONFIG")
    return Row("settings", "ok", named or f"models in {config.paths.models}, cache in {config.paths.cache}")


def target(config: Config) -> Row:
    try:
        chosen = targets.load(config.engine.target, config.paths.targets)
    except ApplianceError as failure:
        return Row("target", "fail", failure.what, failure.fix)
    return Row("target", "ok", f"{chosen.name}: {chosen.summary}; all: {', '.join(targets.names(config.paths.targets))}")


def disk(config: Config) -> Row:
    folder = config.paths.models
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    found = f"{free / 1e9:.1f} GB free for {folder}"
    if not os.access(there, os.W_OK):
        return Row("disk", "fail", f"{there} cannot be written", "change its owner, or paths.models in the settings")
    if free < LITTLE_DISK:
        return Row("disk", "warn", found, "free some space, or move paths.models")
    return Row("disk", "ok", found)


def models(config: Config) -> Row:
    catalog = read_catalog(config.paths.models)
    if catalog.problems:
        return Row("models", "fail", catalog.problems[0], "remove that folder or build the model again")
    if not catalog.bundles:
        return Row("models", "warn", "none installed", "appliance pull smollm2-135m, then appliance build what it names")
    return Row("models", "ok", ", ".join(catalog.bundles))


def checkpoints(config: Config) -> Row:
    folder = config.paths.cache / "checkpoints"
    left = sorted(path.name[1:].removesuffix(".partial") for path in folder.glob(".*.partial"))
    names = ", ".join(one.record.name for one in installed(folder)) or "none"
    if left:
        return Row("checkpoints", "warn", f"{names}; not finished: {', '.join(left)}", "pull again: it goes on where it stopped")
    return Row("checkpoints", "ok", names)


def daemon(config: Config) -> Row:
    import httpx

    start = "start it: appliance serve"
    if not config.server.addresses:
        return Row("daemon", "ok", "listens on its Unix socket only")
    address = config.server.addresses[0]
    try:
        answer = httpx.get(f"http://{address}/readyz", timeout=3)
        body = answer.json()
    except httpx.TransportError:
        return Row("daemon", "warn", f"nothing answers on {address}", start)
    except ValueError:
        return Row("daemon", "fail", f"something else answers on {address}", "stop it, or change server.listen")
    if answer.is_success:
        return Row("daemon", "ok", f"ready on {address} with {body.get('model', 'no model')}")
    error = body.get("error") if isinstance(body, dict) else None
    reason = error.get("message") if isinstance(error, dict) else f"status {answer.status_code}"
    return Row("daemon", "warn", f"on {address}, not ready: {reason}", "wait a moment, or see its log")
