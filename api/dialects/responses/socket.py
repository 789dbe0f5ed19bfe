"""Responses over WebSocket: GET /v1/responses, upgraded.

Each message of a client becomes a separate request to the inner application: keys, origins,
limits, errors and streams are those of HTTP. Its server-sent events are sent as frames of text.
Turns run one at a time, in order. A stored response continues when its socket is cut: any frontend
sends the rest to `response.resume`, after the number of the last event received.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.auth.keys import KeyRing
from api.dialects.responses.socket_events import Event, Payload, parsed_events
from api.errors import MAX_ECHO_CHARS, ApiError
from api.generation.schemas import whole_number
from api.http.caller import caller_in
from api.http.json_response import error_response
from api.http.shares import Pot
from api.request_errors import ClientError, key_revoked
from shared.tasks import cancel_and_wait

PATH = "/v1/responses"
MAX_WAITING = 8  # messages after the current one
MAX_IDLE_S = 3600.0
INLINE_CHARS = 65_536  # longer messages are decoded on a thread
# In the request's state: its job continues without a reader; the turn is checked and not generated,
# as a client sends it ahead of the turn that names it.
CONTINUES, WARMS_UP = "continues_unread", "warms_up"
_POLICY, _GOING_AWAY = 1008, 1001
# Headers of the handshake, of this connection, or of this request only.
_OWN_HEADERS = frozenset(
    {b"upgrade", b"connection", b"content-length", b"content-type", b"content-encoding"}
    | {b"transfer-encoding", b"accept-encoding", b"idempotency-key", b"expect"}
)
_OF_THE_SOCKET = ("type", "stream_id", "generate")

_ENDS = ("response.completed", "response.incomplete")


class _Unstored(NamedTuple):
    """The last turn of a socket, where it was not stored."""

    id: str
    items: list[Any]  # of it and of the turns before it, back to `base`
    base: str | None  # the stored response that they continue


class ResponseSockets:
    """Pure ASGI, outermost. Serves sockets while `pot` has room, and messages of `max_bytes`."""

    def __init__(self, app: ASGIApp, ring: KeyRing, pot: Pot, max_bytes: int) -> None:
        self._app = app
        self._ring = ring
        self._pot = pot
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket":
            await self._app(scope, receive, send)
            return
        await receive()  # websocket.connect
        looked_up = _request(scope, "GET", "/v1/models", b"")  # by its host, origin and key
        messages = await _messages_of(self._app, looked_up)
        if messages[0]["status"] >= 400:
            await _refuse(messages, send)
            return
        try:
            charge = self._pot.take()  # charged to the tenant that authentication set
        except ApiError as error:
            request = _request(scope, "GET", PATH, b"")
            await _refuse(await _messages_of(error_response(error, request), request), send)
            return
        socket = ResponseSocket(self._app, scope, send, self._max_bytes)
        # What its messages may see is up to their own authentication.
        caller = replace(caller_in(looked_up), is_operator=False)
        with charge, self._ring.in_use(caller) as revoked:
            revoked.add_done_callback(lambda _: socket.end(str(key_revoked())))
            await send({"type": "websocket.accept"})
            await socket.serve(receive)


async def _messages_of(app: ASGIApp, scope: Scope) -> Sequence[Message]:
    messages: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        messages.append(message)

    await app(scope, receive, send)
    return messages


async def _refuse(messages: Sequence[Message], send: Send) -> None:
    for message in messages:
        await send({**message, "type": f"websocket.{message['type']}"})


def _request(socket: Scope, method: str, path: str, query: bytes, length: int = 0) -> Scope:
    """Returns the scope of a request with the headers of the handshake."""
    headers = [
        (name, value)
        for name, value in socket["headers"]
        if name not in _OWN_HEADERS and not name.startswith(b"sec-websocket-")
    ]
    if method == "POST":
        headers += [
            (b"content-type", b"application/json"),
            (b"content-length", str(length).encode()),
        ]
    scheme = {"wss": "https"}.get(socket["scheme"], "http")
    members = ("app", "asgi", "http_version", "server", "client", "root_path")
    return {
        **{name: socket[name] for name in members if name in socket},
        "type": "http",
        "scheme": scheme,
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": query,
        "headers": headers,
        "state": dict(socket.get("state", {})),
    }


class ResponseSocket:
    """One connection."""

    def __init__(self, app: ASGIApp, scope: Scope, send: Send, max_bytes: int) -> None:
        self._app = app
        self._scope = scope
        self._send = send
        self._max_bytes = max_bytes
        self._waiting: deque[str] = deque()
        self._has_more = asyncio.Event()
        self._is_gone = asyncio.Event()
        self._why = ""  # it is closed for this reason
        # The last response that was not stored: its id, and all items up to its end.
        self._unstored: _Unstored | None = None

    async def serve(self, receive: Receive) -> None:
        """Serves messages until the client is gone."""
        reading = asyncio.create_task(self._read(receive))
        try:
            while (text := await self._next()) is not None:
                try:
                    await self._serve_message(await _message_of(text))
                except ApiError as error:
                    await self._send_error(error.status, error.body()["error"])
        finally:
            await cancel_and_wait(reading)

    def end(self, why: str) -> None:
        """Closes the socket for a reason, "" if the client is gone, after the current turn."""
        self._why = why
        self._is_gone.set()
        self._has_more.set()

    async def _read(self, receive: Receive) -> None:
        while True:
            message = await receive()
            if message["type"] == "websocket.disconnect":
                self.end("")
                return
            if len(self._waiting) == MAX_WAITING:
                self.end(f"More than {MAX_WAITING} messages wait.")
                return
            self._waiting.append(message.get("text") or "")  # bytes are no JSON
            self._has_more.set()

    async def _next(self) -> str | None:
        """Returns the next message; None when the client is gone."""
        while not self._is_gone.is_set():
            if self._waiting:
                return self._waiting.popleft()
            self._has_more.clear()
            try:
                async with asyncio.timeout(MAX_IDLE_S):
                    await self._has_more.wait()
            except TimeoutError:
                await self._close(_GOING_AWAY, "No message was received for an hour.")
                return None
        if self._why:
            await self._close(_POLICY, self._why)
        return None

    async def _close(self, code: int, reason: str) -> None:
        await self._send({"type": "websocket.close", "code": code, "reason": reason})

    async def _serve_message(self, message: Payload) -> None:
        kind = message.get("type")
        if kind == "response.create":
            await self._create(message)
        elif kind == "response.resume":
            await self._resume(message)
        else:
            raise ClientError(
                f"Unknown message type '{str(kind)[:MAX_ECHO_CHARS]}': there are "
                "'response.create' and 'response.resume'.",
                code="unknown_message_type",
                param="type",
            )

    async def _create(self, message: Payload) -> None:
        if message.get("stream_id") is not None:
            raise ClientError(
                "Unsupported parameter: 'stream_id': a socket has one turn at a time.",
                code="unsupported_parameter",
                param="stream_id",
            )
        body = {name: value for name, value in message.items() if name not in _OF_THE_SOCKET}
        body["stream"] = True
        items, base = self._with_earlier(body)
        is_warm_up = message.get("generate") is False
        is_stored = body.get("store") is not False and not is_warm_up
        scope, raw = self._post(PATH, body)
        scope["state"] |= {CONTINUES: is_stored, WARMS_UP: is_warm_up}
        async with aclosing(self._events(scope, raw)) as events:
            async for event in events:
                await self._send_text(event.raw)
                if not is_stored and event.kind in _ENDS:
                    response = event.payload()["response"]
                    items = [*items, *response["output"]]
                    self._unstored = _Unstored(response["id"], items, base)

    def _with_earlier(self, body: Payload) -> tuple[list[Any], Any]:
        """Returns the items of a turn and the id of the stored response that they continue. Puts
        both into the body where the turn before it is known to this socket alone."""
        given = body.get("input", [])
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        if not isinstance(items, list):
            return [], None
        previous, kept = body.get("previous_response_id"), self._unstored
        if kept is not None and previous == kept.id:
            items, previous = [*kept.items, *items], kept.base
            body |= {"input": items, "previous_response_id": previous}
        return items, previous

    async def _resume(self, message: Payload) -> None:
        name, number = message.get("response_id"), whole_number(message.get("starting_after"))
        if not isinstance(name, str) or not name.replace("-", "").replace("_", "").isalnum():
            raise ClientError("Must be the id of a response.", param="response_id")
        query = "stream=true"
        if number is not None:
            if isinstance(number, bool) or not isinstance(number, int) or number < 0:
                raise ClientError("Must be the number of an event.", param="starting_after")
            query += f"&starting_after={number}"
        scope = _request(self._scope, "GET", f"{PATH}/{name}", query.encode())
        async with aclosing(self._events(scope, b"")) as events:
            async for event in events:
                await self._send_text(event.raw)

    def _post(self, path: str, body: Payload) -> tuple[Scope, bytes]:
        raw = msgspec.json.encode(body)
        if len(raw) > self._max_bytes:
            raise ClientError(
                f"With the turns before it, the request is larger than {self._max_bytes} bytes.",
                status=413,
                code="request_too_large",
            )
        return _request(self._scope, "POST", path, b"", len(raw)), raw

    async def _events(self, scope: Scope, raw: bytes) -> AsyncGenerator[Event, None]:
        """Yields the events of a request's response: of its stream, or its body as one."""
        chunks: asyncio.Queue[Message | None] = asyncio.Queue(1)
        has_body = True

        async def receive() -> Message:
            nonlocal has_body
            if has_body:
                has_body = False
                return {"type": "http.request", "body": raw, "more_body": False}
            await self._is_gone.wait()
            return {"type": "http.disconnect"}

        async def run() -> None:
            try:
                await self._app(scope, receive, chunks.put)
            finally:
                await chunks.put(None)

        running = asyncio.create_task(run())
        try:
            async for event in parsed_events(chunks):
                yield event
            await running
        finally:
            # If the client is gone, the response ends by itself: it settles its job.
            if self._is_gone.is_set():
                while not running.done() and await chunks.get() is not None:
                    pass
            await cancel_and_wait(running)

    async def _send_event(self, event: Payload) -> None:
        await self._send_text(msgspec.json.encode(event))

    async def _send_text(self, text: bytes) -> None:
        if self._is_gone.is_set():
            return
        try:
            await self._send({"type": "websocket.send", "text": text.decode()})
        except OSError:  # the server's error for a connection that is lost
            self._is_gone.set()

    async def _send_error(self, status: int, error: Payload) -> None:
        await self._send_event({"type": "error", "status": status, "error": error})


async def _message_of(text: str) -> Payload:
    """Returns a message. Raises ClientError if it is not an object."""
    return _decoded(text) if len(text) < INLINE_CHARS else await asyncio.to_thread(_decoded, text)


def _decoded(text: str) -> Payload:
    try:
        message = msgspec.json.decode(text)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise ClientError("A message must be a JSON object, as text.", code="invalid_json")
    return message
