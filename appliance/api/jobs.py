"""`/appliance/v1/jobs`, `/appliance/v1/ledger` and `/appliance/v1/runs`.

Knows: paths and answers. Does not know: how jobs run (`appliance.jobs.service`).
"""

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse

from appliance.jobs.service import JobService


class RunRequest(BaseModel):
    """Body of a request to run a job."""

    model_config = ConfigDict(extra="forbid", strict=True)

    slot: str | None = Field(default=None, description='2026-11-30T01:30Z; "due" = the last that fell due; null = this minute.')


def jobs_router(jobs: JobService) -> APIRouter:
    """The routes over `jobs`. Everything behind them reads files and databases, so it runs on threads."""
    router = APIRouter(prefix="/appliance/v1")

    @router.get("/jobs")
    async def list_jobs() -> dict[str, Any]:
        """Every job with its next slot and last run, and the job files that are wrong."""
        return await run_in_threadpool(jobs.overview)

    @router.get("/jobs/{name}")
    async def show_job(name: str) -> dict[str, Any]:
        """One job with its effective grants and budgets."""
        return await run_in_threadpool(jobs.show, name)

    @router.post("/jobs/{name}/runs")
    async def run_job(name: str, body: RunRequest) -> JSONResponse:
        """Ask for a slot: 201 when it is new, 200 with the same run when somebody has asked for it before."""
        posted = await run_in_threadpool(jobs.post, name, body.slot)
        return JSONResponse({**asdict(posted.entry), "created": posted.created}, 201 if posted.created else 200)

    @router.get("/ledger")
    async def read_ledger(job: str | None = None, limit: Annotated[int, Query(ge=1, le=10_000)] = 200) -> dict[str, Any]:
        """Slots, the newest first."""
        return {"entries": await run_in_threadpool(jobs.ledger, job, limit)}

    @router.get("/runs/{run}")
    async def show_run(run: str) -> dict[str, Any]:
        """One run: its ledger row, the recorded calls, the report."""
        return await run_in_threadpool(jobs.run, run)

    return router
