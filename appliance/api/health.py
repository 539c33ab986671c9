"""`GET /healthz` (the process answers) and `GET /readyz` (a chat would be answered now).

Knows: what ready means. Does not know: who asks.
"""

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool

from appliance.api.settings import ApiSettings
from appliance.bundle.store import Bundle
from appliance.engine.pool import ModelPool
from appliance.errors import NotFound, Unavailable


def health_router(pool: ModelPool, settings: ApiSettings) -> APIRouter:
    """The routes over `pool`; without a preloaded model, being able to find one is ready enough."""
    router = APIRouter()

    @router.get("/healthz")
    async def live() -> dict[str, str]:
        """200 as long as the event loop turns."""
        return {"status": "ok"}

    @router.get("/readyz")
    async def ready() -> dict[str, str]:
        """200 when the default model is loaded, 503 with the reason until then."""
        bundle = await run_in_threadpool(_default, pool)
        name = bundle.manifest.name
        status = pool.status(name)
        if status.condition == "failed":
            raise Unavailable(f'model "{name}" failed to load: {status.failure}', "mend it; the next request tries again")
        if status.condition == "loading" or (settings.preloaded and status.condition == "unloaded"):
            raise Unavailable(f'model "{name}" is being loaded', "ask again soon")
        return {"status": "ready", "model": name}

    return router


def _default(pool: ModelPool) -> Bundle:
    """The default model; without one the appliance is not ready, which is no fault of the one who asks."""
    try:
        return pool.find()
    except NotFound as failure:
        raise Unavailable(failure.what, failure.fix) from None
