"""OpenRequests: the answers in progress, their bound, and how they end when the process must."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Annotated

import anyio
from starlette.types import Receive

from api.dependencies import provided
from api.errors import overloaded, unavailable

RETRY_AFTER_S = 2.0


class Ending(StrEnum):
    """How the work of an answer ended."""

    DONE = "done"
    LEFT = "left"  # the client went away
    CUT = "cut"  # this frontend is going down


class OpenRequest:
    """One answer in progress."""

    def __init__(self) -> None:
        self.is_cut = False
        self._scope: anyio.CancelScope | None = None

    def cut(self) -> None:
        """Ends the work from outside. Idempotent."""
        self.is_cut = True
        if self._scope is not None:
            self._scope.cancel()

    async def run(self, receive: Receive, work: Callable[[], Awaitable[None]]) -> Ending:
        """Does `work` while the client is there. Raises what `work` raises.

        The body of the request must have been received: the next message is the disconnect,
        whatever version of ASGI the server speaks.
        """
        has_left = False
        failure: Exception | None = None
        async with anyio.create_task_group() as group:
            self._scope = group.cancel_scope
            if self.is_cut:
                group.cancel_scope.cancel()

            async def watch() -> None:
                nonlocal has_left
                while (await receive())["type"] != "http.disconnect":
                    pass
                has_left = True
                group.cancel_scope.cancel()

            group.start_soon(watch)
            try:
                await work()
            except Exception as error:  # carried out of the group, which would wrap it
                failure = error
            group.cancel_scope.cancel()
        self._scope = None
        if failure is not None:
            raise failure
        if has_left:
            return Ending.LEFT
        return Ending.CUT if self.is_cut else Ending.DONE


class OpenRequests:
    """All of this frontend."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._open: set[OpenRequest] = set()
        self._closed: str | None = None
        self._held: str | None = None

    def __len__(self) -> int:
        return len(self._open)

    @property
    def closed(self) -> str | None:
        """Why no new ones are let in, as a sentence."""
        return self._held if self._closed is None else self._closed

    @contextmanager
    def enter(self) -> Iterator[OpenRequest]:
        """Raises UnavailableError (503) once closed, or when too many are open."""
        if self.closed is not None:
            raise unavailable(self.closed, RETRY_AFTER_S)
        if len(self._open) >= self._limit:
            raise overloaded("Too many requests are open here. Try again later.", RETRY_AFTER_S)
        request = OpenRequest()
        self._open.add(request)
        try:
            yield request
        finally:
            self._open.discard(request)

    def close(self, why: str) -> None:
        """Lets no new ones in; those that are open go on."""
        self._closed = why

    def hold(self, why: str | None) -> None:
        """Lets no new ones in until the next call with None."""
        self._held = why

    def cut_all(self) -> None:
        for request in list(self._open):
            request.cut()


OpenRequestsDep = Annotated[OpenRequests, provided(OpenRequests)]
