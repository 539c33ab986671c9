"""Tool: read a document."""

from typing import Annotated

from pydantic import Field

from appliance.errors import NotFound
from appliance.tools.desk import Desk


def read_file(desk: Desk, path: str, limit: Annotated[int, Field(ge=1, le=100_000)] = 4000) -> str:
    """Read the text of one document in the granted folders.

    Args:
        path: the document's path.
        limit: how many characters at most.
    """
    file = desk.confine(path)
    if not file.is_file():
        raise NotFound(f"there is no file {path}", "see list_folder")
    return desk.read(file)[:limit]
