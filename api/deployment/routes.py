"""GET /v1/deployment/stream: the live data of the dashboard."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import Field
from starlette.responses import Response

from api.deployment.feed import FeedDep, FeedResponse
from api.deployment.view import HistoryRange, ViewKey
from api.http.caller import MAX_PUBLIC_ID_CHARS, CallerDep
from api.http.openapi import KEPT, Absent, streamed
from api.jobs.protocol import JobFilters
from api.jobs.routes import find_job
from api.jobs.service import JobsDep
from shared.transport.ports.job_search import JobFilter

router = APIRouter(tags=["Service"])


class FeedQuery(JobFilters):
    """The query of GET /v1/deployment/stream. The filters are those of GET /v1/jobs."""

    history: HistoryRange = Field(
        "hour",
        description="Lists the last hour in slots of 30 seconds, the last day in slots of ten "
        "minutes, or neither.",
    )
    job: Annotated[str, Field(min_length=1, max_length=MAX_PUBLIC_ID_CHARS)] | Absent = Field(
        None, description="The job to follow instead of the lists."
    )


@router.get("/v1/deployment/stream", response_class=Response, responses=streamed(KEPT))
async def stream_deployment(
    params: Annotated[FeedQuery, Query()], caller: CallerDep, jobs: JobsDep, feed: FeedDep
) -> Response:
    """Streams the state of the deployment: an event `snapshot`, then events `change` with the
    differences, at most one a second. Ends after five minutes, to be requested again."""
    job_id = None
    if params.job is not None:
        job_id = (await find_job(jobs, caller, params.job)).job_id
    wanted = JobFilter(tenant=caller.scope) if job_id else params.wanted(caller)
    history = "none" if job_id else params.history
    key = ViewKey(caller.scope, caller.tenant, wanted, job_id, caller.is_operator, history)
    return FeedResponse(feed, key)
