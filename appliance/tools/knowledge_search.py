"""Tool: search the granted documents."""

from typing import Annotated, Any

from pydantic import Field

from appliance.tools.desk import Desk


def knowledge_search(desk: Desk, query: str, limit: Annotated[int, Field(ge=1, le=50)] = 5) -> list[dict[str, Any]]:
    """Search the local documents. Gives the best passages, each with its file and place.

    Args:
        query: what to look for, in plain words.
        limit: how many passages at most.
    """
    return desk.search(query, limit)
