"""The catalog: which bundles are installed in the models folder.

Knows: how the folder is searched. Does not know: engines, or whether a bundle's big files are intact.

    models/SmolLM2-135M/manifest.json            one folder a bundle,
    models/HuggingFaceTB/SmolLM2/manifest.json   or below an organization's
"""

from dataclasses import dataclass
from pathlib import Path

from appliance.bundle.store import Bundle, is_bundle, open_bundle
from appliance.errors import ApplianceError

DEPTH = 2


@dataclass(frozen=True)
class Catalog:
    """What a search found: bundles by model id, sorted, and one line for each folder that cannot be used."""

    bundles: dict[str, Bundle]
    problems: tuple[str, ...]


def read_catalog(folder: Path) -> Catalog:
    """Open every manifest below `folder` (hashes of the other files are checked when a model is loaded, not here).

    A bundle that cannot be opened, and a second one with the same id, end among the problems and hide nothing else.
    """
    bundles: dict[str, Bundle] = {}
    problems = []
    for path in _bundle_folders(folder, DEPTH):
        try:
            bundle = open_bundle(path, verify=False)
        except ApplianceError as failure:
            problems.append(str(failure))
            continue
        name = bundle.manifest.name
        if name in bundles:
            problems.append(f'{path} has the same id "{name}" as {bundles[name].path}; remove one of them')
        else:
            bundles[name] = bundle
    return Catalog(dict(sorted(bundles.items())), tuple(problems))


def _bundle_folders(folder: Path, depth: int) -> list[Path]:
    found = []
    visible = sorted(path for path in folder.iterdir() if path.is_dir() and path.name[0] != ".") if folder.is_dir() else []
    for path in visible:
        if is_bundle(path):
            found.append(path)
        elif depth > 1:
            found += _bundle_folders(path, depth - 1)
    return found
