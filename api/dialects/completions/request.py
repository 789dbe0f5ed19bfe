"""SamplingParams and choices of a completions request."""

from __future__ import annotations

from api.dialects.completions.protocol import CompletionRequest
from api.generation.sampling import Room, check_prompt_logprobs, sampling_params
from shared.messages import MAX_CHOICES, InvalidParameter, SamplingParams

DEFAULT_MAX_TOKENS = 16
MAX_LOGPROBS = 5


def completion_sampling(request: CompletionRequest, room: Room) -> SamplingParams:
    """Raises InvalidParameter. 16 tokens where the request does not say, or what fits.

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
    max_tokens = room.max_tokens(request.max_tokens, DEFAULT_MAX_TOKENS, least=least)
    return sampling_params(request, max_tokens, logprobs, prompt_logprobs, room)


def check_choices(request: CompletionRequest, num_prompts: int = 1) -> int:
    """How many choices are run for each prompt. Raises InvalidParameter."""
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
