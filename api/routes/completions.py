"""POST /v1/completions."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api.answering import GenerationResponse
from api.body import read_request
from api.frontend import frontend_of
from api.openai.answer import AnswerFacts
from api.openai.completion_dialect import CompletionDialect
from api.openai.sampling import completion_sampling
from api.openai.schemas import CompletionRequest
from api.prompts import prompt_token_ids
from api.routes.answers import check_stream_options, new_job, now_s
from api.timing import Timing

router = APIRouter()


@router.post("/v1/completions")
async def create_completion(request: Request) -> Response:
    """What follows a prompt, whole or as a stream of chunks."""
    frontend = frontend_of(request)
    completion = await read_request(request, "completion", CompletionRequest)
    include_usage = check_stream_options(completion)
    model = await frontend.catalog.require(completion.model)
    completion_sampling(completion, model.room())
    token_ids = await frontend.pool.run(prompt_token_ids, model, completion.prompt)
    room = model.room(len(token_ids))
    room.check_prompt("prompt")
    job, names = new_job(
        request,
        frontend,
        model=model.card.name,
        kind=CompletionDialect.kind,
        token_ids=token_ids,
        sampling=completion_sampling(completion, room),
        on_disconnect=completion.on_disconnect,
    )
    facts = AnswerFacts(
        id=names.request_id,
        model=model.card.name,
        created_s=now_s(),
        include_usage=include_usage,
        num_logprobs=job.sampling.logprobs,
        prompt_token_ids=token_ids if completion.return_token_ids else None,
    )
    dialect = CompletionDialect(facts, model.text.tokenizer)
    return GenerationResponse(frontend, job, dialect, Timing(), streamed=completion.stream)
