"""GET /v1/models."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api.dialects.messages.protocol import model_info, model_page
from api.generation.models import ServedModel
from api.generation.service import GenerationDep
from api.http.caller import speaks_anthropic
from api.http.json_response import json_response
from api.http.openapi import ANY, NAMED, errors
from api.system.protocol import Model, ModelList

router = APIRouter(tags=["Models"])


@router.get("/v1/models", response_model=ModelList, responses=errors(ANY))
async def list_models(request: Request, generation: GenerationDep) -> Response:
    """What requests can name now; in Anthropic's shape for who sends `anthropic-version`."""
    known = generation.models.known
    if speaks_anthropic(request.scope):
        return json_response(model_page(list(known.values()), request.query_params))
    return json_response({"object": "list", "data": [_payload(model) for model in known.values()]})


@router.get("/v1/models/{model_id:path}", response_model=Model, responses=errors(NAMED))
async def get_model(request: Request, model_id: str, generation: GenerationDep) -> Response:
    """One of them; its name may have slashes."""
    model = await generation.models.require(model_id)
    if speaks_anthropic(request.scope):
        return json_response(model_info(model))
    return json_response(_payload(model))


def _payload(model: ServedModel) -> dict[str, Any]:
    card = model.card
    return {
        "id": card.name,
        "object": "model",
        "created": card.created_s,
        "owned_by": card.owned_by,
        "max_model_len": model.context_tokens,
        "kv_capacity_tokens": card.kv_capacity_tokens,
        "vocab_size": card.vocab_size,
        "dtype": card.dtype,
        "num_parameters": card.num_parameters,
        "has_chat_template": card.has_chat_template,
        "default_sampling": dict(model.defaults.values),
        "is_served": model.is_served,
    }
