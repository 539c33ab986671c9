"""`GET /v1/models` and `GET /v1/models/{id}`.

Knows: how an installed bundle and its engine are described to a client. Does not know: how they are loaded.
"""

from datetime import datetime

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool

from appliance.api.wire.models import ModelCard, ModelList
from appliance.bundle.store import Bundle
from appliance.engine.pool import ModelPool


def models_router(pool: ModelPool) -> APIRouter:
    """The routes over the models of `pool`."""
    router = APIRouter()

    @router.get("/v1/models")
    async def list_models() -> ModelList:
        """Every installed model."""
        catalog = await run_in_threadpool(pool.catalog)
        return ModelList(data=[card(pool, bundle) for bundle in catalog.bundles.values()])

    @router.get("/v1/models/{model:path}")
    async def retrieve_model(model: str) -> ModelCard:
        """One model by id or alias; ids may hold slashes."""
        return card(pool, await run_in_threadpool(pool.find, model))

    return router


def card(pool: ModelPool, bundle: Bundle) -> ModelCard:
    """How one model is described."""
    manifest = bundle.manifest
    status = pool.status(manifest.name)
    stats = status.model.engine.stats() if status.model else None
    return ModelCard(
        id=manifest.name,
        created=_unix(manifest.provenance.created),
        condition=status.condition,
        provider=stats.provider if stats else None,
        fallbacks=list(stats.fallbacks) if stats else None,
        context_length=stats.context_length if stats else manifest.context_length,
        scheme=manifest.scheme.name,
        architecture=manifest.architecture,
        parameters=manifest.parameters,
        task=manifest.task,
        system_fingerprint=f"fp_{status.model.fingerprint}" if status.model else None,
    )


def _unix(iso: str) -> int:
    """Seconds of an ISO 8601 time; 0 for one that cannot be read, since a list of models must not fail over a date."""
    try:
        return int(datetime.fromisoformat(iso).timestamp())
    except ValueError:
        return 0
