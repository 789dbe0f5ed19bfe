"""POST /generate: the native dialect."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from api.dialects.generate.protocol import Generated, GenerateRequest
from api.dialects.generate.request import prepare_generate
from api.generation.models import GenerationDep
from api.http.caller import CallerDep
from api.http.openapi import GENERATES, JOB, streamed
from api.jobs.generation_response import generation_response
from api.jobs.request_reader import JsonRoute
from api.jobs.service import SUBMITS_JOB, JobsDep

router = APIRouter(route_class=JsonRoute, tags=["Native"])


@router.post(
    "/generate",
    response_model=Generated,
    responses=streamed(JOB),
    openapi_extra=GENERATES,
    dependencies=SUBMITS_JOB,
)
async def generate(
    params: GenerateRequest, caller: CallerDep, jobs: JobsDep, generation: GenerationDep
) -> Response:
    """Returns what follows a prompt; `model` may be left out while one model is served."""
    prepared = await prepare_generate(generation, caller, params)
    return generation_response(
        jobs,
        (prepared.job,),
        prepared.formatter,
        prepared.timing,
        streamed=params.stream,
        stream_interval=params.stream_interval,
        prompts=(prepared.prompt,),
    )
