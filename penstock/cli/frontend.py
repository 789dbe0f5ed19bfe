"""Frontend: the HTTP side of a running service, as the command asks it. Standard library only."""

from __future__ import annotations

import http.client
import json
import random
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from penstock.cli.exits import CommandError, ExitCode

# A stream sends a keep-alive every 15 s at the latest: a longer silence is a dead connection.
SILENCE_S = 45.0
FIRST_RETRY_S = 0.25
MAX_RETRY_S = 5.0
_BROKEN = (OSError, http.client.HTTPException)


class Unreachable(CommandError):
    """Nothing answers, or what answered ended the connection. Another try may succeed."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence, ExitCode.NO_SERVICE)


class ServiceRefused(CommandError):
    """The service answered with an error, of this HTTP status and code."""

    def __init__(self, sentence: str, status: int, code: str | None) -> None:
        exit_code = {401: ExitCode.REFUSED, 403: ExitCode.REFUSED, 404: ExitCode.NOT_FOUND}
        super().__init__(sentence, exit_code.get(status, ExitCode.FAILED))
        self.status = status
        self.error_code = code


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One server-sent event; `data` is its JSON, None for `[DONE]`."""

    id: str
    data: Any


class Frontend:
    """The frontend at a URL. Connections are made for each request; safe for several threads."""

    def __init__(self, url: str, key: str | None = None, timeout_s: float = 60.0) -> None:
        """Raises CommandError for what is no http:// or https:// URL."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise CommandError(
                f"{url!r} is no http:// or https:// URL of a frontend.", ExitCode.UNUSABLE
            )
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self._is_secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, port
        self._prefix = parts.path.rstrip("/")
        self._key = key
        self._timeout_s = timeout_s

    def get(self, path: str, **query: object) -> Any:
        """Returns the JSON of a GET. Raises CommandError."""
        return self.ask("GET", path, query=query)

    def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        query: Mapping[str, object] | None = None,
        headers: Mapping[str, str] | None = None,
        accepted: tuple[int, ...] = (),
    ) -> Any:
        """Returns the JSON of a response; of `accepted` statuses too, which are errors otherwise.
        Raises CommandError."""
        with self._request(method, path, body, query, headers) as response:
            content = response.read()
            if response.status >= 400 and response.status not in accepted:
                raise self._refusal(response.status, content)
            try:
                return json.loads(content) if content else None
            except ValueError:
                raise CommandError(f"{self.url} is no frontend of Penstock: no JSON.") from None

    def events(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        query: Mapping[str, object] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Iterator[StreamEvent]:
        """Yields the events of a stream until it ends. Raises CommandError."""
        accept = {"accept": "text/event-stream", **(headers or {})}
        with self._request(method, path, body, query, accept, SILENCE_S) as response:
            if response.status >= 400:
                raise self._refusal(response.status, response.read())
            event_id, data = "", []
            while line := response.readline():
                field, _, value = line.decode().rstrip("\r\n").partition(":")
                value = value.removeprefix(" ")
                if field == "id":
                    event_id = value
                elif field == "data":
                    data.append(value)
                elif not field and not value and data:
                    text = "\n".join(data)
                    yield StreamEvent(event_id, None if text == "[DONE]" else json.loads(text))
                    data = []

    @contextmanager
    def _request(
        self,
        method: str,
        path: str,
        body: object,
        query: Mapping[str, object] | None,
        headers: Mapping[str, str] | None,
        timeout_s: float | None = None,
    ) -> Iterator[http.client.HTTPResponse]:
        sent = {"accept": "application/json", **(headers or {})}
        if body is not None:
            sent["content-type"] = "application/json"
        if self._key:
            sent["authorization"] = f"Bearer {self._key}"
        given = {name: value for name, value in (query or {}).items() if value is not None}
        target = self._prefix + path + (f"?{urlencode(given)}" if given else "")
        connection = self._connection(timeout_s or self._timeout_s)
        try:
            connection.request(
                method, target, None if body is None else json.dumps(body).encode(), sent
            )
            response = connection.getresponse()
            # The frontend's have one or the other: a head that was cut off looks whole.
            is_framed = response.chunked or response.getheader("content-length") is not None
            if not is_framed and response.status != 204:
                raise Unreachable(f"the connection to {self.url} was lost.")
            yield response
        except ssl.SSLError as error:
            raise Unreachable(f"{self.url} cannot be trusted: {error.reason or error}") from None
        except _BROKEN as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise Unreachable(f"no service answers at {self.url} ({reason}).") from None
        finally:
            connection.close()

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        if self._is_secure:
            return http.client.HTTPSConnection(self._host, self._port, timeout=timeout_s)
        return http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)

    def _refusal(self, status: int, content: bytes) -> CommandError:
        try:
            error = json.loads(content)["error"]
            message, code = str(error["message"]), error.get("code")
        except (ValueError, LookupError, TypeError):
            message, code = f"{self.url} answered with status {status}.", None
        if status == 401:
            message += " Give a key with --key or PENSTOCK_KEY."
        return ServiceRefused(message, status, code)


def in_path(name: str) -> str:
    """Returns a name as one segment of a path."""
    return quote(name, safe="")


class Patience:
    """Pauses between tries, which grow, and a time after which it has run out.

    `restart` after each success. `wait` raises the error that it is given once no success was seen
    for `limit_s`.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self.restart()

    def restart(self) -> None:
        self._pause_s = FIRST_RETRY_S
        self._since_s: float | None = None

    def wait(self, error: CommandError) -> None:
        now_s = time.monotonic()
        self._since_s = self._since_s if self._since_s is not None else now_s
        if now_s - self._since_s >= self._limit_s:
            raise error
        time.sleep(self._pause_s * random.uniform(0.75, 1.0))
        self._pause_s = min(2 * self._pause_s, MAX_RETRY_S)
