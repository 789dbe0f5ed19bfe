"""Idempotency keys: which job a request that is sent again belongs to.

A request with the header `Idempotency-Key` is named, before anything else is done with it, by a job
id that follows from tenant, key and body: whoever sends it, to whichever frontend, at whatever
moment, submits the same job, of which the store accepts one. All others attach to it and read its
log from the start. When the job has failed, the next try gets the next id.
"""

from __future__ import annotations

import hashlib
import uuid

from starlette.requests import Request

from api.auth.access import access_of
from api.errors import CallerError, idempotency_key_reuse
from api.http.request_id import names_of, rename
from api.services import services_of
from shared.messages import Idempotency

HEADER = "idempotency-key"
MAX_KEY_CHARS = 255


async def settle_names(request: Request, body: bytes) -> None:
    """Names a request that makes a job by the job that its key stands for, if it has one.

    Raises CallerError for a key that is malformed or stands for another request, and
    TransportError.
    """
    key, names = request.headers.get(HEADER), names_of(request)
    if key is None or names.job_id is None:
        return
    if not (0 < len(key) <= MAX_KEY_CHARS and key.isascii() and key.isprintable()):
        raise CallerError(
            f"An idempotency key has 1 to {MAX_KEY_CHARS} printable characters.",
            param="Idempotency-Key",
        )
    idempotency = Idempotency(
        key=_digest(access_of(request).tenant.encode(), key.encode()),
        body=_digest(request.url.path.encode(), body),
    )
    kept = await services_of(request).store.kept_key(idempotency.key)
    if kept is not None and kept.is_binding:
        if kept.body != idempotency.body:
            raise idempotency_key_reuse()
        job_id = kept.job_id
    else:
        job_id = _job_id(idempotency, "" if kept is None else kept.job_id)
    rename(request, job_id)
    request.scope["state"]["idempotency"] = idempotency


def idempotency_of(request: Request) -> Idempotency | None:
    """After `settle_names`."""
    found = request.scope["state"].get("idempotency")
    assert found is None or isinstance(found, Idempotency)
    return found


def sibling_id(first_id: str, index: int) -> str:
    """The id of another job of the same request: the same for each time it is sent."""
    return _named(_digest(first_id.encode(), str(index).encode()))


def _job_id(idempotency: Idempotency, previous_id: str) -> str:
    said = (idempotency.key, idempotency.body, previous_id)
    return _named(_digest(*(part.encode() for part in said)))


def _named(digest: str) -> str:
    """Version 8 (RFC 9562, section 5.8): what is not random in it is ours."""
    value = int(digest[:32], 16)
    value = value & ~(0xF << 76) | 0x8 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    return f"0-{uuid.UUID(int=value)}"


def _digest(*parts: bytes) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "big") + part)
    return whole.hexdigest()
