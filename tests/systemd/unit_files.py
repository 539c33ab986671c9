"""The unit files as they are committed, and copies of them that this machine can check.

Knows: the file format, where the units expect the program. Does not know: what the settings mean.
"""

from collections import defaultdict
from pathlib import Path

UNITS = Path(__file__).parents[2] / "systemd"
PROGRAM = "/opt/appliance/bin/appliance"

Settings = dict[str, dict[str, list[str]]]
"""Section -> key -> values in order; an empty one has cleared those before it, as systemd reads it."""


def read_unit(path: Path) -> Settings:
    """A unit file's settings. It has no continued lines, or this would not be so short."""
    found: Settings = defaultdict(lambda: defaultdict(list))
    section = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        assert not line.endswith("\\"), line
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith(("#", ";")):
            key, value = line.split("=", 1)
            found[section][key] = [*found[section][key], value] if value else []
    return found


def copy_units(folder: Path, program: Path) -> Path:
    """The units in `folder`, with `program` in the place of ours, an instance of each template beside it."""
    folder.mkdir()
    for unit in [*UNITS.glob("*.service"), *UNITS.glob("*.timer")]:
        text = unit.read_text(encoding="utf-8").replace(PROGRAM, str(program))
        for name in {unit.name, unit.name.replace("@.", "@nightly-digest.")}:
            (folder / name).write_text(text, encoding="utf-8")
    return folder
