"""The folder inside the clone that the demo and the tests share, and the settings that keep everything in it.

Knows: paths. Does not know: what the appliance does with them.
"""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / ".appliance"
STARTER = "smollm2-135m"
STARTER_VARIABLE = "APPLIANCE_STARTER"
"""Environment variable that names a copy of the starter model elsewhere."""
CONFIG = """\
# Written by the demo: everything lies in this folder, and remove the folder to be rid of it.
[paths]
models = "{data}/models"
cache = "{data}/cache"
state = "{data}/state"
runtime = "{data}/run"
targets = "{data}/targets.d"

[server]
# No Unix socket: its path may have 107 bytes at most, and a clone may lie deep.
socket = false
"""


def write_config(data: Path = DATA) -> Path:
    """Settings whose every folder lies inside `data`; returns their path."""
    data.mkdir(parents=True, exist_ok=True)
    path = data / "appliance.toml"
    # TOML's basic strings take a backslash and a quote only escaped.
    path.write_text(CONFIG.format(data=str(data).replace("\\", "\\\\").replace('"', '\\"')), encoding="utf-8")
    return path


def environment(config: Path) -> dict[str, str]:
    """The environment of every command that shall use `config`."""
    return os.environ | {"APPLIANCE_CONFIG": str(config)}


def starter_candidates() -> list[Path]:
    """Where the starter model may lie, best first."""
    named = [Path(os.environ[STARTER_VARIABLE])] if os.environ.get(STARTER_VARIABLE) else []
    return named + sorted((DATA / "cache" / "checkpoints" / STARTER).glob("*.gguf"))
