"""OpenRequests: the responses in progress, their limit, and their end at shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Annotated, Any

from starlette.types import Receive

from api.dependencies import provided
from api.errors import unavailable
from api.http.caller import disconnect
from api.http.shares import SHARE, Pot
from shared.tasks import cancel_and_wait

RETRY_AFTER_S = 2.0


class Ending(StrEnum):
    """How the work of a response ended."""

    DONE = "done"
    LEFT = "left"  # the client disconnected
    CUT = "cut"  # this frontend is shutting down


class OpenRequest:
    """One response in progress."""

    def __init__(self) -> None:
        self.is_cut = False
        self._working: asyncio.Task[None] | None = None

    def cut(self) -> None:
        """Cancels the work. Idempotent."""
        self.is_cut = True
        if self._working is not None:
            self._working.cancel()

    async def run(self, receive: Receive, work: Callable[[], Coroutine[Any, Any, None]]) -> Ending:
        """Runs `work` until the client disconnects. Raises what `work` or `receive` raises.

        The body of the request must have been received: the next message is the disconnect,
        whatever version of ASGI the server speaks.
        """
        # In a separate task, events resume the work's coroutines only, not those of the framework
        # and the middleware, which wait for it.
        working = asyncio.create_task(work())
        leaving = asyncio.create_task(disconnect(receive))
        self._working = working
        if self.is_cut:
            working.cancel()
        try:
            await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_and_wait(working, leaving)
            self._working = None
        if not working.cancelled():
            working.result()
            return Ending.DONE
        if self.is_cut:
            return Ending.CUT
        leaving.result()  # CancelledError: the work was cancelled from elsewhere
        return Ending.LEFT


class OpenRequests:
    """The responses in progress of this frontend, at most `limit`, of a tenant its share."""

    def __init__(self, limit: int, share: float = SHARE) -> None:
        self.pot = Pot(
            "open_responses",
            limit,
            share,
            what="open responses",
            full="Too many open requests. Try again later.",
        )
        self._open: set[OpenRequest] = set()
        self._closed: str | None = None
        self._held: str | None = None

    def __len__(self) -> int:
        return len(self._open)

    @property
    def closed(self) -> str | None:
        """Returns the message of the 503 that new requests get; None while they are accepted."""
        return self._held if self._closed is None else self._closed

    @property
    def is_closing(self) -> bool:
        """Whether new requests are refused for good."""
        return self._closed is not None

    @contextmanager
    def enter(self) -> Iterator[OpenRequest]:
        """Counts a response while it is open. Raises UnavailableError if closed or full (503), or
        when the tenant has its share (429)."""
        if self.closed is not None:
            raise unavailable(self.closed, RETRY_AFTER_S)
        with self.pot.take():
            request = OpenRequest()
            self._open.add(request)
            try:
                yield request
            finally:
                self._open.discard(request)

    def close(self, why: str) -> None:
        """Refuses new requests for good; open ones continue."""
        self._closed = why

    def hold(self, why: str | None) -> None:
        """Refuses new requests until a call with None."""
        self._held = why

    def cut_all(self) -> None:
        """Ends the open responses, each with its last event."""
        for request in list(self._open):
            request.cut()


OpenRequestsDep = Annotated[OpenRequests, provided(OpenRequests)]
