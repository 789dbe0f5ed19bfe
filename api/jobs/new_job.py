"""new_job: the job of a request."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

from api.generation.formatter import Formatter, PromptScores, Timing
from api.generation.models import JobDefaults, ServedModel
from api.generation.protocol import JobParameters
from api.http.caller import Caller
from api.on_demand import load_part
from shared.keys import new_job_id, partition_of
from shared.messages import Job, OnDisconnect, SamplingParams

KEYED_RETAIN_MS = 600_000  # at least: how long a response can be requested again by its key
IDEMPOTENCY_HEADER = "idempotency-key"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A validated request: the job to submit, and the formatter of its response."""

    job: Job
    formatter: Formatter[Any]
    timing: Timing = field(default_factory=Timing)
    prompt: PromptScores | None = None  # filled for the formatter, where the job scores its prompt


def new_job(
    caller: Caller,
    defaults: JobDefaults,
    *,
    model: ServedModel,
    kind: str,
    token_ids: tuple[int, ...],
    sampling: SamplingParams,
    on_disconnect: OnDisconnect,
    params: JobParameters,
    num_choices: int = 1,
    lane: int = 0,
) -> Job:
    """Returns the job of the caller's request.

    A job with an idempotency key may be requested again: it outlives its reader for a while, and
    its text is kept as long as its record. Raises InvalidParameter.
    """
    idempotency = caller.idempotency
    assert caller.job_id is not None, "this route makes jobs"
    retain_ms = text_ms = None
    if params.store is not None or params.expires_after is not None:
        retain_ms, text_ms = load_part("retention").retention(params, defaults)
    if idempotency is not None:
        retain_ms = max(retain_ms or 0, KEYED_RETAIN_MS)
    if idempotency is not None and on_disconnect is OnDisconnect.CANCEL:
        on_disconnect = OnDisconnect.GRACE
    return Job(
        job_id=caller.job_id,
        model=model.card.name,
        prompt_digest=model.card.prompt_digest,
        adapter=model.card.name if model.card.parent else "",
        prompt_token_ids=token_ids,
        sampling=sampling,
        kind=kind,
        tenant=caller.tenant,
        lane=lane,
        timeout_ms=max(1, round(defaults.timeout_s * 1000)),
        queue_timeout_ms=_queue_timeout_ms(defaults, params.queue_timeout, on_disconnect),
        on_disconnect=on_disconnect,
        client_request_id=caller.client_request_id,
        num_choices=num_choices,
        retain_ms=retain_ms,
        text_ms=text_ms,
        idempotency=idempotency,
        durability=defaults.durability if params.durability is None else params.durability,
        traceparent=caller.traceparent,
        tracestate=caller.tracestate,
    )


def _queue_timeout_ms(
    defaults: JobDefaults, requested_s: float | None, on_disconnect: OnDisconnect
) -> int | None:
    """Returns the request's; else the default, unless the job continues without readers."""
    if requested_s is None and on_disconnect is not OnDisconnect.CONTINUE:
        requested_s = defaults.queue_timeout_s or None
    return None if requested_s is None else max(1, round(requested_s * 1000))


def sibling(first: Job, index: int, **changes: Any) -> Job:
    """Returns job number `index` (from 1) of the same request: the first but for `changes`."""
    job_id = new_job_id(partition_of(first.job_id))
    if first.idempotency is not None:
        job_id = load_part("idempotency").sibling_id(first.job_id, index)
    return replace(first, job_id=job_id, idempotency=None, **changes)


def now_s() -> int:
    """Returns Unix time in whole seconds: `created` of a response."""
    return int(time.time())
