"""What both clients send, how often, and where: without a network."""

from __future__ import annotations

import ipaddress
import os
import random
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit

from penstock.client.errors import PenstockError, Unreachable

DEFAULT_URL = "http://127.0.0.1:8000"
URL_VARIABLE = "PENSTOCK_URL"
KEY_VARIABLE = "PENSTOCK_KEY"
# A stream sends a keep-alive every 15 s at the latest: a longer silence is a dead connection.
SILENCE_S = 45.0
CONNECT_S = 10.0
LEAVING_S = 5.0  # for the cancel of a job whose stream is left
FIRST_PAUSE_S = 0.25
MAX_PAUSE_S = 5.0
IDEMPOTENCY_KEY = "idempotency-key"
# By path the names of the limit of output tokens, its first one in each; elsewhere `max_tokens`.
_LIMITS = {
    "/v1/chat/completions": ("max_tokens", "max_completion_tokens"),
    "/v1/responses": ("max_output_tokens",),
}
_LIMIT_NAMES = ("max_tokens", "max_completion_tokens", "max_output_tokens")


@dataclass(frozen=True, slots=True)
class Request:
    """One HTTP request, for any of the URLs."""

    method: str
    path: str
    body: Any = None
    query: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)

    def may_repeat(self, error: PenstockError) -> bool:
        """Returns whether it can be sent again after `error`, and is served once all the same."""
        is_unsent = isinstance(error, Unreachable) and error.is_unsent
        is_repeatable = self.method != "POST" or IDEMPOTENCY_KEY in self.headers
        return error.may_pass and (is_repeatable or is_unsent)


@dataclass(frozen=True, slots=True)
class Event:
    """One server-sent event; `data` is its JSON, None for `[DONE]` and where nothing is left."""

    id: str
    data: Any


@dataclass(frozen=True, slots=True)
class Opened:
    """A stream's response has started: the job is accepted."""

    request_id: str  # the job's id


class Endpoints:
    """The frontends' URLs, and which of them is asked next."""

    def __init__(self, urls: str | Sequence[str] | None) -> None:
        """Takes one URL, several, or those of PENSTOCK_URL, separated by commas.

        Raises ValueError for a URL that is not http:// or https://.
        """
        if urls is None:
            urls = os.environ.get(URL_VARIABLE) or DEFAULT_URL
        given = urls.split(",") if isinstance(urls, str) else list(urls)
        self.urls = tuple(_base_url(url.strip()) for url in given)
        if not self.urls:
            raise ValueError("at least one URL of a frontend is needed")
        self._turn = 0

    @property
    def url(self) -> str:
        return self.urls[self._turn % len(self.urls)]

    @property
    def are_local(self) -> bool:
        """Whether all are of this machine, which no proxy has to be asked for."""
        return all(_is_loopback(urlsplit(url).hostname or "") for url in self.urls)

    def leave(self, url: str) -> None:
        """Asks the next one from now on, where `url` is the one that is asked now."""
        if url == self.url:
            self._turn += 1


class Tries:
    """The tries of one request: which URL, how long a pause, and when to give up.

    `succeeded` after each success; a connection that was `opened` and lasted is one, too. `failed`
    raises the error that it is given where another try is of no use, or where each URL was tried
    since the last success and that was `limit_s` ago.
    """

    def __init__(self, places: Endpoints, limit_s: float) -> None:
        self._places = places
        self._limit_s = limit_s
        self.url = places.url
        self.succeeded()

    def succeeded(self) -> None:
        self._num_failed = 0
        self._since_s: float | None = None
        self._opened_s: float | None = None

    def opened(self) -> None:
        """Records that a response started, whose first event may take long."""
        self._opened_s = time.monotonic()

    def failed(self, error: PenstockError, *, may_pass: bool | None = None) -> float:
        """Returns the seconds to wait before the next try. `may_pass` overrules the error's."""
        now_s = time.monotonic()
        if self._opened_s is not None and now_s - self._opened_s >= MAX_PAUSE_S:
            self.succeeded()
        self._opened_s = None
        self._since_s = now_s if self._since_s is None else self._since_s
        left_s = max(0.0, self._since_s + self._limit_s - now_s)
        self._num_failed += 1
        num_rounds = self._num_failed // len(self._places.urls)
        is_late = left_s == 0 and num_rounds > 0
        if not (error.may_pass if may_pass is None else may_pass) or is_late:
            raise error
        self._places.leave(self.url)
        self.url = self._places.url
        # No pause until each URL has failed once.
        pause_s = min(FIRST_PAUSE_S * 2 ** (min(num_rounds, 10) - 1), MAX_PAUSE_S)
        pause_s = pause_s * random.uniform(0.75, 1.0) if num_rounds else 0.0
        if error.retry_after_s is not None and error.code != "frontend_draining":
            pause_s = max(pause_s, error.retry_after_s)
        return min(pause_s, left_s)


def new_key() -> str:
    """Returns a new idempotency key."""
    return uuid.uuid4().hex


def in_path(name: str) -> str:
    """Returns a name as one segment of a path. Raises ValueError for an empty one."""
    if not name.strip():
        raise ValueError("the id is empty")
    return quote(name.strip(), safe="")


def headers_of(key: str | None) -> dict[str, str]:
    """Returns the headers of all requests; without a `key` that of PENSTOCK_KEY, if any."""
    key = key if key is not None else os.environ.get(KEY_VARIABLE)
    named = {"accept": "application/json", "user-agent": "penstock-client"}
    return named | ({"authorization": f"Bearer {key}"} if key else {})


def first_model(models: Sequence[Mapping[str, Any]], *, embeds: bool = False) -> str:
    """Returns the first model with a live worker, else the first one, of those that generate text;
    with `embeds`, of those that make embeddings. Raises PenstockError."""
    known = [model for model in models if bool(model.get("embedding_size")) == embeds]
    served = [model for model in known if model.get("is_served", True)]
    for model in (*served, *known):
        return str(model["id"])
    if models:
        what = "makes embeddings" if embeds else "generates text"
        raise PenstockError(f"the service has no model that {what}.", may_pass=True)
    raise PenstockError("the service has no model yet: no worker has announced one.", may_pass=True)


def limited(path: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns parameters whose limit of output tokens, under any API's name, has the path's name.

    A second limit stays as it is: the service refuses it.
    """
    own = _LIMITS.get(path, ("max_tokens",))
    if any(name in parameters for name in own):
        return dict(parameters)
    given = next((name for name in _LIMIT_NAMES if name in parameters), None)
    return {own[0] if name == given else name: value for name, value in parameters.items()}


def background(input: Any, model: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the body of a response in the background."""
    named = limited("/v1/responses", parameters)
    return {**named, "model": model, "input": input, "background": True, "stream": False}


def turns_of(messages: str | Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the messages of a conversation; of one question the user's."""
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else [*messages]


def _base_url(url: str) -> str:
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
        raise ValueError(f"{url!r} is not an http:// or https:// URL of a frontend.")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}".removesuffix("/v1")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
