"""Paths as people and programs write them: `~`, relative, through links, or not paths at all.

Knows: how to find out where one leads without failing on the way. Does not know: what lies there.
`Path.resolve` and `Path.expanduser` raise a RuntimeError for a loop of links and for the home of nobody: one such link in a
folder would end the run over all of it.
"""

import os
from pathlib import Path

from appliance.errors import RequestError


def home_filled(path: str | Path) -> Path:
    """The path with a leading `~` filled in; the home of a user who is not there stays as it is written."""
    return Path(os.path.expanduser(path))


def real(path: str | Path) -> Path:
    """Where a path leads: absolute, `~` filled in, links followed. A loop of links leads to itself, and cannot be opened there.

    Raises:
        RequestError: it has a NUL in it, which no path has.
    """
    try:
        return Path(os.path.realpath(home_filled(path)))
    except ValueError:
        raise RequestError(f"{str(path)!r} is no path", "leave out the NUL") from None
