"""From a completion request to a job for each prompt and the formatter of the response."""

from __future__ import annotations

from dataclasses import dataclass, replace

from api.dialects.completions.formatter import CompletionFormatter, CompletionShape
from api.dialects.completions.protocol import MAX_LOGPROBS, CompletionRequest
from api.generation.formatter import (
    COMPLETION_ENTRY_BYTES,
    TOKEN_BYTES,
    TOKEN_ID_BYTES,
    ResponseContext,
    Timing,
    prompt_logprobs_bytes,
)
from api.generation.logprobs import ScoredPrompt, scored_prompt
from api.generation.models import GenerationService, ServedModel
from api.generation.protocol import job_lane, served_tier
from api.generation.sampling import (
    ContextBudget,
    ResponseSize,
    check_prompt_logprobs,
    renamed_parameters,
    sampling_params,
)
from api.generation.text_prompts import (
    EncodedPrompt,
    checked_grammar,
    encoded_prompts,
    is_short_prompt,
)
from api.http.caller import Caller
from api.http.sse import json_bytes
from api.jobs.new_job import Prepared, new_job, now_s, sibling
from api.request_errors import unsupported
from shared.messages import MAX_CHOICES, Grammar, InvalidParameter, Job, SamplingParams

DEFAULT_MAX_TOKENS = 16


def completion_sampling(request: CompletionRequest, budget: ContextBudget) -> SamplingParams:
    """Raises InvalidParameter. `max_tokens` is 16 by default, or what fits.

    With `echo` the prompt is scored as the answer is, and the answer may have no token.
    """
    check_prompt_logprobs(request.prompt_logprobs, streamed=request.stream)
    prompt_logprobs = request.prompt_logprobs
    logprobs = request.logprobs
    if logprobs is not None and not 0 <= logprobs <= MAX_LOGPROBS:
        raise InvalidParameter("logprobs", f"must be between 0 and {MAX_LOGPROBS}")
    if request.echo and logprobs is not None:
        prompt_logprobs = max(prompt_logprobs or 0, logprobs)
    least = 0 if request.echo else 1
    name, requested = request.requested_tokens
    with renamed_parameters({"max_tokens": name}):
        max_tokens = budget.max_tokens(requested, DEFAULT_MAX_TOKENS, least=least)
        return sampling_params(request, max_tokens, logprobs, prompt_logprobs, budget)


def check_choices(request: CompletionRequest, num_prompts: int = 1) -> int:
    """Returns how many choices are run for each prompt. Raises InvalidParameter."""
    n, best_of = request.n, request.best_of
    if not 1 <= n <= MAX_CHOICES:
        raise InvalidParameter("n", f"must be between 1 and {MAX_CHOICES}")
    if best_of is not None:
        if not n <= best_of <= MAX_CHOICES:
            raise InvalidParameter("best_of", f"must be between 'n' and {MAX_CHOICES}")
        if request.stream and best_of > n:
            raise InvalidParameter("best_of", "cannot be larger than 'n' in a stream")
    num_choices = best_of or n
    if num_prompts * num_choices > MAX_CHOICES:
        raise InvalidParameter(
            "prompt",
            f"{num_prompts} prompts with {num_choices} choices each are more than {MAX_CHOICES} "
            f"choices. Please ask for fewer.",
        )
    return num_choices


@dataclass(frozen=True, slots=True)
class PreparedCompletion:
    """A completion request that was understood: a job for each of its prompts."""

    jobs: tuple[Job, ...]
    formatter: CompletionFormatter
    timing: Timing
    scored: tuple[ScoredPrompt, ...] = ()  # the prompts, where their log probabilities are shown


async def prepare_completion(
    generation: GenerationService, caller: Caller, completion: CompletionRequest
) -> Prepared:
    """Makes the one job and the formatter of a batch row.

    Raises ApiError and InvalidParameter.
    """
    prepared = await prepare_completions(generation, caller, completion)
    if len(prepared.jobs) > 1:
        raise unsupported("prompt", "a row of a batch has one prompt")
    prompt = prepared.scored[0] if prepared.scored else None
    return Prepared(prepared.jobs[0], prepared.formatter, prepared.timing, prompt)


