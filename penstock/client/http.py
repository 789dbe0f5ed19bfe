"""Requests and responses of httpx2, for both clients: its options, errors and bodies."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypedDict

import httpx2

from penstock.client.errors import PenstockError, Unreachable, refusal
from penstock.client.requests import CONNECT_S, SILENCE_S, Endpoints, Event, Request, headers_of

RECOVERY = "recovery"  # the type of the events that OnRecovery takes
OnRecovery = Callable[[Mapping[str, Any]], None]


class Call(TypedDict):
    """Arguments of one request of httpx2."""

    method: str
    url: str
    content: bytes | None
    params: dict[str, str]
    headers: dict[str, str]
    timeout: httpx2.Timeout


class Connections(TypedDict):
    """Arguments of a client of httpx2."""

    limits: httpx2.Limits
    trust_env: bool


def connections(places: Endpoints) -> Connections:
    """Returns how connections are made: as many as there are requests, through the environment's
    proxy only to other machines."""
    return {
        "limits": httpx2.Limits(max_connections=None),
        "trust_env": not places.are_local,
    }


class Caller:
    """Makes requests of httpx2: with the key, and with timeouts."""

    def __init__(
        self, key: str | None, timeout_s: float, on_recovery: OnRecovery | None = None
    ) -> None:
        self.on_recovery = on_recovery
        self._headers = headers_of(key)
        self._timeout_s = timeout_s

    def call(self, request: Request, url: str) -> Call:
        """Returns a request at a frontend's URL."""
        return self._call(request, url, self._timeout_s, {})

    def stream(self, request: Request, url: str) -> Call:
        """Returns a request for a stream, which its keep-alives keep from timing out."""
        asked = {} if self.on_recovery is None else {"penstock-events": RECOVERY}
        return self._call(request, url, SILENCE_S, {"accept": "text/event-stream", **asked})

    def _call(self, request: Request, url: str, silence_s: float, more: dict[str, str]) -> Call:
        headers = self._headers | more | dict(request.headers)
        if request.body is not None:
            headers["content-type"] = "application/json"
        connect_s = min(self._timeout_s, CONNECT_S)
        query = {name: str(value) for name, value in request.query.items() if value is not None}
        return {
            "method": request.method,
            "url": url + request.path,
            "content": None if request.body is None else json.dumps(request.body).encode(),
            "params": query,
            "headers": headers,
            "timeout": httpx2.Timeout(
                self._timeout_s, connect=connect_s, read=silence_s, pool=None
            ),
        }


@contextmanager
def reaching(url: str) -> Iterator[None]:
    """Raises errors of httpx2 as Unreachable."""
    try:
        yield
    except httpx2.TransportError as error:
        reason = re.sub(r"^\[Errno -?\d+\] ", "", str(error)) or type(error).__name__
        is_unsent = isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout)
        message = f"no service answers at {url} ({reason})."
        raise Unreachable(message, is_unsent=is_unsent) from error


def read_json(response: httpx2.Response, url: str, accepted: tuple[int, ...] = ()) -> Any:
    """Returns the JSON of a whole response, None of an empty one. Raises Refused."""
    if response.status_code >= 400 and response.status_code not in accepted:
        raise refusal(response.status_code, response.content, response.headers, url)
    if not response.content:
        return None
    try:
        return json.loads(response.content)
    except ValueError:
        raise PenstockError(f"{url} is not a Penstock frontend: it did not return JSON.") from None


def read_event(event: httpx2.ServerSentEvent, url: str) -> Event:
    """Returns an event of a stream."""
    if event.data == "[DONE]":
        return Event(event.id, None)
    try:
        return Event(event.id, json.loads(event.data))
    except ValueError:
        raise PenstockError(f"{url} is not a Penstock frontend: it did not return JSON.") from None
