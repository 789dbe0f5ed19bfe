"""RowTask: runs one row of a batch, from its line of the input to its line of the output.

A row is a request of one of the endpoints that a batch may name.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

from api.batches.input import Row
from api.batches.lease import BatchLease, StopReason
from api.batches.results import RowResult, error_line, expiry_line, output_pieces
from api.dialects.chat.protocol import ChatRequest
from api.dialects.chat.request import prepare_chat
from api.dialects.completions.protocol import CompletionRequest
from api.dialects.completions.request import prepare_completion
from api.dialects.embeddings.protocol import EmbeddingRequest
from api.dialects.embeddings.request import prepare_embedding
from api.dialects.responses.protocol import ResponseRequest
from api.dialects.responses.request import prepare_response
from api.dialects.responses.store import ResponseStore
from api.errors import ApiError, UnavailableError, internal_error, job_failed
from api.files.storage import FileStorage
from api.generation.formatter import PromptScores
from api.generation.ignored_parameters import IgnoredMembers, request_ignored
from api.generation.models import GenerationService
from api.generation.protocol import RequestModel
from api.generation.thread_pool import TextPool, request_bytes
from api.generation.validation import parse_json, parse_request
from api.http.caller import Caller
from api.http.shares import Payer, payer
from api.http.traces import trace_end, trace_generation
from api.ids import public_id
from api.jobs.event_stream import JobStream, StreamInterrupted
from api.jobs.new_job import Prepared
from api.jobs.sent_events import split_long
from api.jobs.service import JobService
from api.request_errors import invalid_parameter, unsupported
from shared.backoff import Backoff
from shared.keys import NUM_LANES
from shared.messages import (
    START,
    Cursor,
    Delta,
    ErrorCode,
    Failed,
    Finished,
    InvalidParameter,
    JobState,
    OnDisconnect,
)
from shared.tracing import INVALID_SPAN, Span, Tracing, write_context
from shared.transport.ports.admission import AdmissionLimits, QueueFull
from shared.transport.ports.batches import BatchStore
from shared.transport.ports.files import FileIndex
from shared.transport.ports.jobs import Restored, TransportError

log = logging.getLogger(__name__)

LANE = NUM_LANES - 1  # after every interactive job
STOP_CHECK_S = 1.0
FIRST_RETRY_S = 0.1
MAX_BATCH_ROWS = 1_000_000  # 20 bytes each while the input is validated
MAX_RETRY_S = 5.0
MAX_PREPARING = 2  # rows of all batches that are tokenized at once
MAX_JOBS = 3  # of one row, where they are lost, expired unseen, or the model is replaced
_ANEW = frozenset(
    {
        ErrorCode.JOB_LOST,
        ErrorCode.JOB_EXPIRED,
        ErrorCode.STREAM_DIVERGED,
        ErrorCode.MODEL_REPLACED,
    }
)
# Their records are still there, under the id that the next job has.
_FORGOTTEN = frozenset({ErrorCode.JOB_LOST, ErrorCode.JOB_EXPIRED, ErrorCode.MODEL_REPLACED})
REPLACED_RETRY_S = 3.0  # after which every frontend has the card of the model that is served now


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A route that a batch may name."""

    kind: str  # of its jobs
    schema: type[RequestModel]
    prepare: Callable[[Caller, Any], Awaitable[Prepared]]

    def parse(self, body: bytes, ignored: IgnoredMembers) -> Any:
        """Returns a row's body as the route's request; collects ignored parameters in `ignored`.

        Raises ClientError and InvalidParameter, as the route does. CPU-bound: run it in the pool.
        """
        request = parse_request(parse_json(body), self.schema, ignored)
        for name in ("stream", "background"):
            if getattr(request, name, False):
                raise InvalidParameter(name, "cannot be true in a batch")
        if getattr(request, "queue_timeout", None) is not None:
            raise unsupported("queue_timeout", "a row of a batch may wait until the batch expires")
        if getattr(request, "durability", None) is not None:
            raise unsupported("durability", "belongs to the batch, not to its rows")
        return request


def make_endpoints(
    generation: GenerationService, responses: ResponseStore
) -> Mapping[str, Endpoint]:
    """Returns the endpoints by path: exactly ENDPOINT_PATHS."""

    async def response(caller: Caller, request: ResponseRequest) -> Prepared:
        return Prepared(*await prepare_response(generation, responses, caller, request))

    return {
        "/v1/chat/completions": Endpoint("chat", ChatRequest, partial(prepare_chat, generation)),
        "/v1/completions": Endpoint(
            "completion", CompletionRequest, partial(prepare_completion, generation)
        ),
        "/v1/embeddings": Endpoint(
            "embedding", EmbeddingRequest, partial(prepare_embedding, generation)
        ),
        "/v1/responses": Endpoint("response", ResponseRequest, response),
    }


@dataclass(frozen=True, slots=True)
class BatchBounds:
    """Limits of each batch that a frontend runs."""

    lease_ms: int
    max_rows: int
    max_in_flight: int  # rows
    max_line_bytes: int


