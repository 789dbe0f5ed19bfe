"""Upstreams: the servers that compute, which of them gets a request, and how it is sent."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import httpx2

from worker.engine.request import EngineRequest
from worker.engines.http.finding import CONNECT_TIMEOUT_S, MAX_ERROR_CHARS, Found, KeyFile
from worker.engines.http.options import UpstreamAddress
from worker.engines.http.servers import END, LENGTH, Piece
from worker.model.errors import ModelError

FIRST_TOKEN_TIMEOUT_S = 600.0  # it may have a queue of its own
TOKEN_TIMEOUT_S = 60.0
PROBE_INTERVAL_S = 0.5
MAX_EVENT_BYTES = 4 * 2**20

_BUSY = frozenset({408, 425, 429})
_AWAY = frozenset({401, 403, 404, 502, 503, 504})  # its key, its model or its process

log = logging.getLogger(__name__)


class UpstreamBroke(Exception):
    """The upstream did not complete the request; the same or another one may continue it."""

    def __init__(self, message: str, *, is_blamed: bool = True, is_down: bool = True) -> None:
        super().__init__(message)
        self.is_blamed = is_blamed  # the request may have caused it, or another one there
        self.is_down = is_down  # the upstream is to be looked at before further requests


class UpstreamRefused(Exception):
    """The upstream rejected the request itself; so would any other."""


@dataclass(eq=False)
class Upstream:
    """One server. From a failure until it is found again, it gets no new requests."""

    address: UpstreamAddress
    found: Found | None = None  # None: it never answered
    num_running: int = 0
    num_lost: int = 0  # that ran when it failed
    is_up: bool = False
    failure: str = ""  # the last one
    probe: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        return self.address.url

    def body(
        self, request: EngineRequest, most_tokens: int, eos_token_ids: Set[int]
    ) -> dict[str, Any]:
        """Returns the body of a request, as the server expects it. Raises RequestRefused."""
        assert self.found is not None, "it is up"
        return self.found.server.body(request, self.found.model, most_tokens, eos_token_ids)


class Upstreams:
    """All of one worker. Made and used in one event loop, except for `outage_s` and `failures`."""

    def __init__(
        self,
        find: Callable[[httpx2.AsyncClient, str], Awaitable[Found]],
        found: Mapping[UpstreamAddress, Found | None],
        key: KeyFile,
        max_running: int,
        encode: Callable[[str], Sequence[int]],
    ) -> None:
        """`find` looks at the server of a URL; it raises ModelError or OSError. `encode`: see
        Server.reader."""
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=max_running)
        self._http = httpx2.AsyncClient(limits=limits)
        self._find = find
        self._key = key
        self._encode = encode
        self._available = asyncio.Event()
        self._down_since_s: float | None = None
        self._all = [
            Upstream(address, one, is_up=one is not None) for address, one in found.items()
        ]
        for upstream in self._all:
            if not upstream.is_up:
                upstream.probe = asyncio.create_task(self._until_up(upstream))

    async def aclose(self) -> None:
        """Cancels all that uses the upstreams, and closes their connections."""
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:  # one may start another
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await self._http.aclose()

    async def choose(self) -> Upstream:
        """Returns the upstream with the fewest requests for its weight; waits until one is up."""
        while not (up := [upstream for upstream in self._all if upstream.is_up]):
            self._available.clear()
            await self._available.wait()
        return min(up, key=lambda upstream: (upstream.num_running + 1) / upstream.address.weight)

    def outage_s(self) -> float:
        """Returns for how many seconds no upstream has been up."""
        since_s = self._down_since_s  # the event loop may change it meanwhile
        return 0.0 if since_s is None else time.monotonic() - since_s

    @property
    def failures(self) -> str:
        """The last failure of each upstream that is down, for an error message."""
        return "; ".join(f"{one.url}: {one.failure}" for one in self._all if not one.is_up)

    async def generate(
        self,
        upstream: Upstream,
        body: Mapping[str, Any],
        num_top: int | None,
    ) -> AsyncGenerator[Piece]:
        """Yields the tokens of a request as they come; the last piece has a reason.

        `num_top`: log probabilities of each token; None: none.

        Raises UpstreamBroke, UpstreamRefused.
        """
        found = upstream.found
        assert found is not None, "it is up"
        try:
            headers = self._key.headers()
        except OSError as error:
            message = f"PENSTOCK_UPSTREAM_KEY_FILE cannot be read: {error}"
            raise UpstreamBroke(message, is_blamed=False) from error
        timeout_s = FIRST_TOKEN_TIMEOUT_S
        try:
            async with self._http.stream(
                "POST",
                upstream.url + found.server.generate_path,
                json=body,
                headers=headers,
                timeout=httpx2.Timeout(FIRST_TOKEN_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            ) as response:
                await _check(response)
                read = found.server.reader(num_top, self._encode)
                events = aiter(httpx2.EventSource(response, max_event_size=MAX_EVENT_BYTES))
                while True:
                    async with asyncio.timeout(timeout_s):
                        sent = await anext(events, None)
                    if sent is None:
                        raise UpstreamBroke("the stream ended early")
                    if sent.data == "[DONE]":
                        continue
                    piece = read(_event(sent.data))
                    if piece.token_ids:
                        timeout_s = TOKEN_TIMEOUT_S
                    if piece.reason in ("", END, LENGTH):
                        yield piece
                    else:  # such as abort, of a server that is stopped
                        yield piece._replace(reason="")
                        raise UpstreamBroke(f"it ended the output: {piece.reason}")
                    if piece.reason:
                        return
        except TimeoutError as error:
            raise UpstreamBroke(f"no token for {timeout_s:g} s") from error
        except httpx2.ConnectError as error:
            raise UpstreamBroke(f"no connection: {error}", is_blamed=False) from error
        except (httpx2.HTTPError, OSError) as error:
            raise UpstreamBroke(f"{type(error).__name__}: {error}") from error
        except (KeyError, TypeError, ValueError, IndexError) as error:
            sentence = f"its stream has other fields than expected: {error!r}"
            raise UpstreamBroke(sentence) from error

    def failed(self, upstream: Upstream, error: UpstreamBroke) -> float:
        """Stops sending requests to an upstream that may be down, until it answers a probe.

        Returns the share of the blame of the request that met the error, from 0 to 1: each that ran
        there may have caused it. vLLM gives the error of its engine to all of them.
        """
        if upstream.is_up and error.is_down:
            self._take_down(upstream, error)
        upstream.failure = str(error)
        return error.is_blamed / max(1, upstream.num_lost)

    def _take_down(self, upstream: Upstream, error: UpstreamBroke) -> None:
        upstream.is_up, upstream.num_lost = False, upstream.num_running
        log.warning(
            "the upstream failed; its requests continue elsewhere or when it is back",
            extra={"upstream": upstream.url, "error": str(error)},
        )
        if not any(one.is_up for one in self._all):
            self._down_since_s = time.monotonic()
        upstream.probe = asyncio.create_task(self._until_up(upstream))

    async def _until_up(self, upstream: Upstream) -> None:
        # At once, then less often: a stream may break while the server is well.
        while True:
            try:
                upstream.found = await self._find(self._http, upstream.url)
                break
            except Exception as error:
                failure = str(error) or repr(error)
                if failure != upstream.failure:
                    is_known = isinstance(error, (ModelError, OSError))
                    log.warning(
                        "the upstream is not used; it is tried again",
                        exc_info=None if is_known else error,
                        extra={"upstream": upstream.url, "error": failure},
                    )
                upstream.failure = failure
            await asyncio.sleep(PROBE_INTERVAL_S)
        log.info("the upstream is back", extra={"upstream": upstream.url})
        upstream.is_up = True
        self._down_since_s = None
        self._available.set()


async def _check(response: httpx2.Response) -> None:
    if response.is_success:
        return
    text = (await response.aread())[:MAX_ERROR_CHARS].decode(errors="replace")
    sentence = f"status {response.status_code}: {text}"
    if response.status_code in _BUSY:
        raise UpstreamBroke(sentence, is_blamed=False, is_down=False)
    if response.status_code in _AWAY:
        raise UpstreamBroke(sentence, is_blamed=False)
    if response.status_code >= 500:
        raise UpstreamBroke(sentence)
    raise UpstreamRefused(sentence)


def _event(data: str) -> dict[str, Any]:
    """Returns an event's object. Raises ValueError, or UpstreamBroke for an error."""
    event = json.loads(data)
    if not isinstance(event, dict):
        raise ValueError(f"an event is {type(event).__name__}")
    if "error" in event:
        raise UpstreamBroke(str(event["error"])[:MAX_ERROR_CHARS])
    return event
