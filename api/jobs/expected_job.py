"""The job that a request is expected to make: its channel is subscribed to while it is prepared.

The server's confirmation, which the submit waits for, then mostly is there already.
"""

from __future__ import annotations

from starlette.types import Scope

from api.http.caller import caller_in
from api.jobs.relay import EventRelay, ExpectedStream

_NAME = "expected_job"


async def expect_job(scope: Scope, relay: EventRelay) -> None:
    """Begins to subscribe to the job that the request is named by; waits for nothing.

    Called for a request that has been read, and may still be refused.
    """
    job_id = caller_in(scope).job_id
    assert job_id is not None, "this route makes jobs"
    scope["state"][_NAME] = await relay.expect(job_id)


def take_expected(scope: Scope, job_id: str) -> ExpectedStream | None:
    """Returns what `expect_job` began for this job, once; None: nothing, or another job."""
    expected = scope.get("state", {}).get(_NAME)
    if expected is None or expected.job_id != job_id:
        return None
    del scope["state"][_NAME]
    assert isinstance(expected, ExpectedStream)
    return expected


async def forget_expected(scope: Scope) -> None:
    """Ends a subscription that nobody has taken. Idempotent."""
    expected = scope.get("state", {}).pop(_NAME, None)
    if expected is not None:
        await expected.aclose()
