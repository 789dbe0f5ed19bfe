"""StoredResponse: a response read back from its job, on whichever frontend."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any

import msgspec

from api.dependencies import provided
from api.dialects.responses.calls import Item
from api.dialects.responses.formatter import READERS_ERRORS, ResponseFormatter
from api.dialects.responses.record import StoredRequest, decode_request
from api.errors import MAX_ECHO_CHARS
from api.generation.models import ModelCatalog
from api.generation.thread_pool import request_bytes
from api.http.shares import Charge, Pot
from api.http.time_slices import TimeSlices
from api.ids import parse_item_id, parse_job_id
from api.jobs.sent_events import split_long
from api.request_errors import ClientError, job_expired
from shared.messages import START, Delta, ErrorCode, Failed, Finished, InvalidParameter
from shared.text.base import TextInvalid
from shared.transport.ports.jobs import JobRecord, JobStore

log = logging.getLogger(__name__)

PAGE_EVENTS = 1024
PARAM = "previous_response_id"
REFERRER = "input"
MAX_TURNS = 256
MAX_BYTES = 8 * 2**20  # of all their items together, as JSON
# Read for them from Redis: tools, instructions and log probabilities included.
MAX_READ_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """The stored parts of a response, besides its job's log."""

    name: str  # as the caller wrote it
    record: JobRecord
    request: StoredRequest

    @property
    def job_id(self) -> str:
        return self.record.job_id


@dataclass(frozen=True, slots=True)
class ReadResponse:
    """A response read to where its log ends now."""

    payload: dict[str, Any]
    end: Finished | Failed | None


