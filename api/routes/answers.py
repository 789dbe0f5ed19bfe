"""What the routes that make jobs have in common."""

from __future__ import annotations

import time

from starlette.requests import Request

from api.frontend import Frontend
from api.openai.schemas import SamplingRequest
from api.request_id import RequestNames, names_of
from shared.messages import InvalidParameter, Job, OnDisconnect, SamplingParams


def check_stream_options(request: SamplingRequest) -> bool:
    """Whether usage is to be streamed. Raises InvalidParameter."""
    options = request.stream_options
    if options is None:
        return False
    if not request.stream:
        raise InvalidParameter("stream_options", "only allowed when 'stream' is true")
    if options.include_obfuscation:
        raise InvalidParameter(
            "stream_options.include_obfuscation", "no padding is sent: it can only be false"
        )
    return bool(options.include_usage)


def new_job(
    request: Request,
    frontend: Frontend,
    *,
    model: str,
    kind: str,
    token_ids: tuple[int, ...],
    sampling: SamplingParams,
    on_disconnect: OnDisconnect,
) -> tuple[Job, RequestNames]:
    """The job that this request is named by."""
    names = names_of(request)
    assert names.job_id is not None, "this route makes jobs"
    job = Job(
        job_id=names.job_id,
        model=model,
        prompt_token_ids=token_ids,
        sampling=sampling,
        kind=kind,
        timeout_ms=max(1, round(frontend.settings.request_timeout_s * 1000)),
        on_disconnect=on_disconnect,
        client_request_id=names.client_request_id,
    )
    return job, names


def now_s() -> int:
    """Unix time, whole: `created` of an answer."""
    return int(time.time())
