"""Upstreams: the servers that compute, which of them gets a request, and how it is sent."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence, Set
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import httpx2
import msgspec

from shared.messages import Grammar
from worker.engine.request import EngineRequest
from worker.engines.http.finding import CONNECT_TIMEOUT_S, MAX_ERROR_CHARS, Found, KeyFile
from worker.engines.http.options import UpstreamAddress
from worker.engines.http.servers import END, LENGTH, Piece, UpstreamBroke, UpstreamRefused
from worker.engines.http.streaming import Answer, NoConnection, post, ssl_context
from worker.model.errors import ModelError

FIRST_TOKEN_TIMEOUT_S = 600.0  # it may have a queue of its own
TOKEN_TIMEOUT_S = 60.0
PROBE_INTERVAL_S = 0.5
MAX_EVENT_BYTES = 4 * 2**20

_BUSY = frozenset({408, 425, 429})
_AWAY = frozenset({401, 403, 404, 502, 503, 504})  # its key, its model or its process

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Upstream:
    """One server. From a failure until it is found again, it gets no new requests."""

    address: UpstreamAddress
    found: Found | None = None  # None: it never answered
    num_running: int = 0
    is_up: bool = False
    failure: str = ""  # the last one
    num_failures: int = 0  # so far: all that ran there at one of them met the same
    probe: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        return self.address.url

    def grammar(self, grammar: Grammar) -> Grammar:
        """Returns a grammar as the server follows it. Raises RequestRefused."""
        assert self.found is not None, "it is up"
        return self.found.server.grammar(grammar)

    def body(
        self, request: EngineRequest, most_tokens: int, eos_token_ids: Set[int]
    ) -> dict[str, Any]:
        """Returns the body of a request, as the server expects it. Raises RequestRefused."""
        assert self.found is not None, "it is up"
        return self.found.server.body(request, self.found.model, most_tokens, eos_token_ids)


class Stay(NamedTuple):
    """The time of one request at an upstream."""

    upstream: Upstream
    num_failures: int  # the upstream's, when it came


class Upstreams:
    """All of one worker. Made and used in one event loop, except for `outage_s` and `failures`."""

    def __init__(
        self,
        find: Callable[[httpx2.AsyncClient, str], Awaitable[Found]],
        found: Mapping[UpstreamAddress, Found | None],
        key: KeyFile,
        encode: Callable[[str], Sequence[int]],
    ) -> None:
        """`find` looks at the server of a URL; it raises ModelError or OSError. `encode`: see
        Server.reader."""
        self._http = httpx2.AsyncClient(verify=ssl_context(), trust_env=False)
        self._find = find
        self._key = key
        self._encode = encode
        self._one_alone = asyncio.Lock()  # whose waiters are served in their order
        self._num_alone = 0  # requests that are alone, or are to be
        self._kept: Upstream | None = None  # for them
        self._changed = asyncio.Event()  # of what `_choose` looks at
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

    @asynccontextmanager
    async def stay(self, *, alone: bool) -> AsyncGenerator[Stay]:
        """Waits for the upstream with the fewest requests for its weight; counts one more there.

        `alone`: nothing else of this worker runs there meanwhile; one request at a time is alone.
        """
        self._num_alone += alone
        try:
            async with self._one_alone if alone else nullcontext():
                upstream = await (self._choose_empty() if alone else self._choose())
                upstream.num_running += 1
                try:
                    yield Stay(upstream, upstream.num_failures)
                finally:
                    upstream.num_running -= 1
        finally:
            self._num_alone -= alone
            if not self._num_alone:
                self._kept = None
            self._note_change()

    async def _choose(self) -> Upstream:
        while not (up := [one for one in self._all if one.is_up and one is not self._kept]):
            await self._changed.wait()
        return min(up, key=lambda upstream: (upstream.num_running + 1) / upstream.address.weight)

    async def _choose_empty(self) -> Upstream:
        while True:
            up = [upstream for upstream in self._all if upstream.is_up]
            if self._kept not in up:
                self._kept = min(up, key=lambda one: one.num_running, default=None)
            if self._kept is not None and not self._kept.num_running:
                return self._kept
            await self._changed.wait()

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

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
    ) -> AsyncGenerator[list[Piece]]:
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
        read = found.server.reader(num_top, self._encode)
        events = EventBuffer()
        stack = AsyncExitStack()
        try:
            url = upstream.url + found.server.generate_path
            async with asyncio.timeout(timeout_s):
                answering = post(url, body, headers, CONNECT_TIMEOUT_S)
                answer = await stack.enter_async_context(answering)
                await _check(answer)
            chunks = answer.chunks()
            while True:
                async with asyncio.timeout(timeout_s):
                    chunk = await anext(chunks, None)
                if chunk is None:
                    raise UpstreamBroke("the stream ended early")
                pieces = [read(_object(data)) for data in events.take(chunk)]
                if not pieces:
                    continue
                last = pieces[-1]
                if last.reason not in ("", END, LENGTH):  # such as abort, at the server's stop
                    yield [*pieces[:-1], last._replace(reason="")]
                    raise UpstreamBroke(f"it ended the output: {last.reason}")
                if any(piece.token_ids for piece in pieces):
                    timeout_s = TOKEN_TIMEOUT_S
                yield pieces
                if last.reason:
                    return
        except TimeoutError as error:
            raise UpstreamBroke(f"no token for {timeout_s:g} s") from error
        except NoConnection as error:
            raise UpstreamBroke(str(error), is_blamed=False) from error
        except EOFError as error:
            raise UpstreamBroke("the stream ended early") from error
        except OSError as error:
            raise UpstreamBroke(f"{type(error).__name__}: {error}") from error
        except (KeyError, TypeError, ValueError, IndexError) as error:
            sentence = f"its stream has other fields than expected: {error!r}"
            raise UpstreamBroke(sentence) from error
        finally:
            await stack.aclose()

    def failed(self, stay: Stay, error: UpstreamBroke) -> bool:
        """Stops sending requests to an upstream that may be down, until it answers a probe.

        Returns whether the request that met the error was alone there: else any that ran there may
        have caused it. vLLM gives the error of its engine to all of them.
        """
        upstream = stay.upstream
        is_first = stay.num_failures == upstream.num_failures
        is_alone = is_first and upstream.num_running == 1
        if error.is_down and is_first:
            self._take_down(upstream, error)
        upstream.failure = str(error)
        return is_alone

    def _take_down(self, upstream: Upstream, error: UpstreamBroke) -> None:
        upstream.is_up = False
        upstream.num_failures += 1
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
        self._note_change()


class EventBuffer:
    """Divides a stream of server-sent events: the data of each, as far as it has come."""

    def __init__(self) -> None:
        self._rest = b""

    def take(self, chunk: bytes) -> list[bytes]:
        """Returns the data of the events that the next bytes complete, but for `[DONE]`.

        Raises ValueError for an event of more than MAX_EVENT_BYTES.
        """
        *events, self._rest = (self._rest + chunk).split(b"\n\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ValueError(f"an event has more than {MAX_EVENT_BYTES} bytes")
        found = (event.partition(b":") for event in events)
        data = [value.strip() for name, _, value in found if name == b"data"]
        return [value for value in data if value != b"[DONE]"]


async def _check(answer: Answer) -> None:
    if not 200 <= answer.status < 300:
        text = (await answer.start(MAX_ERROR_CHARS)).decode(errors="replace")
        _raise(answer.status, f"status {answer.status}: {text}")


def _raise(status: int, sentence: str) -> NoReturn:
    if status in _BUSY:
        raise UpstreamBroke(sentence, is_blamed=False, is_down=False)
    if status in _AWAY:
        raise UpstreamBroke(sentence, is_blamed=False)
    if status >= 500:
        raise UpstreamBroke(sentence)
    raise UpstreamRefused(sentence)


def _object(data: bytes) -> dict[str, Any]:
    """Returns an event's object. Raises ValueError; UpstreamBroke or UpstreamRefused for an
    error."""
    event = msgspec.json.decode(data)
    if not isinstance(event, dict):
        raise ValueError(f"an event is {type(event).__name__}")
    if "error" in event:
        _raise(_error_code(event["error"]), str(event["error"])[:MAX_ERROR_CHARS])
    return event


def _error_code(error: object) -> int:
    """Returns the status that a server names in an event; 500 where it names none."""
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) else 500