class ResponseStore:
    """Reads stored responses: each is a job with a record and a log."""

    def __init__(
        self,
        jobs: JobStore,
        models: ModelCatalog,
        slices: TimeSlices,
        retain_ms: int,
        reading: Pot,
    ) -> None:
        """`retain_ms`: how long a response is kept after its end. `reading`: bytes of earlier
        turns that are being read."""
        self.retain_ms = retain_ms
        self._reading = reading
        self._jobs = jobs
        self._models = models
        self._slices = slices

    async def find(self, tenant: str, name: str) -> StoredResponse:
        """Raises ClientError (404, also for another tenant's; 410: expired), and TransportError."""
        job_id = parse_job_id(name)
        record = None if job_id is None else await self._jobs.get(job_id)
        if record is None and job_id is not None:
            await self._check_expiry(tenant, job_id)
        if record is None or record.kind != ResponseFormatter.kind or record.tenant != tenant:
            raise response_not_found(name)
        text = await self._jobs.request_record(record.job_id)
        if text is None:  # its request had `store: false`
            raise response_not_found(name)
        try:
            return StoredResponse(name, record, decode_request(text, record.job_id))
        except (KeyError, ValueError) as error:  # of a newer release
            log.error(
                "failed to read the request of a stored response",
                extra={"job_id": record.job_id, "reason": str(error)},
            )
            raise response_not_found(name) from error

    async def _check_expiry(self, tenant: str, job_id: str) -> None:
        """Raises ClientError (410) for a response that has expired."""
        expired = await self._jobs.expired(job_id)
        if expired is not None and expired[:2] == (tenant, ResponseFormatter.kind):
            raise job_expired(expired.message, "response_id")

    async def open(
        self, stored: StoredResponse, starting_after: int | None = None
    ) -> ResponseFormatter:
        """Returns a formatter at the start of the response. Raises as `find`."""
        try:
            model = await self._models.of_card(stored.request.card)
        except TextInvalid as error:  # no worker has announced the model for a day
            log.error(
                "the tokenizer of a stored response's model has expired",
                extra={"job_id": stored.job_id, "reason": str(error)},
            )
            raise response_not_found(stored.name) from error
        return ResponseFormatter(
            stored.request, stored.job_id, model.text.tokenizer, starting_after
        )

    async def read(self, stored: StoredResponse, *, text_only: bool = False) -> ReadResponse:
        """Returns the response object as it is now. Raises as `find`.

        `text_only`: leaves out log probabilities and counts no reasoning tokens; reading the tokens
        takes most of the time.
        """
        formatter = await self.open(stored)
        end = await self._collect(stored.job_id, formatter, text_only=text_only)
        if end is None:
            has_started = stored.record.started_ms is not None
            return ReadResponse(formatter.so_far(has_started=has_started), None)
        if isinstance(end, Failed):
            if end.code == ErrorCode.JOB_EXPIRED:
                raise job_expired(end.message, "response_id")
            if end.code in READERS_ERRORS:
                raise response_not_found(stored.name)
            return ReadResponse(formatter.failed_response(end), end)
        return ReadResponse(formatter.whole(end), end)

    async def earlier_items(self, tenant: str, name: str | None) -> list[Item]:
        """Returns the items of all turns up to the response `name`, its own output last.

        Without a name the list is empty. The size of each response is checked before it is read,
        and counts as a received body until the items are returned. Renews the retention of every
        response of the chain, so that a conversation in use does not expire. Raises ClientError
        (400) when a response of it is gone, has not ended or has failed, InvalidParameter when
        there are too many, UnavailableError where the tenant reads too much at once, and
        TransportError.
        """
        if name is None:
            return []
        with self._reading.take(0) as charge:
            return await self._earlier_items(tenant, name, charge)

    async def _charge(self, charge: Charge, job_id: str, param: str) -> None:
        """Charges the stored size of a response, before it is read. Raises UnavailableError and
        InvalidParameter."""
        charge.grow(await self._jobs.stored_bytes(job_id))
        if charge.amount > MAX_READ_BYTES:
            raise InvalidParameter(
                param, f"the conversation has more than {MAX_READ_BYTES} bytes as stored"
            )

    async def _earlier_items(self, tenant: str, name: str | None, charge: Charge) -> list[Item]:
        turns: list[list[Item]] = []
        job_ids: list[str] = []
        num_bytes = 0
        while name is not None:
            if len(turns) == MAX_TURNS:
                raise InvalidParameter(
                    PARAM, f"the conversation has more than {MAX_TURNS} responses"
                )
            await self._charge(charge, parse_job_id(name) or "", PARAM)
            items, job_id, previous = await self._turn(tenant, name)
            num_bytes += len(msgspec.json.encode(items))
            if num_bytes > MAX_BYTES:
                raise InvalidParameter(PARAM, f"the conversation has more than {MAX_BYTES} bytes")
            turns.append(items)
            job_ids.append(job_id)
            name = previous
        request_bytes.set(request_bytes.get() + num_bytes)
        if job_ids:
            await self._jobs.renew(job_ids)
        return [item for items in reversed(turns) for item in items]

    async def referenced_items(self, tenant: str, item_ids: Sequence[str]) -> dict[str, Item]:
        """Returns the items of stored responses with these ids, by id; each response is read once.

        Each is looked at and charged as in `earlier_items`, and its retention is renewed. Raises
        ClientError when there is no such item (404, also for another tenant's), or its response has
        not ended (400), InvalidParameter when there are too many, UnavailableError where the tenant
        reads too much at once, and TransportError.
        """
        if not item_ids:
            return {}
        with self._reading.take(0) as charge:
            return await self._referenced_items(tenant, item_ids, charge)

    async def _referenced_items(
        self, tenant: str, item_ids: Sequence[str], charge: Charge
    ) -> dict[str, Item]:
        uses = Counter(item_ids)
        named: dict[str, list[str]] = {}  # id of a job -> ids of its response's items
        for item_id in uses:
            job_id = parse_item_id(item_id)
            if job_id is None:
                raise _item_not_found(item_id)
            named.setdefault(job_id, []).append(item_id)
        if len(named) > MAX_TURNS:
            raise InvalidParameter(REFERRER, f"refers to items of more than {MAX_TURNS} responses")
        found: dict[str, Item] = {}
        num_bytes = 0
        for job_id, ids in named.items():
            await self._charge(charge, job_id, REFERRER)
            items = await self._items_by_id(tenant, job_id, ids[0])
            for item_id in ids:
                item = items.get(item_id)
                if item is None:
                    raise _item_not_found(item_id)
                found[item_id] = item
                num_bytes += uses[item_id] * len(msgspec.json.encode(item))
                if num_bytes > MAX_BYTES:
                    raise InvalidParameter(
                        REFERRER, f"the items that it refers to have more than {MAX_BYTES} bytes"
                    )
        request_bytes.set(request_bytes.get() + num_bytes)
        await self._jobs.renew(list(named))
        return found

    async def _items_by_id(self, tenant: str, job_id: str, item_id: str) -> dict[str, Item]:
        """Returns the items of a response, input and output. Raises ClientError, which names
        `item_id`, and TransportError."""
        running = ClientError(
            f"Item with id '{item_id}' belongs to a response that has not ended.",
            code="item_in_progress",
            param=REFERRER,
        )
        stored, read = await self._read_ended(tenant, job_id, _item_not_found(item_id), running)
        return {item["id"]: item for item in (*stored.request.input, *read.payload["output"])}

    async def _read_ended(
        self, tenant: str, name: str, missing: ClientError, running: ClientError
    ) -> tuple[StoredResponse, ReadResponse]:
        """Returns a response that has ended. Raises `missing` or `running`, and TransportError."""
        try:
            stored = await self.find(tenant, name)
            read = await self.read(stored, text_only=True)
        except ClientError as error:
            if error.status not in (404, 410):
                raise
            if error.status == 410:  # its code is known to clients, which send all items again
                missing.message = f"{missing.message} {error.message}"
            raise missing from None
        if read.end is None:
            raise running
        return stored, read

    async def _turn(self, tenant: str, name: str) -> tuple[list[Item], str, str | None]:
        """Returns a response's input and output items, its job's id and the previous response's."""
        missing = ClientError(
            f"Previous response with id '{name[:MAX_ECHO_CHARS]}' not found.",
            code="previous_response_not_found",
            param=PARAM,
        )
        running = ClientError(
            f"Previous response with id '{name[:MAX_ECHO_CHARS]}' has not ended yet.",
            code="previous_response_in_progress",
            param=PARAM,
        )
        stored, read = await self._read_ended(tenant, name, missing, running)
        if isinstance(read.end, Failed):
            raise ClientError(
                f"Previous response with id '{name}' has no output: it is "
                f"{read.payload['status']}.",
                code="previous_response_failed",
                param=PARAM,
            )
        return (
            [*stored.request.input, *read.payload["output"]],
            stored.job_id,
            stored.request.previous_response_id,
        )

    async def _collect(
        self, job_id: str, formatter: ResponseFormatter, *, text_only: bool
    ) -> Finished | Failed | None:
        """Reads the log into the formatter; returns the job's end, if it has ended."""
        cursor = START
        while True:
            events = await self._jobs.read_log(job_id, cursor, PAGE_EVENTS)
            deltas = [event for event in events if isinstance(event, Delta)]
            if deltas:
                cursor = deltas[-1].end
                if text_only:
                    deltas = [delta._replace(token_ids=(), logprobs=None) for delta in deltas]
                await self._slices.run(
                    map(formatter.collect, chain.from_iterable(map(split_long, deltas)))
                )
            for event in events:
                if isinstance(event, Finished | Failed):
                    return event
            if not events:
                return None


def _item_not_found(item_id: str) -> ClientError:
    return ClientError(
        f"Item with id '{item_id[:MAX_ECHO_CHARS]}' not found. Items are kept with a response that "
        "is stored; send other items in full.",
        status=404,
        code="item_not_found",
        param=REFERRER,
    )


def response_not_found(name: str) -> ClientError:
    """Returns a 404, also for other tenants' responses, to hide their existence."""
    return ClientError(
        f"Response with id '{name[:MAX_ECHO_CHARS]}' not found: it never existed, was not stored, "
        "or is no longer kept.",
        status=404,
        code="response_not_found",
        param="response_id",
    )


ResponsesDep = Annotated[ResponseStore, provided(ResponseStore)]
