"""A file or a folder on this machine.

Knows: copying it, resumably. Does not know: wheels (`wheel`) or where sticks are mounted (`usb`).
"""

import os
from pathlib import Path

from appliance.errors import CheckpointError, NotFound
from appliance.paths import home_filled, real
from appliance.progress import bar
from appliance.pull import license
from appliance.pull.files import choose, copy, safe_name
from appliance.pull.offer import Offer, Wishes

ORDER = 30
FORM = "PATH (a .gguf or .safetensors file, or a folder of a model)"


def matches(text: str) -> bool:
    return home_filled(text).exists() or text.startswith(("/", "./", "../", "~"))


def look(text: str, wishes: Wishes) -> Offer:
    path = real(text)
    if not path.exists():
        raise NotFound(f"{path} does not exist", "check the path")
    root = path if path.is_dir() else path.parent
    names = _below(path) if path.is_dir() else [path.name]
    taken = choose(names, wishes.include, str(path))
    if not path.is_dir() and path.suffix == ".safetensors" and not (root / "config.json").is_file():
        raise CheckpointError(f"{path}: there is no config.json beside it", "name the folder that holds the whole model")
    if not path.is_dir() and path.suffix == ".safetensors":
        taken = choose(sorted(file.name for file in root.iterdir() if file.is_file()), (path.name,), str(path))
    stated, where = license.of_path(path)
    size = sum((root / name).stat().st_size for name in taken)

    def fetch(folder: Path, work: Path) -> None:
        with bar(f"Copying {path.name}", size, "bytes") as advance:
            for name in taken:
                with open(root / name, "rb") as source:
                    copy(source, folder / safe_name(name, str(path)), advance)

    return Offer(
        name=path.stem if path.is_file() else path.name,
        origin=f"file:{path}",
        license=stated,
        license_at=where,
        size=size,
        fetch=fetch,
    )


def _below(folder: Path) -> list[str]:
    """Every file below a folder, but for hidden folders: what they hold (caches, versions, environments) is not the model."""
    found = []
    for here, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [(Path(here) / name).relative_to(folder).as_posix() for name in files if (Path(here) / name).is_file()]
    return sorted(found)
