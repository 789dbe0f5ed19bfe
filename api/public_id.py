"""Public ids: a job's id with a prefix that says which dialect asked for it."""

from __future__ import annotations

from shared.job_id import partition_of

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
