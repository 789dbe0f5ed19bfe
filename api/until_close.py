"""UntilClose: bodies of unknown length for HTTP/1.0, which has no chunks: they end with the
connection."""

from __future__ import annotations

from typing import Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Framing(Protocol):
    """What uvicorn's response cycle knows of the body's end."""

    chunked_encoding: bool | None
    expected_content_length: int


class UntilClose:
    """ASGI. The server closes an HTTP/1.0 connection after the answer anyway."""

    def __init__(self, app: ASGIApp, framing: Framing) -> None:
        self._app = app
        self._framing = framing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def unframed_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._framing.chunked_encoding = False
            else:
                self._framing.expected_content_length = len(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, unframed_send)
