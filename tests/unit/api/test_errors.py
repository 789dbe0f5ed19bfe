"""Every end of a job and every error code has a status."""

from __future__ import annotations

import pytest

from api.errors import job_failed
from api.request_errors import (
    dead_letter_not_found,
    job_not_found,
    model_not_found,
    queue_full,
)
from shared.messages import (
    START,
    ErrorCode,
    Failed,
    JobState,
    Usage,
)
from shared.transport.ports.admission import QueueFull


@pytest.mark.parametrize(
    ("code", "state", "status", "kind"),
    [
        (ErrorCode.WORKER_LOST, JobState.FAILED, 502, "server_error"),
        (ErrorCode.DEADLINE_EXCEEDED, JobState.EXPIRED, 504, "timeout"),
        (ErrorCode.QUEUE_TIMEOUT, JobState.EXPIRED, 504, "timeout"),
        (ErrorCode.KV_CAPACITY_EXCEEDED, JobState.FAILED, 400, "invalid_request_error"),
        (ErrorCode.JOB_LOST, JobState.FAILED, 503, "service_unavailable"),
        (ErrorCode.CANCELLED, JobState.CANCELLED, 409, "cancelled"),
        ("some_new_reason", JobState.CANCELLED, 409, "cancelled"),
        ("some_new_code", JobState.FAILED, 500, "server_error"),
    ],
)
def test_every_end_of_a_job_has_a_status(
    code: str, state: JobState, status: int, kind: str
) -> None:
    error = job_failed(Failed(START, state, code, "why", Usage(3, 1)), delivered=False)
    assert (error.status, error.kind, error.code) == (status, kind, code)
    again = job_failed(Failed(START, state, code, "", Usage(3, 1)), delivered=True)
    assert again.headers["x-should-retry"] == "false"
    assert again.message


def test_every_error_code_has_a_status() -> None:
    for code in ErrorCode:
        failed = Failed(START, JobState.FAILED, code, "", Usage(1, 1))
        assert 400 <= job_failed(failed, delivered=False).status < 600


def test_retry_after_is_a_whole_number_of_seconds() -> None:
    assert queue_full(QueueFull("total", 0.01)).headers["retry-after"] == "1"
    assert "exceed its queue timeout" in queue_full(QueueFull("queue_timeout", 1.0)).message


def test_an_error_of_something_that_is_not_there_is_a_whole_sentence() -> None:
    for error in (model_not_found("m"), job_not_found("j"), dead_letter_not_found("j")):
        assert error.message.endswith(".")
        assert len(error.message.split()) > 8
