"""Job ids of requests with the header `Idempotency-Key`.

The id follows from tenant, key and body. Every frontend derives the same id, and the store accepts
one job of it. Repeated requests attach to that job and read its log from the start. After a failed
job the next try gets the next id.
"""

from __future__ import annotations

import hashlib
import uuid

from api.http.caller import Caller
from api.request_errors import ClientError, idempotency_key_reuse
from shared.keys import partition_of
from shared.messages import Idempotency
from shared.transport.ports.admission import SubmittingStore

MAX_KEY_CHARS = 255


async def resolve_job_id(
    caller: Caller, store: SubmittingStore, key: str, path: str, body: bytes
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
        partition = store.partition_for(idempotency.key)
        job_id = _job_id(idempotency, "" if kept is None else kept.job_id, partition)
    elif kept.body == idempotency.body:
        job_id = kept.job_id
    else:
        raise idempotency_key_reuse()
    return caller.with_job(job_id, idempotency)


def sibling_id(first_id: str, index: int) -> str:
    """Returns the id of another job of a request: the same each time the request is sent."""
    digest = _digest(first_id.encode(), str(index).encode())
    return _named(digest, partition_of(first_id))


def _job_id(idempotency: Idempotency, previous_id: str, partition: int) -> str:
    parts = (idempotency.key, idempotency.body, previous_id)
    return _named(_digest(*(part.encode() for part in parts)), partition)


def _named(digest: str, partition: int) -> str:
    """Returns the job id of a digest: a UUID of version 8 (RFC 9562, section 5.8)."""
    value = int(digest[:32], 16)
    value = value & ~(0xF << 76) | 0x8 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    return f"{partition}-{uuid.UUID(int=value)}"


def _digest(*parts: bytes) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "big") + part)
    return whole.hexdigest()
