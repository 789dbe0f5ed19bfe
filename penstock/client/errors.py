"""Errors of a client. The text of an error is the service's own sentence.

PenstockError
├── Unreachable         nothing answers, or what answered ended the connection
├── Refused             an error response: status, code, param
│   ├── InvalidRequest  the request is wrong: 400 and others
│   ├── NotPermitted    no key, or not with this key: 401, 403
│   ├── NotFound        no such job, model, file: 404
│   ├── Gone            the job has ended, and it or its text has expired: 410
│   └── Overloaded      too much, or not now: 429, 503
├── JobFailed           the job ended with an error: code, job_id
│   ├── JobCancelled    it was cancelled, or no reader was left
│   └── JobExpired      its deadline or its queue timeout passed
└── StreamLost          the stream cannot be resumed reliably
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

# Status codes without `x-should-retry` for which a retry may succeed.
_PASSING = frozenset({408, 429, 500, 502, 503, 504})
_CANCELLED = frozenset({"cancelled", "disconnected", "orphaned"})
_EXPIRED = frozenset({"deadline_exceeded", "queue_timeout"})


class PenstockError(Exception):
    """`may_pass`: the same request may succeed later; a client tries it again by itself."""

    def __init__(
        self, message: str, *, code: str | None = None, job_id: str = "", may_pass: bool = False
    ) -> None:
        super().__init__(message)
        self.code = code
        self.job_id = job_id
        self.may_pass = may_pass
        self.retry_after_s: float | None = None


class Unreachable(PenstockError):
    """Nothing answers, or the connection was lost. A job that was accepted continues.

    `is_unsent`: there was no connection, so the service has nothing of the request.
    """

    def __init__(self, message: str, job_id: str = "", *, is_unsent: bool = False) -> None:
        super().__init__(message, job_id=job_id, may_pass=True)
        self.is_unsent = is_unsent


class Refused(PenstockError):
    """An error response. `kind` is its `type`, `param` names the parameter at fault."""

    def __init__(
        self,
        message: str,
        status: int,
        error: Mapping[str, Any],
        headers: Mapping[str, str],
    ) -> None:
        should_retry = headers.get("x-should-retry")
        may_pass = status in _PASSING if should_retry is None else should_retry == "true"
        super().__init__(message, code=error.get("code"), may_pass=may_pass)
        self.status = status
        self.kind: str | None = error.get("type")
        self.param: str | None = error.get("param")
        self.request_id = headers.get("x-request-id")
        self.retry_after_s = _seconds(headers.get("retry-after"))


class InvalidRequest(Refused):
    """The request cannot be served as it is."""


class NotPermitted(Refused):
    """The service asks for a key, or the key does not permit this."""


class NotFound(Refused):
    """There is no such job, model or file, or it belongs to another tenant."""


class Gone(Refused):
    """The job has ended, and its record or its text is no longer stored; `code` is `job_expired`.
    The message has the time, and which setting keeps it longer."""


class Overloaded(Refused):
    """A limit was reached, or the service cannot accept requests now."""


class JobFailed(PenstockError):
    """The job ended, and not with a whole answer."""


class JobCancelled(JobFailed):
    """It was cancelled, or had no reader for too long."""


class JobExpired(JobFailed):
    """It did not end, or did not begin, in its time."""


class StreamLost(PenstockError):
    """The job, or what its log had, is gone: nothing can be read that surely continues."""


def refusal(status: int, content: bytes, headers: Mapping[str, str], url: str) -> Refused:
    """Returns the error of an error response."""
    try:
        error = json.loads(content)["error"]
        message = str(error["message"])
    except (ValueError, LookupError, TypeError):
        error, message = {}, f"{url} answered with status {status}."
    kinds: dict[int, type[Refused]] = {
        401: NotPermitted,
        403: NotPermitted,
        404: NotFound,
        410: Gone,
        429: Overloaded,
        503: Overloaded,
    }
    fallback: type[Refused] = InvalidRequest if 400 <= status < 500 else Refused
    return kinds.get(status, fallback)(message, status, error, headers)


def job_failure(
    message: str, code: str | None, job_id: str, *, may_pass: bool = False
) -> JobFailed:
    """Returns the error of a job that ended otherwise than with its answer."""
    kind: type[JobFailed] = JobExpired if code in _EXPIRED else JobFailed
    if code in _CANCELLED:
        kind = JobCancelled
    return kind(message, code=code, job_id=job_id, may_pass=may_pass)


def stream_loss(message: str, code: str | None, job_id: str) -> PenstockError:
    """Returns the error of a stream that lacks the rest of its text: it has expired, or is lost."""
    if code != "job_expired":
        return StreamLost(message, code=code, job_id=job_id)
    gone = Gone(message, 410, {"code": code}, {})
    gone.job_id = job_id
    return gone


def _seconds(value: str | None) -> float | None:
    """Returns the seconds of `Retry-After`; None for a date, which the service does not send."""
    try:
        return None if value is None else float(value)
    except ValueError:
        return None
