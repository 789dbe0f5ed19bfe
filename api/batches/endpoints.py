"""The endpoints that a batch may name: how the body of a row is validated and prepared as a job."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from api.dialects.chat.protocol import ChatRequest
from api.dialects.chat.request import prepare_chat
from api.dialects.completions.protocol import CompletionRequest
from api.dialects.completions.request import prepare_completion
from api.dialects.responses.protocol import ResponseRequest
from api.dialects.responses.request import prepare_response
from api.dialects.responses.store import ResponseStore
from api.errors import unsupported
from api.generation.ignored_parameters import IgnoredMembers
from api.generation.models import GenerationService
from api.generation.protocol import RequestModel
from api.generation.validation import parse_json, parse_request
from api.http.caller import Caller
from api.jobs.new_job import Prepared
from shared.messages import InvalidParameter


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A route that a batch may name."""

    kind: str  # of its jobs
    schema: type[RequestModel]
    prepare: Callable[[Caller, Any], Awaitable[Prepared]]

    def parse(self, body: bytes, ignored: IgnoredMembers) -> Any:
        """Returns a row's body as the route's request; collects ignored parameters in `ignored`.

        Raises ClientError and InvalidParameter, as the route does. CPU-bound: run it in the pool.
        """
        request = parse_request(parse_json(body), self.schema, ignored)
        for name in ("stream", "background"):
            if getattr(request, name, False):
                raise InvalidParameter(name, "cannot be true in a batch")
        if getattr(request, "queue_timeout", None) is not None:
            raise unsupported("queue_timeout", "a row of a batch may wait until the batch expires")
        if getattr(request, "durability", None) is not None:
            raise unsupported("durability", "the batch has it, not its rows")
        return request


def make_endpoints(
    generation: GenerationService, responses: ResponseStore
) -> Mapping[str, Endpoint]:
    """Returns the endpoints by path: exactly ENDPOINT_PATHS."""

    async def response(caller: Caller, request: ResponseRequest) -> Prepared:
        return Prepared(*await prepare_response(generation, responses, caller, request))

    return {
        "/v1/chat/completions": Endpoint("chat", ChatRequest, partial(prepare_chat, generation)),
        "/v1/completions": Endpoint(
            "completion", CompletionRequest, partial(prepare_completion, generation)
        ),
        "/v1/responses": Endpoint("response", ResponseRequest, response),
    }
