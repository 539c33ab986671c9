"""Which files a folder holds for the index.

Knows: hidden names, symbolic links, folders that cannot be opened. Does not know: what is in a file.
"""

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from appliance.paths import real

LINK_OUT = "it is a symbolic link out of the folder, which is not followed"
LINK_NOWHERE = "it is a symbolic link that leads nowhere"
LINK_IN = "it is a symbolic link to something that is indexed under its own name"


@dataclass(frozen=True)
class Found:
    """One name below the folder. `problem`: why it is not to be read, "" when it is; `stamp`: changes when the file does."""

    path: Path
    stamp: str
    problem: str = ""


def files_below(folder: Path) -> list[Found]:
    """Every file below `folder`, sorted by path; names that begin with a dot are left out.

    Raises:
        OSError: the folder itself cannot be read.
    """
    found: list[Found] = []
    waiting = [folder]
    while waiting:
        here = waiting.pop()
        try:
            entries = list(os.scandir(here))
        except OSError as failure:
            if here == folder:
                raise
            found.append(Found(here, "", f"it cannot be opened: {failure.strerror}"))
            continue
        for entry in entries:
            if entry.name.startswith("."):
                continue
            path = here / entry.name
            if entry.is_symlink():
                found.append(Found(path, "", _link(path, folder)))
            elif entry.is_dir():
                waiting.append(path)
            else:
                found.append(_file(path))
    return sorted(found, key=lambda one: os.fsencode(one.path))


def _link(path: Path, folder: Path) -> str:
    """Why a symbolic link is not read."""
    if not real(path).is_relative_to(folder):
        return LINK_OUT
    return LINK_IN if os.path.exists(path) else LINK_NOWHERE


def stamp_of(path: Path) -> str:
    """Size and times of a file; the time of the last change of any kind tells of writers that set the other back."""
    about = path.lstat()
    return f"{about.st_size} {about.st_mtime_ns} {about.st_ctime_ns}"


def storable(path: Path) -> str:
    """A path as the index can keep it: bytes that are no UTF-8 are written out as \\x.."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _file(path: Path) -> Found:
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return Found(path, "", "it is no regular file")
        stamp = stamp_of(path)
    except OSError as failure:
        return Found(path, "", f"it cannot be looked at: {failure.strerror}")
    problem = "" if storable(path) == str(path) else "its name is not valid UTF-8"
    return Found(path, stamp, problem)
