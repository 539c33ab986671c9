"""The HTTP application: routers, middleware and errors put together.

Knows: what there is. Does not know: sockets, signals, or how models are loaded.
"""

from fastapi import FastAPI

from appliance.api import errors
from appliance.api.body_limit import BodyLimit
from appliance.api.chat import chat_router
from appliance.api.conversations import conversations_router
from appliance.api.device import device_router
from appliance.api.embeddings import embeddings_router
from appliance.api.health import health_router
from appliance.api.jobs import jobs_router
from appliance.api.knowledge import knowledge_router
from appliance.api.models import models_router
from appliance.api.request_log import RequestLog
from appliance.api.settings import ApiSettings
from appliance.engine.pool import ModelPool
from appliance.jobs.service import JobService
from appliance.knowledge.index import Knowledge
from appliance.store.conversations import Conversations


def create_app(
    pool: ModelPool,
    settings: ApiSettings,
    conversations: Conversations | None = None,
    jobs: JobService | None = None,
    knowledge: Knowledge | None = None,
) -> FastAPI:
    """An application over the models of `pool`. It starts and stops nothing of its own; what is None has no routes."""
    # No docs pages: they load their scripts from the Internet. The document itself is served.
    app = FastAPI(title="appliance", docs_url=None, redoc_url=None, redirect_slashes=False)
    errors.install(app)
    app.include_router(chat_router(pool, settings))
    app.include_router(embeddings_router(pool))
    app.include_router(models_router(pool))
    app.include_router(health_router(pool, settings))
    app.include_router(device_router(pool))
    if conversations is not None:
        app.include_router(conversations_router(conversations))
    if jobs is not None:
        app.include_router(jobs_router(jobs))
    if knowledge is not None:
        app.include_router(knowledge_router(knowledge))
    app.add_middleware(errors.CatchAll)
    app.add_middleware(BodyLimit, limit=settings.max_body)
    app.add_middleware(RequestLog)  # added last, so it is the outermost
    return app
