"""POST /v1/embeddings."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from api.dialects.embeddings.protocol import EmbeddingList, EmbeddingRequest
from api.dialects.embeddings.request import prepare_embedding
from api.generation.models import GenerationDep
from api.http.caller import CallerDep
from api.http.openapi import IDEMPOTENT, JOB, errors
from api.jobs.generation_response import generation_response
from api.jobs.request_reader import JsonRoute
from api.jobs.service import SUBMITS_JOB, JobsDep

router = APIRouter(route_class=JsonRoute, tags=["OpenAI"])


@router.post(
    "/v1/embeddings",
    response_model=EmbeddingList,
    responses=errors(JOB),
    openapi_extra=IDEMPOTENT,
    dependencies=SUBMITS_JOB,
)
async def create_embeddings(
    embedding: EmbeddingRequest, caller: CallerDep, jobs: JobsDep, generation: GenerationDep
) -> Response:
    """Returns a vector of each input."""
    prepared = await prepare_embedding(generation, caller, embedding)
    return generation_response(
        jobs,
        (prepared.job,),
        prepared.formatter,
        prepared.timing,
        streamed=False,
        prompts=(prepared.prompt,),
    )
