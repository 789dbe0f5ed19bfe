"""Public ids: a job's id with the prefix of its dialect; and the ids of tool calls."""

from __future__ import annotations

import hashlib
import secrets

from shared.keys import is_job_id

PREFIXES = {
    "chat": "chatcmpl-",
    "completion": "cmpl-",
    "generate": "gen-",
    "message": "msg_",
    "response": "resp_",
}


def public_id(kind: str, job_id: str) -> str:
    """Returns the `id` of the response, which is also the value of `x-request-id`."""
    return PREFIXES.get(kind, "") + job_id


def parse_job_id(text: str) -> str | None:
    """Returns the job id of a public id, with or without its prefix; None for anything else."""
    for prefix in PREFIXES.values():
        text = text.removeprefix(prefix)
    return text if is_job_id(text) else None


_BYTES = 12


def call_id(seed: str, choice: int, call: int) -> str:
    """Returns `call_` and 24 hexadecimal digits: the same for the same arguments."""
    digest = hashlib.blake2b(f"{seed}/{choice}/{call}".encode(), digest_size=_BYTES)
    return f"call_{digest.hexdigest()}"


def random_seed() -> str:
    """Returns a seed for a response that is formatted once."""
    return secrets.token_hex(_BYTES)
