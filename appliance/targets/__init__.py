"""Discovery of target files: the built-in ones here, and vendors' own in a `targets.d` folder."""

import tomllib
from pathlib import Path

from appliance.errors import TargetError
from appliance.strict import read
from appliance.targets.capabilities import Target

BUILT_IN = Path(__file__).parent


def names(extra: Path | None = None) -> list[str]:
    """Every target that can be named, sorted."""
    return sorted(_files(extra))


def load(name: str, extra: Path | None = None) -> Target:
    """The target called `name`; `TargetError` with the known names when there is none."""
    files = _files(extra)
    if name not in files:
        raise TargetError(f'unknown target "{name}"', f"known targets: {', '.join(sorted(files))}")
    path = files[name]
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as failure:
        raise TargetError(f"{path}: not valid TOML: {failure}") from None
    return read(Target, {**data, "name": name}, str(path), TargetError)


def _files(extra: Path | None) -> dict[str, Path]:
    folders = [BUILT_IN] + ([extra] if extra and extra.is_dir() else [])
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.toml"))}
