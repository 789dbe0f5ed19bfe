"""A job as the JSON text that is stored under `req:<id>`.

Members that this release does not know are ignored, so a newer frontend may add some; what a reader
must understand to run a job right raises the schema version instead (see docs/WIRE.md).
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from shared.messages import Durability, ErrorCode, Job

SCHEMA_VERSION = 1

_job_decoder = msgspec.json.Decoder(Job)
_encoder = msgspec.json.Encoder()


class PayloadInvalid(ValueError):
    """A stored request that cannot be a job. `code` is what the job fails with."""

    code = ErrorCode.PAYLOAD_INVALID


def encode_job(job: Job) -> bytes:
    """What a worker needs: the job without what is kept beside it."""
    if job.facts or job.idempotency is not None or job.durability is not Durability.NONE:
        job = replace(job, facts="", idempotency=None, durability=Durability.NONE)
    return _encoder.encode(job)


def decode_job(payload: bytes) -> Job:
    """Raises PayloadInvalid with a sentence for anything that is not a valid job."""
    try:
        return _job_decoder.decode(payload)
    except (ValueError, RecursionError) as error:  # msgspec's errors and ours are ValueErrors
        raise PayloadInvalid(f"The stored request is malformed: {error}") from error
