"""From a request of the native dialect to a job and the formatter of its response."""

from __future__ import annotations

from api.dialects.generate.formatter import GenerateFormatter
from api.dialects.generate.protocol import GenerateRequest
from api.generation.formatter import Timing, prompt_logprobs_bytes
from api.generation.logprobs import PromptLogprobs, scored_prompt
from api.generation.models import GenerationService
from api.generation.sampling import (
    ContextBudget,
    ResponseSize,
    check_prompt_logprobs,
    renamed_parameters,
    resolved_seed,
    stop_strings,
    stop_token_ids,
    with_defaults,
)
from api.generation.text_prompts import is_short_prompt, prompt_token_ids
from api.http.caller import Caller
from api.jobs.new_job import Prepared, new_job
from shared.messages import SamplingParams

DEFAULT_MAX_TOKENS = 64
DEFAULT_TEMPERATURE = 0.0  # where the model's generation_config has none


def generate_sampling(request: GenerateRequest, budget: ContextBudget) -> SamplingParams:
    """Raises InvalidParameter. `max_tokens` is 64 by default, or what fits."""
    check_prompt_logprobs(request.prompt_logprobs, streamed=request.stream)
    with renamed_parameters({"repetition_penalty": "rep_penalty"}):
        return SamplingParams(
            max_tokens=budget.max_tokens(request.max_tokens, DEFAULT_MAX_TOKENS),
            min_tokens=request.min_tokens,
            **with_defaults(request, request.rep_penalty, budget.defaults, DEFAULT_TEMPERATURE),
            seed=resolved_seed(request.seed),
            stop=stop_strings(request.stop),
            stop_token_ids=stop_token_ids("stop_token_ids", request.stop_token_ids, budget),
            ignore_eos=request.ignore_eos,
            prompt_logprobs=request.prompt_logprobs,
        )


async def prepare_generate(
    generation: GenerationService, caller: Caller, params: GenerateRequest
) -> Prepared:
    """Returns the job of a request and its formatter. Raises ApiError and InvalidParameter."""
    model = await generation.models.only(params.model)
    if is_short_prompt(model, params.prompt):
        token_ids = prompt_token_ids(model, params.prompt)
    else:
        _sampling(generation, params, model.budget())  # errors come before the long work
        token_ids = await generation.pool.run(prompt_token_ids, model, params.prompt)
    budget = model.budget(len(token_ids))
    budget.check_prompt("prompt")
    budget.report_clipped("max_tokens", params.max_tokens)
    job = new_job(
        caller,
        generation.job_defaults,
        model=model,
        kind=GenerateFormatter.kind,
        token_ids=token_ids,
        sampling=_sampling(generation, params, budget),
        on_disconnect=params.on_disconnect,
        params=params,
    )
    timing = Timing()
    prompt, shown = scored_prompt(job), None
    if prompt is not None:
        shown = PromptLogprobs(prompt, params.prompt_logprobs or 0, model.text.tokenizer)
    formatter = GenerateFormatter(caller.request_id, model.card.name, timing, shown)
    return Prepared(job, formatter, timing, prompt)


def _sampling(
    generation: GenerationService, params: GenerateRequest, budget: ContextBudget
) -> SamplingParams:
    num_bytes = prompt_logprobs_bytes(budget.prompt_tokens, params.prompt_logprobs)
    size = ResponseSize(
        max_tokens=("max_tokens", params.max_tokens),
        has_token_ids=True,
        prompts=("prompt_logprobs", num_bytes),
    )
    return size.fitted(generate_sampling(params, budget), generation.max_response_bytes)
