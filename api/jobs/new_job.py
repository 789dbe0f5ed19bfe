"""new_job: the job of a request, and its id, which an idempotency key may decide.

The job id of a request with the header `Idempotency-Key` follows from tenant, key and body. Every
frontend derives the same id, and the store accepts one job of it. Repeated requests attach to that
job and read its log from the start. After a failed job the next try gets the next id.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from dataclasses import dataclass, field, replace
from typing import Any

from api.errors import ClientError, idempotency_key_reuse
from api.generation.formatter import Formatter, Timing
from api.generation.logprobs import ScoredPrompt
from api.generation.models import JobDefaults
from api.http.caller import Caller
from shared.keys import new_job_id
from shared.messages import Durability, Idempotency, Job, OnDisconnect, SamplingParams
from shared.tracing import write_context
from shared.transport.ports.jobs import JobStore

KEYED_RETAIN_MS = 600_000  # how long a response can be requested again by its key
IDEMPOTENCY_HEADER = "idempotency-key"
MAX_KEY_CHARS = 255


@dataclass(frozen=True, slots=True)
class Prepared:
    """A validated request: the job to submit, and the formatter of its response."""

    job: Job
    formatter: Formatter[Any]
    timing: Timing = field(default_factory=Timing)
    prompt: ScoredPrompt | None = None  # filled for the formatter, where the job scores its prompt


def new_job(
    caller: Caller,
    defaults: JobDefaults,
    *,
    model: str,
    prompt_digest: str,
    kind: str,
    token_ids: tuple[int, ...],
    sampling: SamplingParams,
    on_disconnect: OnDisconnect,
    queue_timeout_s: float | None,
    durability: Durability | None,
    num_choices: int = 1,
    lane: int = 0,
) -> Job:
    """Returns the job of the caller's request.

    A job with an idempotency key may be requested again: it outlives its reader for a while, and
    its text is kept as long as its record.
    """
    idempotency = caller.idempotency
    traceparent, tracestate = write_context(caller.trace)
    assert caller.job_id is not None, "this route makes jobs"
    if idempotency is not None and on_disconnect is OnDisconnect.CANCEL:
        on_disconnect = OnDisconnect.GRACE
    return Job(
        job_id=caller.job_id,
        model=model,
        prompt_digest=prompt_digest,
        prompt_token_ids=token_ids,
        sampling=sampling,
        kind=kind,
        tenant=caller.tenant,
        lane=lane,
        timeout_ms=max(1, round(defaults.timeout_s * 1000)),
        queue_timeout_ms=_queue_timeout_ms(defaults, queue_timeout_s, on_disconnect),
        on_disconnect=on_disconnect,
        client_request_id=caller.client_request_id,
        num_choices=num_choices,
        retain_ms=None if idempotency is None else KEYED_RETAIN_MS,
        idempotency=idempotency,
        durability=defaults.durability if durability is None else durability,
        traceparent=traceparent,
        tracestate=tracestate,
    )


def _queue_timeout_ms(
    defaults: JobDefaults, requested_s: float | None, on_disconnect: OnDisconnect
) -> int | None:
    """Returns the request's; else the default, unless the job goes on without readers."""
    if requested_s is None and on_disconnect is not OnDisconnect.CONTINUE:
        requested_s = defaults.queue_timeout_s or None
    return None if requested_s is None else max(1, round(requested_s * 1000))


def sibling(first: Job, index: int, **changes: Any) -> Job:
    """Returns job number `index` (from 1) of the same request: the first but for `changes`."""
    job_id = new_job_id() if first.idempotency is None else sibling_id(first.job_id, index)
    return replace(first, job_id=job_id, idempotency=None, **changes)


def now_s() -> int:
    """Returns Unix time in whole seconds: `created` of a response."""
    return int(time.time())


async def resolve_job_id(
    caller: Caller, store: JobStore, key: str, path: str, body: bytes
) -> Caller:
    """Returns the caller with the job that `key`, the request's idempotency key, stands for.

    Raises ClientError for a key that is malformed or stands for another request, and
    TransportError.
    """
    if not (0 < len(key) <= MAX_KEY_CHARS and key.isascii() and key.isprintable()):
        raise ClientError(
            f"An idempotency key has 1 to {MAX_KEY_CHARS} printable characters.",
            param="Idempotency-Key",
        )
    idempotency = Idempotency(
        key=_digest(caller.tenant.encode(), key.encode()), body=_digest(path.encode(), body)
    )
    kept = await store.kept_key(idempotency.key)
    if kept is None or not kept.is_binding:
        job_id = _job_id(idempotency, "" if kept is None else kept.job_id)
    elif kept.body == idempotency.body:
        job_id = kept.job_id
    else:
        raise idempotency_key_reuse()
    return caller.with_job(job_id, idempotency)


def sibling_id(first_id: str, index: int) -> str:
    """Returns the id of another job of a request: the same each time the request is sent."""
    return _named(_digest(first_id.encode(), str(index).encode()))


def _job_id(idempotency: Idempotency, previous_id: str) -> str:
    parts = (idempotency.key, idempotency.body, previous_id)
    return _named(_digest(*(part.encode() for part in parts)))


def _named(digest: str) -> str:
    """Returns the job id of a digest: a UUID of version 8 (RFC 9562, section 5.8)."""
    value = int(digest[:32], 16)
    value = value & ~(0xF << 76) | 0x8 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    return f"0-{uuid.UUID(int=value)}"


def _digest(*parts: bytes) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "big") + part)
    return whole.hexdigest()
