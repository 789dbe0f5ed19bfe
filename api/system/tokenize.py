"""POST /tokenize and POST /detokenize."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from api.generation.messages import template_messages
from api.generation.models import GenerationDep, ServedModel
from api.generation.prompt import chat_text, chat_token_ids, checked_token_ids, prompt_token_ids
from api.http.json_response import LongJsonResponse
from api.http.openapi import BODY, errors
from api.http.time_slices import SlicesDep
from api.jobs.request_reader import JsonRoute
from api.system.protocol import Detokenized, DetokenizeRequest, TokenizeRequest, Tokens

router = APIRouter(route_class=JsonRoute, tags=["Models"])


@router.post("/tokenize", response_model=Tokens, responses=errors(BODY))
async def tokenize(
    params: TokenizeRequest, generation: GenerationDep, slices: SlicesDep
) -> Response:
    """Returns the token ids of a text, or of a conversation rendered by the chat template."""
    model = await generation.models.only(params.model)
    return LongJsonResponse(await generation.pool.run(_tokenized, model, params), slices)


@router.post("/detokenize", response_model=Detokenized, responses=errors(BODY))
async def detokenize(
    params: DetokenizeRequest, generation: GenerationDep, slices: SlicesDep
) -> Response:
    """Returns the text of token ids, special tokens included."""
    model = await generation.models.only(params.model)
    text = await generation.pool.run(_detokenized, model, params.tokens)
    return LongJsonResponse(Detokenized(prompt=text).model_dump(), slices)


def _tokenized(model: ServedModel, params: TokenizeRequest) -> dict[str, Any]:
    special = params.add_special_tokens
    if params.messages is not None:
        text = chat_text(
            model,
            template_messages(params.messages),
            params.chat_template_kwargs,
            add_generation_prompt=params.add_generation_prompt,
        )
        token_ids = chat_token_ids(model, text, bool(special))
    else:
        token_ids = prompt_token_ids(
            model, params.prompt or "", special is not False, must_fit=False
        )
    tokens = Tokens(tokens=token_ids, count=len(token_ids), max_model_len=model.context_tokens)
    if params.return_token_strs:
        tokens.token_strs = [model.text.tokenizer.token_text(one) for one in token_ids]
    return tokens.model_dump(exclude_unset=True)


def _detokenized(model: ServedModel, token_ids: Sequence[int]) -> str:
    checked = checked_token_ids(model, token_ids, "tokens")
    return model.text.tokenizer.decode(checked, skip_special_tokens=False)
