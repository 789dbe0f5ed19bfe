"""GET /v1/models, POST /tokenize, POST /detokenize and GET /tokenizer_info."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Query
from starlette.requests import Request
from starlette.responses import Response

from api.dialects.messages.protocol import MessagesError
from api.generation.messages import template_messages
from api.generation.models import GenerationDep, ServedModel
from api.generation.prompt import chat_text, chat_token_ids
from api.generation.text_prompts import checked_token_ids, prompt_token_ids
from api.http.caller import speaks_anthropic
from api.http.json_response import OVERLOADED_STATUS, LongJsonResponse, json_response
from api.http.openapi import ANY, BODY, NAMED, Error, errors, parameters
from api.http.time_slices import SlicesDep
from api.jobs.request_reader import JsonRoute
from api.system.protocol import (
    Detokenized,
    DetokenizeRequest,
    Model,
    ModelInfo,
    ModelList,
    ModelPage,
    TokenizeRequest,
    TokenizerInfo,
    TokenizerInfoQuery,
    Tokens,
)
from shared.messages import InvalidParameter

router = APIRouter(route_class=JsonRoute, tags=["Models"])
_EitherError = Error | MessagesError
DEFAULT_LIMIT = 20  # of a page in Anthropic's shape
MAX_LIMIT = 1000
_TEXT = {"type": "string"}
_VERSION = ("anthropic-version", "header", _TEXT)
_PAGE = parameters(
    _VERSION,
    ("limit", "query", {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT}),
    ("after_id", "query", _TEXT),
    ("before_id", "query", _TEXT),
)


@router.get(
    "/v1/models",
    response_model=ModelList | ModelPage,
    responses=errors(ANY | {OVERLOADED_STATUS}, _EitherError),
    openapi_extra=_PAGE,
)
async def list_models(request: Request, generation: GenerationDep) -> Response:
    """Lists the models that requests can name now, in Anthropic's shape if `anthropic-version` is
    sent."""
    known = generation.models.known
    if speaks_anthropic(request.scope):
        return json_response(model_page(list(known.values()), request.query_params))
    return json_response(ModelList(data=[Model.of(model) for model in known.values()]))


@router.get(
    "/v1/models/{model_id:path}",
    response_model=Model | ModelInfo,
    responses=errors(NAMED | {OVERLOADED_STATUS}, _EitherError),
    openapi_extra=parameters(_VERSION),
)
async def get_model(request: Request, model_id: str, generation: GenerationDep) -> Response:
    """Returns a model, whose name may have slashes."""
    if model_id.endswith(("/pause", "/resume")) and model_id not in generation.models.known:
        raise HTTPException(405)  # of an operator's routes
    model = await generation.models.require(model_id, None)
    if speaks_anthropic(request.scope):
        return json_response(ModelInfo.of(model))
    return json_response(Model.of(model))


# GET /v1/models in Anthropic's shape: a page of models, by cursor.


def model_page(models: Sequence[ServedModel], query: Mapping[str, str]) -> ModelPage:
    """Returns a page of models. `query`: `limit`, `after_id`, `before_id`, as Anthropic has them.

    Raises InvalidParameter.
    """
    names = [model.card.name for model in models]
    limit = _limit(query.get("limit", str(DEFAULT_LIMIT)))
    begin, end = 0, len(models)
    if "after_id" in query:
        begin = _position(names, query["after_id"], "after_id") + 1
    if "before_id" in query:
        end = _position(names, query["before_id"], "before_id")
        begin = max(begin, end - limit)
        has_more = begin > 0
    else:
        has_more = end > begin + limit
        end = min(end, begin + limit)
    page = [ModelInfo.of(model) for model in models[begin:end]]
    return ModelPage(
        data=page,
        has_more=has_more,
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
    )


def _limit(text: str) -> int:
    limit = int(text) if text.isascii() and text.isdigit() and len(text) <= 6 else 0
    if not 1 <= limit <= MAX_LIMIT:
        raise InvalidParameter("limit", f"must be between 1 and {MAX_LIMIT}")
    return limit


def _position(names: Sequence[str], name: str, param: str) -> int:
    if name not in names:
        raise InvalidParameter(param, "must be the id of a model")
    return names.index(name)


@router.post("/tokenize", response_model=Tokens, responses=errors(BODY))
async def tokenize(
    params: TokenizeRequest, generation: GenerationDep, slices: SlicesDep
) -> Response:
    """Returns the token ids of a text, or of a conversation rendered by the chat template."""
    model = await generation.models.only(params.model, None)
    return LongJsonResponse(await generation.pool.run(_tokenized, model, params), slices)


@router.get("/tokenizer_info", response_model=TokenizerInfo, responses=errors(NAMED))
async def tokenizer_info(
    query: Annotated[TokenizerInfoQuery, Query()], generation: GenerationDep
) -> Response:
    """Returns the chat template and the special tokens, for clients that render prompts."""
    model = await generation.models.only(query.model, None)
    template = model.text.chat_template
    info = TokenizerInfo(
        chat_template=None if template is None else template.source,
        model_max_length=model.context_tokens,
        vocab_size=model.card.vocab_size,
    )
    special = {"bos_token": None, "eos_token": None, **model.card.special_tokens}
    return json_response({**special, **info.model_dump()})


@router.post("/detokenize", response_model=Detokenized, responses=errors(BODY))
async def detokenize(
    params: DetokenizeRequest, generation: GenerationDep, slices: SlicesDep
) -> Response:
    """Returns the text of token ids, special tokens included."""
    model = await generation.models.only(params.model, None)
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
            template_name=params.chat_template,
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
