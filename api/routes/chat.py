"""POST /v1/chat/completions."""

from __future__ import annotations

from dataclasses import replace

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api.answering import GenerationResponse
from api.body import read_request
from api.chat_plan import ChatAsk, plan_chat
from api.frontend import frontend_of
from api.openai.answer import AnswerFacts
from api.openai.chat_dialect import ChatDialect
from api.openai.sampling import chat_sampling
from api.openai.schemas import ChatRequest
from api.routes.answers import check_stream_options, new_job, now_s
from api.timing import Timing

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    """The next message of a conversation, whole or as a stream of chunks."""
    frontend = frontend_of(request)
    chat = await read_request(request, "chat", ChatRequest)
    include_usage = check_stream_options(chat)
    model = await frontend.catalog.require(chat.model)
    chat_sampling(chat, model.room())  # what is wrong whatever the prompt is said before the work
    ask = ChatAsk(messages=chat.messages, chat_template_kwargs=chat.chat_template_kwargs)
    plan = await frontend.pool.run(plan_chat, model, ask)
    room = model.room(len(plan.token_ids))
    room.check_prompt("messages")
    job, names = new_job(
        request,
        frontend,
        model=model.card.name,
        kind=ChatDialect.kind,
        token_ids=plan.token_ids,
        sampling=replace(chat_sampling(chat, room), grammar=plan.grammar),
        on_disconnect=chat.on_disconnect,
    )
    facts = AnswerFacts(
        id=names.request_id,
        model=model.card.name,
        created_s=now_s(),
        include_usage=include_usage,
        num_logprobs=job.sampling.logprobs,
        prompt_token_ids=plan.token_ids if chat.return_token_ids else None,
    )
    dialect = ChatDialect(facts, model.text.tokenizer, plan.new_parser)
    return GenerationResponse(frontend, job, dialect, Timing(), streamed=chat.stream)
