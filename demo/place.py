"""The folder inside the clone that the demo and the tests share, and the settings that keep everything in it.

Knows: paths. Does not know: what the appliance does with them.
"""

import hashlib
import os
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / ".appliance"
SAMPLES = ROOT / "demo" / "samples"
JOBS = ROOT / "demo" / "jobs"
SOCKET_LIMIT = 107
"""Bytes of a Unix socket's path."""
STARTER = "smollm2-135m"
GEMMA = "gemma3-270m"
MINILM = "all-minilm-l6-v2"
VARIABLES = {STARTER: "APPLIANCE_STARTER", GEMMA: "APPLIANCE_GEMMA", MINILM: "APPLIANCE_MINILM"}
"""Environment variables that name a copy of a model elsewhere."""
CONFIG = """\
# Written by the demo: everything lies in this folder, and remove the folder to be rid of it.
[paths]
models = "{data}/models"
cache = "{data}/cache"
state = "{data}/state"
runtime = "{runtime}"
targets = "{data}/targets.d"
jobs = "{jobs}"
reports = "{data}/reports"
"""


def write_config(data: Path = DATA) -> Path:
    """Settings whose every folder lies inside `data`; returns their path."""
    data.mkdir(parents=True, exist_ok=True)
    path = data / "appliance.toml"
    # TOML's basic strings take a backslash and a quote only escaped.
    folders = {"data": data, "runtime": runtime_folder(data), "jobs": JOBS}
    quoted = {name: str(folder).replace("\\", "\\\\").replace('"', '\\"') for name, folder in folders.items()}
    path.write_text(CONFIG.format(**quoted), encoding="utf-8")
    return path


def runtime_folder(data: Path) -> Path:
    """Where the daemon's socket goes: inside `data`, or among the temporary files when the clone lies too deep for that."""
    folder = data / "run"
    if len(os.fsencode(folder / "appliance.sock")) <= SOCKET_LIMIT:
        return folder
    return Path(tempfile.gettempdir()) / f"appliance-{hashlib.sha256(os.fsencode(data)).hexdigest()[:12]}"


def environment(config: Path) -> dict[str, str]:
    """The environment of every command that shall use `config`."""
    return os.environ | {"APPLIANCE_CONFIG": str(config)}


def candidates(model: str) -> list[Path]:
    """Where the weights of a model of the catalogue may lie, best first."""
    named = os.environ.get(VARIABLES[model])
    pulled = DATA / "cache" / "checkpoints" / model
    return [*([Path(named)] if named else []), *sorted(pulled.glob("*.gguf")), *sorted(pulled.glob("*.safetensors"))]
