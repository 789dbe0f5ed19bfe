"""EventRelay: one job's events for one reader, in order, once each, then exactly one end.

Order of opening: subscribe, wait for the confirmation, submit; so no event of the job can precede
its reader. The subscription may be sent before (`expect`), while the job is being made.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from api.generation.prompt_logprobs import ScoredPrompt
from api.jobs.accepted_jobs import PATIENCE_S
from api.jobs.event_stream import JobStream, RelayCounts
from api.jobs.quiet_streams import QuietStreams
from shared.messages import Cursor
from shared.transport.ports.bus import EventBus, Subscription
from shared.transport.ports.jobs import JobStore, Restored, Submitted


class ExpectedStream:
    """A subscription that the server may not have confirmed yet, of a job that may never be."""

    def __init__(self, job_id: str, bus: EventBus, subscription: Subscription) -> None:
        self.job_id = job_id
        self._bus = bus
        self._subscription = subscription

    async def confirmed(self) -> Subscription:
        """Returns once the server confirmed. Raises TransportError, without a subscription then."""
        await self._bus.confirmed(self._subscription)
        return self._subscription

    async def aclose(self) -> None:
        """For a job that will not be."""
        await self._bus.unsubscribe(self._subscription)


class EventRelay:
    """Opens streams over one store and one bus, and looks after those that hear nothing."""

    def __init__(
        self,
        store: JobStore,
        bus: EventBus,
        *,
        silence_s: float = 1.0,
        outage_s: float = 30.0,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`silence_s`: how long a stream hears nothing before its job is looked at. `patience_s`:
        how long a job may be missing before its stream ends as `job_lost`."""
        self._store = store
        self._bus = bus
        self._patience_s = patience_s
        self._outage_s = outage_s
        self._quiet = QuietStreams(store, silence_s=silence_s, outage_s=outage_s)
        self.counts = RelayCounts()

    async def aclose(self) -> None:
        """Streams that are still open are looked after no longer. Idempotent."""
        await self._quiet.aclose()

    async def expect(self, job_id: str) -> ExpectedStream:
        """Begins to subscribe: for an `open` of the same job, else to be closed."""
        return ExpectedStream(job_id, self._bus, await self._bus.begin(job_id))

    async def open(
        self,
        job_id: str,
        after: Cursor,
        submit: Callable[[], Awaitable[object]] | None = None,
        resubmit: Callable[[], Awaitable[Restored]] | None = None,
        prompt: ScoredPrompt | None = None,
        *,
        expected: ExpectedStream | None = None,
    ) -> JobStream:
        """Subscribes, then submits. Raises TransportError, or whatever `submit` raises.

        `prompt` gets the log probabilities of the job's prompt before the stream gives anything;
        None: this reader wants nothing of them.

        `resubmit` queues the job once more where the store has lost it before it gave anything.

        Where `submit` returns ACCEPTED the job is new: what was confirmed before it was made has
        missed nothing, and the log is not read for it. `expected`: see `expect`.
        """
        if expected is None:
            subscription = await self._bus.subscribe(job_id)
        else:
            subscription = await expected.confirmed()
        must_catch_up = False
        try:
            if submit is not None:
                await subscription.get(0.0)  # the RESYNC of the confirmation; later ones stay
                must_catch_up = await submit() is not Submitted.ACCEPTED
        except BaseException:
            await self._bus.unsubscribe(subscription)
            raise
        stream = JobStream(
            job_id,
            after,
            self._store,
            self._bus,
            subscription,
            self.counts,
            self._outage_s,
            resubmit,
            is_behind=must_catch_up,
            patience_s=self._patience_s,
            prompt=prompt,
        )
        self._quiet.add(stream)
        return stream
