"""The earlier turns of a conversation, from the chain of responses that it names."""

from __future__ import annotations

import msgspec

from api.errors import MAX_ECHO_CHARS, CallerError
from api.frontend import Frontend
from api.responses.items import Item
from api.responses.stored import find_response, tell_response
from api.text_pool import request_bytes
from shared.messages import Failed, InvalidParameter

PARAM = "previous_response_id"
MAX_TURNS = 256
MAX_BYTES = 8 * 2**20  # of all their items together, as JSON


async def earlier_items(frontend: Frontend, tenant: str, name: str | None) -> list[Item]:
    """Items of all turns up to the response `name`, its own output last; none without a name.

    The whole chain is kept anew for as long as each of its responses says, so that a conversation
    lives while it goes on. Raises CallerError (400) when a response of it is gone, has not ended or
    has failed, InvalidParameter when there are too many, and TransportError.
    """
    turns: list[list[Item]] = []
    job_ids: list[str] = []
    num_bytes = 0
    while name is not None:
        if len(turns) == MAX_TURNS:
            raise InvalidParameter(PARAM, f"the conversation has more than {MAX_TURNS} responses")
        items, job_id, previous = await _turn(frontend, tenant, name)
        num_bytes += len(msgspec.json.encode(items))
        if num_bytes > MAX_BYTES:
            raise InvalidParameter(PARAM, f"the conversation has more than {MAX_BYTES} bytes")
        turns.append(items)
        job_ids.append(job_id)
        name = previous
    request_bytes.set(request_bytes.get() + num_bytes)
    if job_ids:
        await frontend.store.renew(job_ids)
    return [item for items in reversed(turns) for item in items]


async def _turn(frontend: Frontend, tenant: str, name: str) -> tuple[list[Item], str, str | None]:
    """A response's input and output items, its job's id, and the id of the one before it."""
    try:
        stored = await find_response(frontend, tenant, name)
        told = await tell_response(frontend, stored, text_only=True)
    except CallerError as error:
        if error.status != 404:
            raise
        raise CallerError(
            f"Previous response with id '{name[:MAX_ECHO_CHARS]}' not found.",
            code="previous_response_not_found",
            param=PARAM,
        ) from None
    if told.end is None:
        raise CallerError(
            f"Previous response with id '{name}' has not ended yet.",
            code="previous_response_in_progress",
            param=PARAM,
        )
    if isinstance(told.end, Failed):
        raise CallerError(
            f"Previous response with id '{name}' has no answer: it is {told.payload['status']}.",
            code="previous_response_failed",
            param=PARAM,
        )
    return (
        [*stored.facts.input, *told.payload["output"]],
        stored.job_id,
        stored.facts.previous_response_id,
    )
