"""`GET /appliance/v1/device`: the machine, the models on it, and what really runs them.

Knows: how the pool's and the system's figures are put together. Does not know: how an engine measures.
"""

import os
from pathlib import Path

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool

from appliance.api.models import card
from appliance.api.wire.device import Device, DeviceModel, Memory, Work
from appliance.bundle.store import Bundle
from appliance.engine.pool import ModelPool
from appliance.errors import NotFound

MEMORY = Path("/proc/meminfo")
OWN_PAGES = Path("/proc/self/statm")


def device_router(pool: ModelPool) -> APIRouter:
    """The route over the models of `pool`."""
    router = APIRouter()

    @router.get("/appliance/v1/device")
    async def show_device() -> Device:
        """What runs here now."""
        return await run_in_threadpool(_device, pool)

    return router


def _device(pool: ModelPool) -> Device:
    try:
        default = pool.find().manifest.name
    except NotFound:
        default = None
    return Device(
        default=default,
        models=[_model(pool, bundle) for bundle in pool.catalog().bundles.values()],
        memory=read_memory(),
    )


def _model(pool: ModelPool, bundle: Bundle) -> DeviceModel:
    loaded = pool.status(bundle.manifest.name).model
    if loaded is None:
        return DeviceModel(card=card(pool, bundle), work=None)
    stats = loaded.engine.stats()
    work = Work(
        running=stats.running,
        waiting=stats.waiting,
        prompt_tokens=stats.prompt_tokens,
        completion_tokens=stats.completion_tokens,
        tokens_per_second=stats.tokens_per_second,
    )
    return DeviceModel(card=card(pool, bundle), work=work)


def read_memory(machine: Path = MEMORY, own: Path = OWN_PAGES) -> Memory:
    """Memory as Linux tells it (proc(5)); on a system without these files nothing is claimed."""
    try:
        lines = (line.split() for line in machine.read_text().splitlines())
        kibibytes = {line[0].rstrip(":"): int(line[1]) for line in lines if len(line) > 1}
        resident = int(own.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return Memory(resident=None, available=None, total=None)
    available, total = (kibibytes.get(name) for name in ("MemAvailable", "MemTotal"))
    return Memory(
        resident=resident,
        available=None if available is None else available * 1024,
        total=None if total is None else total * 1024,
    )
