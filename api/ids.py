"""Public ids: a job's id with the prefix of its dialect; the ids of items and of tool calls."""

from __future__ import annotations

import hashlib
import re
import secrets

from shared.keys import is_job_id

PREFIXES = {
    "chat": "chatcmpl-",
    "completion": "cmpl-",
    "embedding": "embd-",
    "generate": "gen-",
    "message": "msg_",
    "response": "resp_",
}


def public_id(kind: str, job_id: str) -> str:
    """Returns the `id` of the response, which is also the value of `x-request-id`."""
    return PREFIXES.get(kind, "") + job_id


def parse_job_id(text: str) -> str | None:
    """Returns the job id of a public id, with or without its prefix; None for anything else."""
    text = without_prefix(text)
    return text if is_job_id(text) else None


def without_prefix(text: str) -> str:
    """Returns a public id, or its beginning, without the dialect's prefix."""
    for prefix in PREFIXES.values():
        text = text.removeprefix(prefix)
    return text


# Items of a response. "in" marks those of its request: the number counts its input or its output.

_ITEM_ID = re.compile(r"[a-z]+_(.+)_(?:in)?\d+", re.ASCII)


def item_id(prefix: str, job_id: str, index: int, *, is_input: bool = False) -> str:
    """Returns the id of the item at `index` of a response's output, or of its request's input."""
    return f"{prefix}_{job_id}_{'in' if is_input else ''}{index}"


def parse_item_id(text: str) -> str | None:
    """Returns the id of the job whose response has the item; None for another kind of id."""
    match = _ITEM_ID.fullmatch(text)
    return match[1] if match and is_job_id(match[1]) else None


_BYTES = 12


def call_id(seed: str, choice: int, call: int) -> str:
    """Returns `call_` and 24 hexadecimal digits: the same for the same arguments."""
    digest = hashlib.blake2b(f"{seed}/{choice}/{call}".encode(), digest_size=_BYTES)
    return f"call_{digest.hexdigest()}"


def random_seed() -> str:
    """Returns a seed for a response that is formatted once."""
    return secrets.token_hex(_BYTES)


# Mistral's models write ids of nine letters and digits, and its templates take no others. The last
# nine of an id that is made here are the model's where it wrote one, so that the next turn's prompt
# has what the model wrote; what stands before them is unique all the same.
_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
_OWN_ID = re.compile(rf"call_[0-9a-f]{{{2 * _BYTES - 9}}}({_SHORT_ID.pattern})")


def with_short_id(call_id: str, short_id: str) -> str:
    """Returns an id that ends in `short_id`; unchanged where that is no id of nine characters."""
    return call_id[:-9] + short_id if _SHORT_ID.fullmatch(short_id) else call_id


def short_id(call_id: str) -> str | None:
    """Returns the nine characters of an id that was made here, or of one that has no others; None
    for any other id."""
    own = _OWN_ID.fullmatch(call_id)
    if own:
        return own[1]
    return call_id if _SHORT_ID.fullmatch(call_id) else None