@dataclass(frozen=True, slots=True)
class RunContext:
    """The parts of a frontend that its batches share."""

    jobs: JobService
    pool: TextPool
    batches: BatchStore
    index: FileIndex
    storage: FileStorage
    endpoints: Mapping[str, Endpoint]  # by path
    bounds: BatchBounds
    refuse_unused_parameters: bool
    tracing: Tracing = field(default_factory=Tracing)
    preparing: asyncio.Semaphore = field(  # bounds the threads that tokenize prompts
        default_factory=lambda: asyncio.Semaphore(MAX_PREPARING)
    )


@dataclass(frozen=True, slots=True)
class RowContext:
    """What the rows of one batch share while one frontend runs them."""

    run: RunContext
    endpoint: Endpoint
    tenant: str
    lease: BatchLease
    # One row at a time waits for the queue, in the file's order.
    submitting: asyncio.Lock = field(default_factory=asyncio.Lock)


class RowTask:
    """Runs one row.

    `job_id` is derived from the batch and the line: a later owner of the batch finds the job of an
    earlier one by it. `may_exist`: an earlier owner may have submitted the job.
    """

    def __init__(
        self, context: RowContext, row: Row, line: int, job_id: str, *, may_exist: bool
    ) -> None:
        self._context = context
        self._row = row
        self._line = line
        self._job_id = job_id
        self._request_id = public_id(context.endpoint.kind, job_id)
        self._may_exist = may_exist
        self._ignored = IgnoredMembers()
        self._span: Span = INVALID_SPAN

    async def run(self) -> RowResult:
        """Returns the row's result. Raises nothing but CancelledError."""
        self._span = self._context.run.tracing.begin("batch row")
        try:
            return await self._run()
        except ApiError as error:
            return self._refused(error)
        except InvalidParameter as error:
            return self._refused(invalid_parameter(error))
        except Exception:
            log.exception(
                "a batch row failed with an unexpected error", extra={"job_id": self._job_id}
            )
            return self._refused(internal_error())
        finally:
            self._span.end()

    def expired(self) -> RowResult:
        """Returns the result of a row that did not run before the batch expired."""
        text = expiry_line(self._row.custom_id, self._job_id)
        return RowResult(self._line, self._job_id, text)

    async def _run(self) -> RowResult:
        for num_jobs in itertools.count(1):
            prepared = await self._prepare()
            if prepared is None:
                if self._may_exist:
                    await self._cancel()
                return self._stopped()
            trace_generation(self._span, (prepared.job,), self._request_id)
            end = await self._run_job(prepared)
            if end is None:
                return self._stopped()
            trace_end(self._span, prepared.job.model, end, prepared.timing.ttft_ms)
            if isinstance(end, Finished):
                body = prepared.formatter.whole(end)
                line = output_pieces(
                    self._row.custom_id, self._job_id, self._request_id, body, self._ignored.text
                )
                text = await self._context.run.jobs.slices.joined(line)
                return RowResult(self._line, self._job_id, text, True, end.usage)
            if end.code not in _ANEW or num_jobs == MAX_JOBS:
                return self._failed(end)
            log.warning("restarted a batch row", extra={"job_id": self._job_id, "reason": end.code})
            if end.code in _FORGOTTEN and not await self._forget():
                return self._stopped()
        raise AssertionError("unreachable")

    async def _prepare(self) -> Prepared | None:
        """Returns the row's job, not submitted yet; None when the batch stops first.

        Retries while no worker serves the model or the thread pool is full. Raises ApiError and
        InvalidParameter for a row that the endpoint refuses.
        """
        context, backoff = self._context, _backoff()
        client_id = _shown(self._row.custom_id)
        traceparent, tracestate = write_context(self._span.get_span_context())
        caller = Caller(
            self._request_id,
            self._job_id,
            client_id,
            context.tenant,
            traceparent=traceparent,
            tracestate=tracestate,
        )
        while True:
            try:
                async with context.run.preparing:
                    payer.set(Payer(context.tenant))
                    request_bytes.set(len(self._row.body))  # `prepare` adds earlier turns to it
                    request = await self._parse()
                    return await context.endpoint.prepare(caller, request)
            except (UnavailableError, TransportError):
                if context.lease.stop.reason is not None and not self._may_exist:
                    return None
                if await context.lease.stop.wait(backoff.next_s()):
                    return None

    async def _parse(self) -> Any:
        """Returns the row's request. Raises ApiError, InvalidParameter."""
        self._ignored = IgnoredMembers(refuse=self._context.run.refuse_unused_parameters)
        request_ignored.set(self._ignored)
        return await self._context.run.pool.run(
            self._context.endpoint.parse, self._row.body, self._ignored
        )

    async def _run_job(self, prepared: Prepared) -> Finished | Failed | None:
        """Submits the job and returns its end, with all deltas collected by the formatter.

        None when the batch stops before the job exists.
        """
        stream = await self._submit(prepared)
        while stream is not None:
            try:
                return await self._read(stream, prepared)
            except StreamInterrupted:
                stream = await self._open(stream.cursor, prepared.prompt)
        return None

    async def _read(self, stream: JobStream, prepared: Prepared) -> Finished | Failed:
        is_cancelled = False
        try:
            while True:
                event = await stream.get(STOP_CHECK_S)
                if isinstance(event, Delta):
                    prepared.timing.token_came()
                    parts = split_long(event)
                    await self._context.run.jobs.slices.run(map(prepared.formatter.collect, parts))
                elif event is not None:
                    return event
                if self._context.lease.stop.reason is not None and not is_cancelled:
                    is_cancelled = await self._cancel() is not None
        finally:
            await stream.aclose()

    async def _submit(self, prepared: Prepared) -> JobStream | None:
        """Returns the stream of the job, submitted here or by an earlier owner of the batch.

        Retries while the queue is full or the store is away. None when the batch stops before the
        job exists.
        """
        context, backoff = self._context, _backoff()
        row = dataclasses.replace(
            prepared.job,
            lane=LANE,
            on_disconnect=OnDisconnect.CONTINUE,
            queue_timeout_ms=None,  # a row may wait until the batch expires
        )

        async def submit() -> None:
            prepared.timing.submitted_s = time.monotonic()
            job = dataclasses.replace(row, timeout_ms=max(1, context.lease.time_left_ms()))
            limits = context.run.jobs.admission.limits_of(job.tenant)
            limits = halved_limits(limits, len(job.prompt_token_ids))
            await context.run.jobs.admission.store.submit(job, limits, "")

        async def resubmit() -> Restored:
            store = context.run.jobs.admission.store
            return await store.submit_again(row, context.lease.time_left_ms())

        async with context.submitting:
            while context.lease.stop.reason is None:
                try:
                    return await context.run.jobs.relay.open(
                        self._job_id, START, submit, resubmit, prepared.prompt
                    )
                except QueueFull as full:
                    delay_s = random.uniform(0.5, 1.0) * min(full.retry_after_s, MAX_RETRY_S)
                except TransportError:
                    delay_s = backoff.next_s()
                    self._may_exist = True  # the store may have run a submit whose reply was lost
                await context.lease.stop.wait(delay_s)
        if not self._may_exist or await self._cancel() is False:
            return None
        return await self._open(START, prepared.prompt)

    async def _open(self, after: Cursor, prompt: PromptScores | None) -> JobStream:
        """Returns the stream of the job that exists; retries while the store is away."""
        backoff = _backoff()
        while True:
            try:
                return await self._context.run.jobs.relay.open(self._job_id, after, prompt=prompt)
            except TransportError:
                await backoff.wait()

    async def _cancel(self) -> bool | None:
        """Cancels the job. Returns whether it exists; None while Redis is unavailable."""
        try:
            result = await self._context.run.jobs.store.cancel(self._job_id, ErrorCode.CANCELLED)
        except TransportError:
            return None
        return result is not None

    async def _forget(self) -> bool:
        """Deletes the ended job, so that its id can be used again. False: the batch stops first."""
        if await self._context.lease.stop.wait(REPLACED_RETRY_S):
            return False
        backoff = _backoff()
        while True:
            try:
                await self._context.run.jobs.store.forget(self._job_id)
                return True
            except TransportError:
                if await self._context.lease.stop.wait(backoff.next_s()):
                    return False

    def _stopped(self) -> RowResult:
        """Returns the result of a row that has none when the batch stops."""
        if self._context.lease.stop.reason is StopReason.EXPIRE:
            return self.expired()
        return RowResult(self._line, self._job_id)

    def _failed(self, end: Failed) -> RowResult:
        if self._context.lease.stop.reason is not None and end.state is JobState.CANCELLED:
            return self._stopped()
        if end.state is JobState.EXPIRED:  # the job's deadline is the batch's
            return self.expired()
        return self._refused(job_failed(end, delivered=False))

    def _refused(self, error: ApiError) -> RowResult:
        text = error_line(
            self._row.custom_id, self._job_id, self._request_id, error, self._ignored.text
        )
        return RowResult(self._line, self._job_id, text)


def _backoff() -> Backoff:
    return Backoff(FIRST_RETRY_S, MAX_RETRY_S, jitter=0.5)


def _shown(custom_id: str) -> str | None:
    """Returns the id that logs show as the client's; None if it is not printable ASCII."""
    return custom_id if custom_id.isascii() and custom_id.isprintable() else None


def halved_limits(limits: AdmissionLimits, prompt_tokens: int) -> AdmissionLimits:
    """Returns the limits of batches: half of each, so that the other half is left to others.

    A prompt that is larger than half of a limit waits for an empty queue.
    """
    bounds = {field.name: getattr(limits, field.name) for field in fields(limits)}
    halves = {name: max(1, bound // 2) for name, bound in bounds.items() if isinstance(bound, int)}
    for name in ("max_queued_tokens", "max_queued_tokens_per_tenant"):
        if name in halves:
            halves[name] = max(halves[name], prompt_tokens)
    return replace(limits, **halves)
