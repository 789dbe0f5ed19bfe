"""POST /v1/messages and POST /v1/messages/count_tokens: Anthropic's dialect."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter
from starlette.responses import Response

from api.dialects.messages.protocol import (
    CountTokensRequest,
    InputTokens,
    MessageRequest,
    MessagesAnswer,
    MessagesError,
    MessagesEvent,
)
from api.dialects.messages.request import PARAM_NAMES, message_prompt, prepare_message
from api.generation.ignored_parameters import report_ignored
from api.generation.models import GenerationDep
from api.http.caller import CallerDep
from api.http.json_response import anthropic_status, json_response
from api.http.openapi import BODY, GENERATES, JOB, errors, streamed
from api.jobs.generation_response import generation_response
from api.jobs.request_reader import JsonRoute
from api.jobs.service import SUBMITS_JOB, JobsDep

router = APIRouter(route_class=JsonRoute, tags=["Anthropic"])


@router.post(
    "/v1/messages",
    response_model=MessagesAnswer,
    responses=streamed(map(anthropic_status, JOB), MessagesError, MessagesEvent),
    openapi_extra=GENERATES,
    dependencies=SUBMITS_JOB,
)
async def create_message(
    params: MessageRequest, caller: CallerDep, jobs: JobsDep, generation: GenerationDep
) -> Response:
    """Returns the assistant's next message, whole or as a stream of events."""
    prepared = await prepare_message(generation, caller, params)
    return generation_response(
        jobs,
        (prepared.job,),
        prepared.formatter,
        prepared.timing,
        streamed=params.stream,
        stream_interval=params.stream_interval,
    )


@router.post(
    "/v1/messages/count_tokens",
    response_model=InputTokens,
    responses=errors(map(anthropic_status, BODY), MessagesError),
)
async def count_tokens(params: CountTokensRequest, generation: GenerationDep) -> Response:
    """Returns how many tokens the prompt of such a message has; nothing is queued."""
    model = await generation.models.require(params.model)
    prompt = await generation.pool.run(partial(message_prompt, must_fit=False), model, params, "")
    report_ignored(prompt.ignored, PARAM_NAMES)
    return json_response({"input_tokens": len(prompt.token_ids)})
