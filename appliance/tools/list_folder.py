"""Tool: list a folder."""

from appliance.errors import NotFound
from appliance.tools.desk import Desk

MOST = 500  # names


def list_folder(desk: Desk, path: str = "") -> list[str]:
    """List the files and folders in a granted folder; folders end in a slash.

    Args:
        path: the folder; without it, the granted folders themselves.
    """
    if not path:
        return [f"{folder}/" for folder in desk.folders]
    folder = desk.confine(path)
    if not folder.is_dir():
        raise NotFound(f"there is no folder {path}", "call list_folder without a path")
    return sorted(f"{one.name}/" if one.is_dir() else one.name for one in folder.iterdir())[:MOST]
