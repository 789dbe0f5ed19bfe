"""POST /v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from api.dialects.chat.protocol import ChatRequest
from api.dialects.chat.request import prepare_chat
from api.dialects.chat.response_schemas import ChatCompletion, ChatEvent
from api.generation.models import GenerationDep
from api.http.caller import CallerDep
from api.http.openapi import GENERATES, JOB, streamed
from api.jobs.generation_response import generation_response
from api.jobs.request_reader import JsonRoute
from api.jobs.service import SUBMITS_JOB, JobsDep

router = APIRouter(route_class=JsonRoute, tags=["OpenAI"])


@router.post(
    "/v1/chat/completions",
    response_model=ChatCompletion,
    responses=streamed(JOB, events=ChatEvent),
    openapi_extra=GENERATES,
    dependencies=SUBMITS_JOB,
)
async def create_chat_completion(
    chat: ChatRequest, caller: CallerDep, jobs: JobsDep, generation: GenerationDep
) -> Response:
    """Returns the next message of a conversation, whole or as a stream of chunks."""
    prepared = await prepare_chat(generation, caller, chat)
    return generation_response(
        jobs,
        (prepared.job,),
        prepared.formatter,
        prepared.timing,
        streamed=chat.stream,
        stream_interval=chat.stream_interval,
        prompts=(prepared.prompt,),
    )
