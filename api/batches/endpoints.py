"""The endpoints that a batch may name, with the request schema and validation of each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from api.auth.caller import Caller
from api.dialects.chat.routes import prepare_chat
from api.dialects.completions.routes import prepare_completion
from api.dialects.responses.protocol import ResponseRequest
from api.dialects.responses.routes import prepare_response
from api.errors import unsupported
from api.generation.ignored_parameters import IgnoredMembers
from api.generation.protocol import ChatRequest, CompletionRequest
from api.generation.validation import parse_json, parse_request
from api.jobs.new_job import Prepared
from api.services import Services
from shared.messages import InvalidParameter


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One of the routes that a row may name."""

    kind: str  # of its jobs
    schema: type[msgspec.Struct]
    prepare: Callable[[Services, Caller, Any], Awaitable[Prepared]]

    def parse(self, body: bytes, ignored: IgnoredMembers) -> Any:
        """Returns a row's body as its route's request; `ignored` gets what of it is.

        Raises CallerError and InvalidParameter, as the route itself. Takes its time.
        """
        request = parse_request(parse_json(body), self.kind, self.schema, ignored)
        for name in ("stream", "background"):
            if getattr(request, name, False):
                raise InvalidParameter(name, "cannot be true in a batch")
        if getattr(request, "queue_timeout", None) is not None:
            raise unsupported("queue_timeout", "a row of a batch may wait until the batch expires")
        if getattr(request, "durability", None) is not None:
            raise unsupported("durability", "it is the batch that is accepted")
        return request


async def _prepare_chat(services: Services, caller: Caller, request: ChatRequest) -> Prepared:
    return await prepare_chat(services.generation, caller, request)


async def _prepare_completion(
    services: Services, caller: Caller, request: CompletionRequest
) -> Prepared:
    return await prepare_completion(services.generation, caller, request)


async def _prepare_response(
    services: Services, caller: Caller, request: ResponseRequest
) -> Prepared:
    generation, responses = services.generation, services.responses
    return Prepared(*await prepare_response(generation, responses, caller, request))


ENDPOINTS: Mapping[str, Endpoint] = {
    "/v1/chat/completions": Endpoint("chat", ChatRequest, _prepare_chat),
    "/v1/completions": Endpoint("completion", CompletionRequest, _prepare_completion),
    "/v1/responses": Endpoint("response", ResponseRequest, _prepare_response),
}
