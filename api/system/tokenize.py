"""POST /tokenize and POST /detokenize."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api.dependencies import read_request, services_of
from api.generation.models import ServedModel
from api.generation.prompt import chat_text, chat_token_ids, checked_token_ids, prompt_token_ids
from api.http.json_response import LongJsonAnswer
from api.system.protocol import DetokenizeRequest, TokenizeRequest

router = APIRouter()


@router.post("/tokenize")
async def tokenize(request: Request) -> Response:
    """The token ids of a text, or of a conversation through the model's template."""
    services = services_of(request)
    asked = await read_request(request, TokenizeRequest)
    model = await services.catalog.only(asked.model)
    return LongJsonAnswer(await services.pool.run(_tokenized, model, asked), services.slices)


@router.post("/detokenize")
async def detokenize(request: Request) -> Response:
    """The text of token ids, special tokens included."""
    services = services_of(request)
    asked = await read_request(request, DetokenizeRequest)
    model = await services.catalog.only(asked.model)
    text = await services.pool.run(_detokenized, model, asked.tokens)
    return LongJsonAnswer({"prompt": text}, services.slices)


def _tokenized(model: ServedModel, asked: TokenizeRequest) -> dict[str, Any]:
    special = asked.add_special_tokens
    if asked.messages is not None:
        text = chat_text(
            model,
            asked.messages,
            asked.chat_template_kwargs,
            add_generation_prompt=asked.add_generation_prompt,
        )
        token_ids = chat_token_ids(model, text, bool(special))
    else:
        token_ids = prompt_token_ids(
            model, asked.prompt or "", special is not False, must_fit=False
        )
    payload = {
        "tokens": token_ids,
        "count": len(token_ids),
        "max_model_len": model.context_tokens,
    }
    if asked.return_token_strs:
        payload["token_strs"] = [model.text.tokenizer.token_text(one) for one in token_ids]
    return payload


def _detokenized(model: ServedModel, token_ids: Sequence[int]) -> str:
    checked = checked_token_ids(model, token_ids, "tokens")
    return model.text.tokenizer.decode(checked, skip_special_tokens=False)
