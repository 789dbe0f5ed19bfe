"""RequestReader: reads the JSON body of a request and validates it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from api.dependencies import part_in
from api.errors import MAX_ECHO_CHARS, ApiError
from api.generation.ignored_parameters import HEADER as IGNORED_HEADER
from api.generation.ignored_parameters import IgnoredMembers, request_ignored
from api.generation.protocol import RequestModel
from api.generation.thread_pool import TextPool, client_gone, request_bytes
from api.generation.validation import RequestT, parse_json, parse_request
from api.http.caller import caller_in, disconnect, set_caller, set_headers
from api.http.shares import Charge, Pot, payer
from api.jobs.new_job import IDEMPOTENCY_HEADER
from api.on_demand import load_part
from api.request_errors import ClientError
from shared.transport.ports.admission import SubmittingStore

_JSON = re.compile(r"application/([\w.+!#$&^-]+\+)?json", re.ASCII)
_FORM = "application/x-www-form-urlencoded"
_PAGE_HEADERS = ("origin", "sec-fetch-site")
INLINE_BYTES = 16_384  # larger bodies are parsed in the thread pool


class RequestReader:
    """Reads bodies within `timeout_s`. `refuse_unused`: refuses parameters without effect."""

    def __init__(
        self,
        store: SubmittingStore,
        pool: TextPool,
        timeout_s: float,
        *,
        refuse_unused: bool,
        max_bytes: int = 2**25,
        bodies: Pot,
        refusal_of: Callable[[str], ApiError | None],
    ) -> None:
        """`max_bytes`: of a body that was compressed, once it is decoded. `bodies`: the bytes of
        bodies on their way. `refusal_of`: the error that a tenant's job would get in the queue, as
        far as that is known without asking."""
        self._store = store
        self._pool = pool
        self.timeout_s = timeout_s
        self._refuse_unused = refuse_unused
        self._max_bytes = max_bytes
        self.bodies = bodies
        self._refusal_of = refusal_of

    async def read(self, request: Request, schema: type[RequestT]) -> RequestT:
        """Returns the body as `schema`.

        The caller of a request with an idempotency key has its job from then on. Raises
        InvalidParameter and ClientError: 400 for anything but a JSON object, 408 for a body that
        does not arrive, 413 for one that is too large once it is decoded, 415 for one in another
        coding or media type. Raises UnavailableError where the tenant's jobs, or all bodies on
        their way, are too many (429, 503).
        """
        _require_json(request)
        coding = request.headers.get("content-encoding")
        decode = None if coding is None else load_part("body_coding").decoder(coding)
        caller, key = caller_in(request.scope), request.headers.get(IDEMPOTENCY_HEADER)
        # A repeat by its key takes nothing of the queue. While threads are free, the queue decides.
        if caller.job_id is not None and key is None and self._pool.has_waiting:
            refusal = self._refusal_of(caller.tenant)
            if refusal is not None:
                raise refusal
        announced = _announced_bytes(request)
        self._pool.check(announced)
        self.bodies.check(announced, payer.get())
        with self.bodies.take(0) as charge:
            raw = await self._received(request, charge)
            request_bytes.set(len(raw))
            client_gone.set(partial(disconnect, request.receive))
            if decode is not None:
                charge.grow(self._max_bytes)
                raw = await self._pool.run(decode, raw, self._max_bytes)
                charge.add(len(raw) - self._max_bytes)
            if key is not None and caller.job_id is not None:
                resolve = load_part("idempotency").resolve_job_id
                named = await resolve(caller, self._store, key, request.url.path, raw)
                set_caller(request.scope, named)
            request_bytes.set(len(raw))
            ignored = request_ignored.get()

            def parse() -> RequestT:
                return parse_request(parse_json(raw), schema, ignored)

            return parse() if len(raw) <= INLINE_BYTES else await self._pool.run(parse)

    async def _received(self, request: Request, charge: Charge) -> bytes:
        """Returns the body, of which `charge` has every byte that has come."""
        pieces: list[bytes] = []
        try:
            async with asyncio.timeout(self.timeout_s):
                async for piece in request.stream():
                    if piece:
                        charge.grow(len(piece))
                        pieces.append(piece)
        except TimeoutError:
            raise ClientError(
                "The request body did not arrive in time.",
                status=408,
                code="body_timeout",
                should_retry=False,
            ) from None
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    @contextmanager
    def naming_ignored(self, scope: Scope) -> Iterator[None]:
        """Names the parameters of one request that are ignored, by its body or by its model, in a
        header of its response."""
        ignored = IgnoredMembers(refuse=self._refuse_unused)
        request_ignored.set(ignored)
        try:
            yield
        finally:
            if ignored.text is not None:
                set_headers(scope, {IGNORED_HEADER: ignored.text})


def _announced_bytes(request: Request) -> int:
    """Returns the announced length of the body; 0: it has none. One that is too large has been
    refused."""
    announced = request.headers.get("content-length", "")
    return int(announced[:20]) if announced.isascii() and announced.isdigit() else 0


def _require_json(request: Request) -> None:
    """Raises ClientError (415) for another media type.

    Browsers send text/plain, forms and bodies without a type to any server without a preflight,
    but JSON only after one. They add `Origin` or `Sec-Fetch-Site`: a request without
    either is from a program such as curl, whose default is the type of a form.
    """
    content_type = request.headers.get("content-type", "")
    media_type = content_type.partition(";")[0].strip().lower()
    is_page = any(name in request.headers for name in _PAGE_HEADERS)
    if _JSON.fullmatch(media_type) or (media_type == _FORM and not is_page):
        return
    was = f"not '{media_type[:MAX_ECHO_CHARS]}'" if media_type else "this request has none"
    raise ClientError(
        f"The body must have the Content-Type 'application/json'; {was}.",
        status=415,
        code="unsupported_media_type",
        param="Content-Type",
        should_retry=False,
    )


class JsonRoute(APIRoute):
    """A route whose body is read by the application's RequestReader: bounded, and parsed off the
    loop where it is large.

    The function gets the model, as if FastAPI had made it of the body itself.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        if self.body_field is None:
            return handler
        model = self.body_field.field_info.annotation
        assert isinstance(model, type), "the body is one model"
        assert issubclass(model, RequestModel), "the body is one model"

        async def handle(request: Request) -> Response:
            reader = part_in(request.scope, RequestReader)
            with reader.naming_ignored(request.scope):
                body = await reader.read(request, model)
                return await handler(_ParsedRequest(request, body))

        return handle


class _ParsedRequest(Request):
    """A request whose JSON body has been parsed. FastAPI reads JSON of no other content type."""

    def __init__(self, request: Request, body: RequestModel) -> None:
        super().__init__(request.scope, request.receive)
        self._model = body
        others = [pair for pair in request.headers.raw if pair[0] != b"content-type"]
        self._json_headers = Headers(raw=[*others, (b"content-type", b"application/json")])

    @property
    def headers(self) -> Headers:
        return self._json_headers

    async def body(self) -> bytes:
        """Returns some bytes, for FastAPI to read them as JSON."""
        return b"{}"

    async def json(self) -> Any:
        return self._model
