"""DeploymentFeed: one reader of the store for all dashboards of a frontend, and their streams.

Without viewers nothing is read. With any number of them, each view is read once in a round, and a
round follows the last one after at least ten times what that took, or five seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Annotated

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.dependencies import provided
from api.deployment.reader import DeploymentReader
from api.deployment.view import Content, View, ViewKey
from api.errors import ApiError, going_down
from api.http.open_requests import OpenRequest, OpenRequests
from api.http.shares import SHARE, Charge, Pot
from api.http.sse import BEHIND_KEEPALIVE, KEEPALIVE, EventWriter, event
from api.http.time_slices import TimeSlices
from shared.outages import STORE, RateLimitedOutageLog
from shared.tasks import cancel_and_wait
from shared.transport.ports.jobs import TransportError

log = logging.getLogger(__name__)

ROUND_S = 1.0  # from one round to the next
MIN_REST_S = 0.2  # before a round that a new view does not wait longer for
REST = 10  # times as long as a round took
MAX_REST_S = 5.0  # a round may have waited for a slow server or a busy processor
MAX_ROUND_S = 10.0
MAX_VIEWS = 64
MAX_WATCHERS = 256
WATCH_S = 300.0  # then a client comes again, and its key is looked at again
LOOK_S = 1.0  # between looks whether this frontend shuts down
RETRY_AFTER_S = 10.0


class DeploymentFeed:
    """The open views, read by one task."""

    def __init__(
        self,
        reader: DeploymentReader,
        slices: TimeSlices,
        open_requests: OpenRequests,
        keepalive_s: float,
        share: float = SHARE,
    ) -> None:
        full = "Too many dashboards are open. Try again later."
        self.watchers = Pot(
            "dashboards",
            MAX_WATCHERS,
            share,
            what="open dashboards",
            full=full,
            retry_after_s=RETRY_AFTER_S,
        )
        self.views = Pot(
            "dashboard_views",
            MAX_VIEWS,
            share,
            what="dashboard views",
            full=full,
            retry_after_s=RETRY_AFTER_S,
        )
        self._reader = reader
        self._slices = slices
        self._open_requests = open_requests
        self._keepalive_s = keepalive_s
        # With the number of viewers, and the charge of the first of them.
        self._views: dict[ViewKey, tuple[View, int, Charge]] = {}
        self._wake = asyncio.Event()
        self._reading: asyncio.Task[None] | None = None
        self._outage = RateLimitedOutageLog(
            log,
            failing="failed to update the dashboards; trying again",
            recovered="the dashboards are updated again",
            of=STORE,
        )

    @property
    def num_watchers(self) -> int:
        return self.watchers.num_takers

    @contextlib.contextmanager
    def watch(self, key: ViewKey) -> Iterator[View]:
        """Keeps a view up to date while it is open. Raises UnavailableError (429, 503)."""
        if self._open_requests.is_closing:
            raise going_down(self._open_requests.closed or "")
        with self.watchers.take():
            known = self._views.get(key)
            view, num_watchers, charge = known or (View(), 0, self.views.take())
            self._views[key] = (view, num_watchers + 1, charge)
            if self._reading is None or self._reading.done():
                self._reading = asyncio.create_task(self._run(), name="deployment-feed")
            if not view.version:
                self._wake.set()
            try:
                yield view
            finally:
                view, num_watchers, charge = self._views.pop(key)
                if num_watchers > 1:
                    self._views[key] = (view, num_watchers - 1, charge)
                else:
                    charge.give()

    async def stream(self, view: View, writer: EventWriter, send: Send) -> None:
        """Sends the view and its changes, for at most WATCH_S."""
        await writer.begin(send)
        ends_s = time.monotonic() + WATCH_S
        version = 0
        while time.monotonic() < ends_s and not self._open_requests.is_closing:
            if view.version != version:
                message, version = view.message_since(version), view.version
                await writer.write(send, message)
            elif writer.silence_s >= self._keepalive_s:
                await writer.keep_alive(send)
            await view.wait(version, min(LOOK_S, self._keepalive_s))
        await writer.write(send, b"", more=False)

    async def aclose(self) -> None:
        """Ends the reading."""
        if self._reading is not None:
            await cancel_and_wait(self._reading)

    async def _run(self) -> None:
        """Reads, round after round, until no view is open."""
        while self._views:
            self._wake.clear()
            begun_s = time.monotonic()
            await self._round()
            took_s = time.monotonic() - begun_s
            await asyncio.sleep(min(max(MIN_REST_S, REST * took_s), MAX_REST_S))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, ROUND_S - time.monotonic() + begun_s)):
                    await self._wake.wait()

    async def _round(self) -> None:
        try:
            async with asyncio.timeout(MAX_ROUND_S):
                self._reader.begin_round()
                for key, (view, *_) in list(self._views.items()):
                    await view.update(await self._reader.content(key), self._slices)
            self._outage.succeeded()
            return
        except (TransportError, TimeoutError) as error:
            self._outage.failed(reason=str(error) or type(error).__name__)
        except Exception:
            log.exception("failed to update the dashboards with an unexpected error")
        for key, (view, *_) in list(self._views.items()):
            service = self._reader.service(key, is_read=False)
            await view.update(Content({"service": service}), self._slices)


FeedDep = Annotated[DeploymentFeed, provided(DeploymentFeed)]


class FeedResponse(Response):
    """Streams a view while its client is there."""

    def __init__(self, feed: DeploymentFeed, key: ViewKey) -> None:
        super().__init__()
        self._feed = feed
        self._key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = EventWriter(KEEPALIVE, BEHIND_KEEPALIVE)
        with self._feed.watch(self._key) as view:
            try:
                await OpenRequest().run(receive, lambda: self._feed.stream(view, writer, send))
            except ApiError as error:  # of a revoked key
                if not writer.has_begun:
                    raise
                await writer.write(send, event(error.body()), more=False)
