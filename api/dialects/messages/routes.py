"""POST /v1/messages and POST /v1/messages/count_tokens: Anthropic's dialect."""

from __future__ import annotations

from dataclasses import replace

from fastapi import APIRouter
from starlette.responses import Response

from api.dialects.messages.errors import error_status
from api.dialects.messages.formatter import MessageContext, MessageFormatter
from api.dialects.messages.protocol import (
    CountTokensRequest,
    InputTokens,
    MessageRequest,
    MessagesAnswer,
    MessagesError,
)
from api.dialects.messages.request import (
    chat_ask,
    check_thinking,
    in_this_dialect,
    is_cut_by_context,
    message_sampling,
)
from api.generation.chat_prompt import ChatPlan, plan_chat
from api.generation.models import ServedModel
from api.generation.response_size import AnswerSize
from api.generation.sampling import Room
from api.generation.service import GenerationDep, GenerationService
from api.http.caller import Caller, CallerDep
from api.http.json_response import json_answer
from api.http.openapi import BODY, IDEMPOTENT, JOB, errors, streamed
from api.jobs.expected_job import SUBMITS_JOB
from api.jobs.new_job import Prepared, new_job
from api.jobs.request_reader import JsonRoute
from api.jobs.service import JobsDep
from api.jobs.stream_response import generation_response
from shared.messages import SamplingParams

router = APIRouter(route_class=JsonRoute, tags=["Anthropic"])


@router.post(
    "/v1/messages",
    response_model=MessagesAnswer,
    responses=streamed(map(error_status, JOB), MessagesError),
    openapi_extra=IDEMPOTENT,
    dependencies=SUBMITS_JOB,
)
async def create_message(
    asked: MessageRequest, caller: CallerDep, jobs: JobsDep, generation: GenerationDep
) -> Response:
    """The assistant's next message, whole or as a stream of events."""
    prepared = await prepare_message(generation, caller, asked)
    return generation_response(
        jobs,
        (prepared.job,),
        prepared.dialect,
        prepared.timing,
        streamed=asked.stream,
        stream_interval=asked.stream_interval,
    )


@router.post(
    "/v1/messages/count_tokens",
    response_model=InputTokens,
    responses=errors(map(error_status, BODY), MessagesError),
)
async def count_tokens(asked: CountTokensRequest, generation: GenerationDep) -> Response:
    """How many tokens the prompt of such a message would have; nothing is queued."""
    model = await generation.models.require(asked.model)
    plan = await generation.pool.run(_planned, model, asked, "", False)
    return json_answer({"input_tokens": len(plan.token_ids)})


async def prepare_message(
    generation: GenerationService, caller: Caller, asked: MessageRequest
) -> Prepared:
    """Everything but the answer. Raises ApiError and InvalidParameter."""
    model = await generation.models.require(asked.model)
    _sampling(generation, asked, model.room())  # what is wrong whatever the prompt is comes first
    plan = await generation.pool.run(_planned, model, asked, caller.request_id)
    room = model.room(len(plan.token_ids))
    room.check_prompt("messages")
    job = new_job(
        caller,
        generation.job_defaults,
        model=model.card.name,
        kind=MessageFormatter.kind,
        token_ids=plan.token_ids,
        sampling=replace(_sampling(generation, asked, room), grammar=plan.grammar),
        on_disconnect=asked.on_disconnect,
        queue_timeout_s=asked.queue_timeout,
        durability=asked.durability,
    )
    facts = MessageContext(
        id=caller.request_id,
        model=model.card.name,
        prompt_tokens=len(plan.token_ids),
        is_cut_by_context=is_cut_by_context(asked, room),
    )
    tokenizer = model.text.tokenizer if plan.counts_reasoning else None
    return Prepared(job, MessageFormatter(facts, plan.new_parser, tokenizer))


def _sampling(generation: GenerationService, asked: MessageRequest, room: Room) -> SamplingParams:
    size = AnswerSize(max_tokens=("max_tokens", asked.max_tokens))
    return size.fitted(message_sampling(asked, room), generation.max_response_bytes)


def _planned(
    model: ServedModel, asked: CountTokensRequest, call_id_seed: str, must_fit: bool = True
) -> ChatPlan:
    check_thinking(model, asked)
    ask = replace(chat_ask(asked), call_id_seed=call_id_seed)
    with in_this_dialect():
        return plan_chat(model, ask, must_fit=must_fit)
