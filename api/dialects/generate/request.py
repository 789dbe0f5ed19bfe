"""SamplingParams of a request of the native dialect."""

from __future__ import annotations

from api.dialects.generate.protocol import GenerateRequest
from api.generation.sampling import (
    Room,
    check_prompt_logprobs,
    renamed_parameters,
    resolved_seed,
    stop_strings,
    stop_token_ids,
    with_defaults,
)
from shared.messages import SamplingParams

DEFAULT_MAX_TOKENS = 64
DEFAULT_TEMPERATURE = 0.0  # of a model that has no default of its own


def generate_sampling(request: GenerateRequest, room: Room) -> SamplingParams:
    """Raises InvalidParameter. 64 tokens where the request does not say, or what fits."""
    check_prompt_logprobs(request.prompt_logprobs, streamed=request.stream)
    with renamed_parameters({"repetition_penalty": "rep_penalty"}):
        return SamplingParams(
            max_tokens=room.max_tokens(request.max_tokens, DEFAULT_MAX_TOKENS),
            min_tokens=request.min_tokens,
            **with_defaults(request, request.rep_penalty, room.defaults, DEFAULT_TEMPERATURE),
            seed=resolved_seed(request.seed),
            stop=stop_strings(request.stop),
            stop_token_ids=stop_token_ids("stop_token_ids", request.stop_token_ids, room),
            ignore_eos=request.ignore_eos,
            prompt_logprobs=request.prompt_logprobs,
        )
