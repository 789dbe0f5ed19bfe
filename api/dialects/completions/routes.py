"""POST /v1/completions."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from api.dialects.completions.protocol import Completion, CompletionEvent, CompletionRequest
from api.dialects.completions.request import prepare_completions
from api.generation.models import GenerationDep
from api.http.caller import CallerDep
from api.http.openapi import GENERATES, JOB, streamed
from api.jobs.generation_response import generation_response
from api.jobs.request_reader import JsonRoute
from api.jobs.service import SUBMITS_JOB, JobsDep

router = APIRouter(route_class=JsonRoute, tags=["OpenAI"])


@router.post(
    "/v1/completions",
    response_model=Completion,
    responses=streamed(JOB, events=CompletionEvent),
    openapi_extra=GENERATES,
    dependencies=SUBMITS_JOB,
)
async def create_completion(
    completion: CompletionRequest, caller: CallerDep, jobs: JobsDep, generation: GenerationDep
) -> Response:
    """Returns what follows a prompt, or each of several, whole or as a stream of chunks."""
    prepared = await prepare_completions(generation, caller, completion)
    return generation_response(
        jobs,
        prepared.jobs,
        prepared.formatter,
        prepared.timing,
        streamed=completion.stream,
        stream_interval=completion.stream_interval,
        prompts=prepared.scored,
    )
