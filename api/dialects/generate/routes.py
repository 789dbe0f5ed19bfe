"""POST /generate: the native dialect."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from api.dialects.generate.formatter import GenerateFormatter
from api.dialects.generate.protocol import Generated, GenerateRequest
from api.dialects.generate.request import generate_sampling
from api.generation.prompt import prompt_token_ids
from api.generation.prompt_logprobs import PromptLogprobs, scored_prompt
from api.generation.response_size import AnswerSize, prompt_logprobs_bytes
from api.generation.sampling import Room
from api.generation.service import GenerationDep, GenerationService
from api.generation.timing import Timing
from api.http.caller import CallerDep
from api.http.openapi import IDEMPOTENT, JOB, streamed
from api.jobs.expected_job import SUBMITS_JOB
from api.jobs.new_job import new_job
from api.jobs.request_reader import JsonRoute
from api.jobs.service import JobsDep
from api.jobs.stream_response import generation_response
from shared.messages import SamplingParams

router = APIRouter(route_class=JsonRoute, tags=["Native"])


@router.post(
    "/generate",
    response_model=Generated,
    responses=streamed(JOB),
    openapi_extra=IDEMPOTENT,
    dependencies=SUBMITS_JOB,
)
async def generate(
    asked: GenerateRequest, caller: CallerDep, jobs: JobsDep, generation: GenerationDep
) -> Response:
    """What follows a prompt; `model` may be left out while one model is served."""
    model = await generation.models.only(asked.model)
    _sampling(generation, asked, model.room())  # what is wrong whatever the prompt is comes first
    token_ids = await generation.pool.run(prompt_token_ids, model, asked.prompt)
    room = model.room(len(token_ids))
    room.check_prompt("prompt")
    job = new_job(
        caller,
        generation.job_defaults,
        model=model.card.name,
        kind=GenerateFormatter.kind,
        token_ids=token_ids,
        sampling=_sampling(generation, asked, room),
        on_disconnect=asked.on_disconnect,
        queue_timeout_s=asked.queue_timeout,
        durability=asked.durability,
    )
    timing = Timing()
    prompt, shown = scored_prompt(job), None
    if prompt is not None:
        shown = PromptLogprobs(prompt, asked.prompt_logprobs or 0, model.text.tokenizer)
    dialect = GenerateFormatter(caller.request_id, model.card.name, timing, shown)
    return generation_response(
        jobs,
        (job,),
        dialect,
        timing,
        streamed=asked.stream,
        stream_interval=asked.stream_interval,
        prompts=(prompt,),
    )


def _sampling(generation: GenerationService, asked: GenerateRequest, room: Room) -> SamplingParams:
    num_bytes = prompt_logprobs_bytes(room.prompt_tokens, asked.prompt_logprobs)
    size = AnswerSize(
        max_tokens=("max_tokens", asked.max_tokens),
        has_token_ids=True,
        prompts=("prompt_logprobs", num_bytes),
    )
    return size.fitted(generate_sampling(asked, room), generation.max_response_bytes)
