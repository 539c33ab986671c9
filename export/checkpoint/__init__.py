"""Opens a checkpoint of any format that has a file in this folder.

Knows: how formats are found and what is refused before any of them is asked. Does not know: any format.
"""

import importlib
import pkgutil
from pathlib import Path
from types import ModuleType

from appliance.errors import CheckpointError
from export.checkpoint.pickled import MEND, pickle_in
from export.checkpoint.source import Checkpoint


def formats() -> dict[str, ModuleType]:
    """Every format by name: the modules here that say `matches` and `open`."""
    modules = {info.name: importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)}
    return {name: module for name, module in sorted(modules.items()) if hasattr(module, "matches") and hasattr(module, "open")}


def open_checkpoint(path: Path) -> Checkpoint:
    """Open the file or folder at `path`; reads headers only.

    Raises:
        CheckpointError: nothing there, nothing readable there, a pickle, two formats in one folder, or damage.
    """
    path = Path(path)
    try:
        return _open(path)
    except OSError as failure:
        raise CheckpointError(f"{path} cannot be read: {failure.strerror}", "check the path and its permissions") from failure


def _open(path: Path) -> Checkpoint:
    if not path.exists():
        raise CheckpointError(f"there is no {path}", "check the path, or fetch the model: appliance pull")
    if not path.is_dir() and not path.is_file():
        raise CheckpointError(f"{path} is neither a file nor a folder", "name a checkpoint")
    pickled = pickle_in(path)
    if pickled is not None and not path.is_dir():
        raise CheckpointError(f"{pickled} is a pickle and is not read", MEND)
    known = formats()
    found = [name for name, module in known.items() if module.matches(path)]
    if len(found) > 1:
        raise CheckpointError(f"{path} holds checkpoints of the formats {' and '.join(found)}", "name the file you want")
    if found:
        checkpoint: Checkpoint = known[found[0]].open(path)
        return checkpoint
    if pickled is not None:
        raise CheckpointError(f"{pickled} is a pickle and is not read", MEND)
    raise CheckpointError(f"{path} is no checkpoint", f"formats that are read: {', '.join(known)}")