async def prepare_completions(
    generation: GenerationService, caller: Caller, completion: CompletionRequest
) -> PreparedCompletion:
    """Makes the job and formatter of a request. Raises ApiError and InvalidParameter."""
    model = await generation.models.require(completion.model)
    is_at_once = is_short_prompt(model, completion.prompt) and not completion.echo
    best_of = check_choices(completion)
    if not is_at_once:  # faults are refused before the long work
        _fitted(generation, completion, completion_sampling(completion, model.budget()))
    lane = job_lane(completion)
    if is_at_once:
        prompts, repeated = _read_prompts(model, completion, best_of)
    else:
        prompts, repeated = await generation.pool.run(_read_prompts, model, completion, best_of)
    grammar = None
    if completion.is_structured:
        grammar = await generation.pool.run(checked_grammar, model, completion)
    check_choices(completion, len(prompts))
    samplings = [
        _fitted(
            generation,
            completion,
            _sampling(completion, model, prompt, grammar),
            len(prompts),
            repeated,
        )
        for prompt in prompts
    ]
    first = new_job(
        caller,
        generation.job_defaults,
        model=model,
        kind=CompletionFormatter.kind,
        token_ids=prompts[0].token_ids,
        sampling=samplings[0],
        on_disconnect=completion.on_disconnect,
        params=completion,
        num_choices=best_of,
        lane=lane,
    )
    others = [
        sibling(first, index, prompt_token_ids=prompt.token_ids, sampling=sampling)
        for index, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
        if index > 0
    ]
    jobs = (first, *others)
    timing = Timing()
    context = ResponseContext(
        id=caller.request_id,
        model=model.card.name,
        created_s=now_s(),
        num_choices=len(jobs) * best_of,
        include_usage=completion.include_usage,
        counted_prompt_tokens=sum(len(prompt.token_ids) for prompt in prompts)
        if completion.has_continuous_usage
        else None,
        num_logprobs=completion.logprobs,
        prompt_token_ids=prompts[0].token_ids if completion.return_token_ids else None,
        service_tier=served_tier(completion),
        timing=timing if completion.return_metrics else None,
    )
    scored = tuple(prompt for prompt in map(scored_prompt, jobs) if prompt is not None)
    shape = _shape(completion, best_of, prompts, jobs, scored)
    formatter = CompletionFormatter(context, model.text.tokenizer, shape)
    return PreparedCompletion(jobs, formatter, timing, scored)


def _sampling(
    completion: CompletionRequest,
    model: ServedModel,
    prompt: EncodedPrompt,
    grammar: Grammar | None,
) -> SamplingParams:
    budget = model.budget(len(prompt.token_ids))
    budget.check_prompt(prompt.param)
    budget.report_clipped(*completion.requested_tokens)
    sampling = replace(completion_sampling(completion, budget), grammar=grammar)
    if completion.best_of is None or completion.best_of == completion.n:
        return sampling
    # Choices are ranked by them, whether they are to be shown or not.
    return replace(sampling, logprobs=sampling.logprobs or 0)


def _fitted(
    generation: GenerationService,
    completion: CompletionRequest,
    sampling: SamplingParams,
    num_prompts: int = 1,
    repeated: tuple[str, int] = ("echo", 0),
) -> SamplingParams:
    """Returns the sampling of one of `num_prompts` prompts, for a response within its bound.

    `repeated`: the member that requests the prompts in the answer, and their bytes in it.
    """
    several = "n" if completion.best_of is None else "best_of"
    size = ResponseSize(
        choices=(("prompts", num_prompts), (several, completion.best_of or completion.n)),
        max_tokens=completion.requested_tokens,
        logprobs=("logprobs", sampling.logprobs),
        entry_bytes=COMPLETION_ENTRY_BYTES,
        has_token_ids=completion.return_token_ids,
        prompts=repeated,
    )
    return size.fitted(sampling, generation.max_response_bytes)


def _read_prompts(
    model: ServedModel, completion: CompletionRequest, best_of: int
) -> tuple[tuple[EncodedPrompt, ...], tuple[str, int]]:
    """Returns the prompts, the member that requests them in the answer, and their bytes there.

    With `echo` each choice repeats the text of its prompt, and its log probabilities where they are
    shown. Its ids are in each choice where there are several prompts, else in the answer once.
    Raises InvalidParameter.
    """
    prompts = encoded_prompts(model, completion.prompt, completion.echo)
    num_bytes = 0
    num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    if completion.echo:
        num_bytes += best_of * sum(len(json_bytes(prompt.text)) for prompt in prompts)
        if completion.logprobs is not None:
            entry_bytes = (1 + completion.logprobs) * COMPLETION_ENTRY_BYTES
            num_bytes += best_of * num_tokens * (TOKEN_BYTES + entry_bytes)
    num_bytes += best_of * prompt_logprobs_bytes(num_tokens, completion.prompt_logprobs)
    if completion.return_token_ids:
        copies = best_of if len(prompts) > 1 else 1
        num_bytes += copies * TOKEN_ID_BYTES * num_tokens
    members = {
        "prompt_logprobs": completion.prompt_logprobs is not None,
        "echo": completion.echo,
    }
    asking = (name for name, is_asked in members.items() if is_asked)
    return prompts, (next(asking, "return_token_ids"), num_bytes)


def _shape(
    completion: CompletionRequest,
    best_of: int,
    prompts: tuple[EncodedPrompt, ...],
    jobs: tuple[Job, ...],
    scored: tuple[ScoredPrompt, ...],
) -> CompletionShape:
    several = len(jobs) > 1
    shown = prompts if several and completion.return_token_ids else ()
    return CompletionShape(
        best_of=best_of,
        n=completion.n,
        echoes=tuple(prompt.text for prompt in prompts) if completion.echo else None,
        prompt_token_ids=tuple(prompt.token_ids for prompt in shown),
        job_ids=tuple(job.job_id for job in jobs) if several else (),
        scored=scored,
        num_prompt_logprobs=completion.prompt_logprobs,
    )
