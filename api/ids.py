"""Public ids: a job's id with a prefix that says which dialect asked for it."""

from __future__ import annotations

import hashlib
import secrets

from shared.keys import partition_of

PREFIXES = {
    "chat": "chatcmpl-",
    "completion": "cmpl-",
    "generate": "gen-",
    "message": "msg_",
    "response": "resp_",
}


def public_id(kind: str, job_id: str) -> str:
    """`id` of the response and value of `x-request-id`."""
    return PREFIXES.get(kind, "") + job_id


def parse_job_id(text: str) -> str | None:
    """The job id of a public id, with or without its prefix; None when it is not one."""
    for prefix in PREFIXES.values():
        text = text.removeprefix(prefix)
    try:
        partition_of(text)
    except ValueError:
        return None
    return text


# Ids of tool calls: unique, and the same whenever the same answer is told again.

_BYTES = 12


def call_id(seed: str, choice: int, call: int) -> str:
    """`call_` and 24 hexadecimal digits."""
    told = hashlib.blake2b(f"{seed}/{choice}/{call}".encode(), digest_size=_BYTES)
    return f"call_{told.hexdigest()}"


def random_seed() -> str:
    """For an answer that is told once."""
    return secrets.token_hex(_BYTES)
