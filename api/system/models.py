"""GET /v1/models."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api.dialects.messages.protocol import model_info, model_page
from api.generation.service import GenerationDep
from api.http.caller import speaks_anthropic
from api.http.json_response import json_response
from api.http.openapi import ANY, NAMED, errors
from api.system.protocol import Model, ModelList

router = APIRouter(tags=["Models"])


@router.get("/v1/models", response_model=ModelList, responses=errors(ANY))
async def list_models(request: Request, generation: GenerationDep) -> ModelList | Response:
    """Lists the models that requests can name now, in Anthropic's shape if `anthropic-version` is
    sent."""
    known = generation.models.known
    if speaks_anthropic(request.scope):
        return json_response(model_page(list(known.values()), request.query_params))
    return ModelList(data=[Model.of(model) for model in known.values()])


@router.get("/v1/models/{model_id:path}", response_model=Model, responses=errors(NAMED))
async def get_model(request: Request, model_id: str, generation: GenerationDep) -> Model | Response:
    """Returns a model, whose name may have slashes."""
    model = await generation.models.require(model_id)
    if speaks_anthropic(request.scope):
        return json_response(model_info(model))
    return Model.of(model)
