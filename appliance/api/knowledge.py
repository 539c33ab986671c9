"""`/appliance/v1/knowledge`: index folders, see what is in the index, search it.

Knows: the routes. Does not know: how documents are read or found (`appliance.knowledge`).
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool

from appliance.api.wire.knowledge import IndexAnswer, IndexRequest, KnowledgeAnswer, SearchAnswer, SearchRequest
from appliance.errors import RequestError
from appliance.knowledge.index import Knowledge
from appliance.paths import home_filled

ROUTE = "/appliance/v1/knowledge"


def knowledge_router(knowledge: Knowledge) -> APIRouter:
    """The routes over one index."""
    router = APIRouter()

    @router.get(ROUTE)
    async def show_knowledge() -> KnowledgeAnswer:
        """Every folder and file of the index with its condition."""
        return await run_in_threadpool(_overview, knowledge)

    @router.post(f"{ROUTE}/index")
    async def index_folder(body: IndexRequest) -> IndexAnswer:
        """Bring the index up to date with a folder; answers when that is done."""
        report = await run_in_threadpool(knowledge.index, _absolute(body.folder, "folder"))
        return IndexAnswer.model_validate(plain(asdict(report)))

    @router.post(f"{ROUTE}/search")
    async def search_knowledge(body: SearchRequest) -> SearchAnswer:
        """The passages that fit a question best."""
        folders = None if body.folders is None else [_absolute(one, "folders") for one in body.folders]
        hits = await run_in_threadpool(knowledge.search, body.query, body.limit, folders, body.mode)
        return SearchAnswer.model_validate({"data": [plain(asdict(hit)) for hit in hits]})

    return router


def _overview(knowledge: Knowledge) -> KnowledgeAnswer:
    return KnowledgeAnswer.model_validate(
        {
            "embedder": knowledge.embedder,
            "folders": [plain(asdict(one)) for one in knowledge.folders()],
            "files": [plain(asdict(one)) for one in knowledge.status()],
        }
    )


def _absolute(text: str, param: str) -> Path:
    path = home_filled(text)
    if not path.is_absolute():
        raise RequestError(
            f"{text} is a relative path, and the daemon stands in a folder of its own", "write it in full", param=param
        )
    return path


def plain(value: Any) -> Any:
    """Records as JSON has them: paths as texts."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return str(value) if isinstance(value, Path) else value
