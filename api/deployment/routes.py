"""GET /v1/deployment/stream: the live data of the dashboard."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BeforeValidator, Field
from starlette.responses import Response

from api.deployment.feed import FeedDep, FeedResponse
from api.deployment.view import ViewKey
from api.http.caller import MAX_PUBLIC_ID_CHARS, CallerDep
from api.http.openapi import KEPT, Absent, streamed
from api.http.pagination import QueryModel
from api.jobs.protocol import from_earlier
from api.jobs.routes import find_job
from api.jobs.service import JobsDep
from shared.messages import JobState

router = APIRouter(tags=["Service"])


class FeedQuery(QueryModel):
    """The query of GET /v1/deployment/stream."""

    state: Annotated[JobState, BeforeValidator(from_earlier)] | Absent = Field(
        None, description="Lists only jobs in this state."
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
    state = None if job_id else params.state
    key = ViewKey(caller.scope, caller.tenant, state, job_id, caller.is_operator)
    return FeedResponse(feed, key)
