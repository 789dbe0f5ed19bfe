"""JobService: submits the jobs of routes and relays their events.

SUBMITS_JOB: a route subscribes to the events of its job while it prepares it. The server mostly has
confirmed the subscription by the time of the submit, which waits for that.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Protocol

from fastapi import Depends
from prometheus_client import Counter, Histogram
from starlette.requests import Request

from api.dependencies import provided
from api.http.caller import caller_in
from api.http.open_requests import OpenRequests
from api.http.shares import Pot
from api.http.time_slices import TimeSlices
from api.jobs.admission import Admission
from api.jobs.disconnects import DisconnectTracker
from api.jobs.relay import EventRelay
from shared.messages import ErrorCode
from shared.transport.ports.jobs import CancelResult, JobStore


class JobMetrics(Protocol):
    """What jobs and their responses count: a part of `api.metrics.Metrics`."""

    requests: Counter
    inter_token_s: Histogram
    e2e_s: Histogram
    prompt_tokens: Counter
    generation_tokens: Counter
    disconnects: Counter
    batch_rows: Counter
    cancels_by_request: int

    def first_token(self, kind: str, model: str, num_prompt_tokens: int, ttft_s: float) -> None: ...


@dataclass(frozen=True)
class JobService:
    """The parts of one frontend that jobs go through; made once in `api.services`.

    `frontend_id` contains a UUID and is never reused. `keepalive_s`: seconds of silence after which
    a stream gets a keep-alive comment. `answers`: bytes of whole answers that are not sent yet.
    """

    frontend_id: str
    store: JobStore
    admission: Admission
    relay: EventRelay
    disconnects: DisconnectTracker
    open_requests: OpenRequests
    slices: TimeSlices
    metrics: JobMetrics
    keepalive_s: float
    answers: Pot
    _reader_numbers: Iterator[int] = field(default_factory=partial(itertools.count, 1))

    async def cancel(self, job_id: str) -> CancelResult | None:
        """Cancels a job on request; None: it does not exist. Raises TransportError."""
        result = await self.store.cancel(job_id, ErrorCode.CANCELLED)
        if result is not None and result.won:
            self.metrics.cancels_by_request += 1
        return result

    def new_reader_id(self) -> str:
        """Returns the name of one reader of a job. The part before '#' names the frontend whose
        lease the reader lives by."""
        return f"{self.frontend_id}#{next(self._reader_numbers)}"


JobsDep = Annotated[JobService, provided(JobService)]


async def expect_job(request: Request, jobs: JobsDep) -> AsyncIterator[None]:
    """Subscribes to the events of the job that the request is named by; waits for nothing.

    Runs once the body has been read; the request may still be refused.
    """
    job_id = caller_in(request.scope).job_id
    assert job_id is not None, "this route submits jobs"
    async with jobs.relay.expecting(job_id):
        yield


# The dependencies of a route that submits a job.
SUBMITS_JOB = [Depends(expect_job)]
