"""Admission: puts a job into the queue exactly once, or raises the error of its refusal."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from api.errors import ApiError, store_unreachable, unavailable
from api.request_errors import idempotency_key_reuse, queue_full
from shared.messages import Durability, InvalidParameter, Job, OnDisconnect
from shared.outages import OF_STORE_OUTAGE
from shared.transport.ports.admission import (
    AdmissionLimits,
    DurabilityChecks,
    KeyTaken,
    QueueFull,
    Submission,
    SubmittingStore,
)
from shared.transport.ports.jobs import Restored, Submitted, TransportError

log = logging.getLogger(__name__)

SECOND_TRY_AFTER_S = 0.1
KNOWN_S = 0.5  # for which a full queue counts as full without asking again
_OF_EVERY_JOB = frozenset({"tenant", "tenant_jobs", "total", "memory"})  # scopes of a QueueFull

Result = TypeVar("Result")


class Admission:
    """Submits under the limits of the job's tenant; `cancel` ends a job whose submit failed,
    `keep` remembers one that no reader follows."""

    def __init__(
        self,
        store: SubmittingStore,
        limits_of: Callable[[str], AdmissionLimits],
        cancel: Callable[[str], Awaitable[None]],
        keep: Callable[[Job], None],
        durable: DurableAccept,
    ) -> None:
        self.store = store
        self.limits_of = limits_of
        self._cancel = cancel
        self._keep_job = keep
        self._durable = durable
        self._refused: dict[str, tuple[float, QueueFull]] = {}  # by tenant, until when it holds

    async def submit(self, job: Job, reader_id: str = "", *, confirms: bool = True) -> Submission:
        """Returns when the job is queued. Raises ApiError when it is not.

        `reader_id`: the reader whose disconnect, or whose frontend's death, ends the job by its
        `on_disconnect`; "" for a job without one. Without `confirms` the caller calls `confirm`.

        A submit whose reply was lost may have been accepted: it is repeated once under the same id,
        which is safe, and cancelled when that fails too. So is a job that is not as durable as
        requested in time.
        """
        try:
            await self._durable.check(job.durability)
            limits = self.limits_of(job.tenant)
            submitted = await self._twice(lambda: self.store.submit(job, limits, reader_id))
            if confirms:
                # Retry too: the first try may have ended as a 503, unconfirmed.
                await self._durable.confirm("job", [job.job_id], job.durability)
            if submitted.outcome is Submitted.DUPLICATE and reader_id:
                # Retry: attach this reader, so that the first one's disconnect grace does not
                # cancel the job.
                await self.store.attach([(job.job_id, reader_id)])
            if confirms:
                self._keep(job)
            return submitted
        except QueueFull as error:
            self._refused[job.tenant] = (time.monotonic() + _holds_s(error), error)
            raise queue_full(error) from error
        except KeyTaken as error:
            # Decided at the last moment: another request was faster than our look at the key.
            if error.same_request:
                raise unavailable("An equal request has just been accepted. Try again.") from error
            raise idempotency_key_reuse() from error
        except TransportError as error:
            raise await self._not_accepted(job, error) from error

    def refusal_of(self, tenant: str) -> ApiError | None:
        """Returns the error that a job of the tenant would get now, whatever it is, as far as that
        is known from its last one; None where the queue has to be asked."""
        until_s, error = self._refused.get(tenant, (0.0, None))
        left_s = until_s - time.monotonic()
        if error is None or left_s <= 0:
            self._refused.pop(tenant, None)
            return None
        return queue_full(QueueFull(error.scope, max(left_s, error.retry_after_s - KNOWN_S)))

    async def confirm(self, jobs: Sequence[Job]) -> None:
        """Returns when a request's jobs, submitted without it, are as durable as requested.

        One wait is for all of them. Raises ApiError; the caller cancels the jobs then.
        """
        try:
            await self._durable.confirm("job", [job.job_id for job in jobs], jobs[0].durability)
        except TransportError as error:
            raise await self._not_accepted(jobs[0], error) from error
        for job in jobs:
            self._keep(job)

    def _keep(self, job: Job) -> None:
        if job.on_disconnect is OnDisconnect.CONTINUE:
            self._keep_job(job)

    async def _not_accepted(self, job: Job, error: TransportError) -> ApiError:
        extra = {"job_id": job.job_id, "reason": str(error), **OF_STORE_OUTAGE}
        log.warning("failed to submit a job", extra=extra)
        # By its key it can be requested again, and others may be reading it.
        if job.idempotency is None:
            await self._cancel(job.job_id)
        return (
            unavailable(str(error)) if isinstance(error, NotConfirmed) else store_unreachable(error)
        )

    def resubmit_of(self, job: Job, reader_id: str) -> Callable[[], Awaitable[Restored]]:
        """Returns a function that queues `job` again if Redis loses it after its acceptance.

        No limit applies, and the timeout is the rest of the job's. Durability is not confirmed
        again. It raises TransportError and cancels nothing.
        """
        due_s = time.monotonic() + job.timeout_ms / 1000

        async def resubmit() -> Restored:
            left_ms = round((due_s - time.monotonic()) * 1000)
            return await self.store.submit_again(job, left_ms, reader_id)

        return resubmit

    async def requeue(self, dead_letter_id: str, job: Job) -> str | None:
        """Replaces a dead letter by `job`. Returns the id of the job that replaced it, which may be
        another one, or None where there is no such dead letter.

        The call is repeated once: where its reply was lost, the second one has the job's id. Raises
        UnavailableError when the job could not be queued.
        """
        try:
            limits = self.limits_of(job.tenant)
            taken_by = await self._twice(lambda: self.store.requeue(dead_letter_id, job, limits))
            if taken_by == job.job_id:
                self._keep_job(job)
            return taken_by
        except QueueFull as error:
            raise queue_full(error) from error
        except TransportError as error:
            raise store_unreachable(error) from error

    async def _twice(self, call: Callable[[], Awaitable[Result]]) -> Result:
        try:
            return await call()
        except QueueFull:
            raise
        except TransportError:
            await asyncio.sleep(SECOND_TRY_AFTER_S)
            return await call()


def _holds_s(error: QueueFull) -> float:
    """Returns for how long every job of the tenant gets this refusal; 0: others may not."""
    if error.scope in _OF_EVERY_JOB:
        return KNOWN_S
    requests = next((one for one in error.allowances if one.name == "requests"), None)
    if error.scope != "requests_per_minute" or requests is None:
        return 0.0
    # Until one request of the bucket has filled up.
    return requests.full_in_ms / 1000 - 60 * (requests.per_minute - 1) / requests.per_minute


class NotConfirmed(TransportError):
    """The record is not known to be as durable as requested; it may be there, or not."""


class DurableAccept:
    """Accepts a job or a batch when its record is as durable as requested.

    `default`: the durability of requests that set none. `num_replicas` confirm
    `Durability.REPLICAS`.
    """

    def __init__(
        self, checks: DurabilityChecks, default: Durability, num_replicas: int, timeout_s: float
    ) -> None:
        self._checks = checks
        self.default = default
        self._num_replicas = num_replicas
        self._timeout_s = timeout_s

    async def check(self, durability: Durability) -> None:
        """Checks before anything is written. Raises InvalidParameter where the server can never
        provide the durability of a request, UnavailableError where it cannot now, or where the
        setting requires it."""
        if durability is Durability.NONE:
            return
        fault = await self._checks.durability_fault(durability, self._num_replicas)
        if fault is None:
            return
        if fault.is_lasting and durability is not self.default:
            raise InvalidParameter("durability", f"cannot be '{durability}' here: {fault.sentence}")
        raise unavailable(f"Nothing is accepted as '{durability}' at the moment: {fault.sentence}")

    async def confirm(self, kind: str, names: Sequence[str], durability: Durability) -> None:
        """Returns when the record of each "job" or "batch" is there. Raises NotConfirmed when that
        was not in time, and TransportError."""
        if durability is Durability.NONE:
            return
        is_there = await self._checks.confirm(
            kind, names, durability, self._num_replicas, self._timeout_s
        )
        if not is_there:
            log.warning(
                "Redis did not confirm a record in time; the request was refused",
                extra={"record": names[0], "durability": str(durability)},
            )
            raise NotConfirmed(
                f"Nothing was accepted: the job store did not confirm '{durability}' within "
                f"{self._timeout_s:g} s. Try again."
            )
