"""The job that a request is about to submit: its events are subscribed to while it is prepared.

The server's confirmation, which the submit waits for, mostly is there by then.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from fastapi import Depends
from starlette.requests import Request
from starlette.types import Scope

from api.http.caller import caller_in
from api.jobs.relay import ExpectedStream
from api.jobs.service import JobsDep

_NAME = "expected_job"


async def expect_job(request: Request, jobs: JobsDep) -> AsyncIterator[None]:
    """Subscribes to the events of the job that the request is named by; waits for nothing.

    Runs once the body has been read; the request may still be refused.
    """
    job_id = caller_in(request.scope).job_id
    assert job_id is not None, "this route submits jobs"
    request.scope["state"][_NAME] = await jobs.relay.expect(job_id)
    try:
        yield
    finally:
        expected = request.scope["state"].pop(_NAME, None)
        if expected is not None:
            await expected.aclose()


# The dependencies of a route that submits a job.
SUBMITS_JOB = [Depends(expect_job)]


def take_expected(scope: Scope, job_id: str) -> ExpectedStream | None:
    """Returns what `expect_job` began for this job, once; None: nothing, or another job."""
    expected = scope.get("state", {}).get(_NAME)
    if expected is None or expected.job_id != job_id:
        return None
    del scope["state"][_NAME]
    assert isinstance(expected, ExpectedStream)
    return expected
