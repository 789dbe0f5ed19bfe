"""A request's sampling in vLLM's own parameters, for its sampler in this process or over HTTP."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from shared.messages import GrammarKind
from worker.engine.request import EngineRequest

# vLLM's names of the languages, in its StructuredOutputsParams.
STRUCTURED_OUTPUTS = {
    GrammarKind.JSON_SCHEMA: "json",
    GrammarKind.REGEX: "regex",
    GrammarKind.LARK: "grammar",
}

_LEAST_TOP_P = 1e-6  # vLLM takes no 0, which keeps the most likely token alone
_SEED_STEP = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio


def sampling_members(
    request: EngineRequest, most_tokens: int, eos_token_ids: Set[int]
) -> dict[str, Any]:
    """Returns members of vLLM's SamplingParams with which its own sampler draws.

    The earlier output of a resumed request is prompt to vLLM: its output penalties and random
    numbers start again, the latter with another seed.
    """
    params, num_known = request.params, len(request.output_token_ids)
    scores_prompt = request.scores_prompt and params.prompt_logprobs is not None
    ends = () if params.ignore_eos else tuple(sorted(eos_token_ids))
    return {
        "max_tokens": max(1, most_tokens - num_known),
        "min_tokens": max(0, min(params.min_tokens, most_tokens) - num_known),
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": max(params.top_p, _LEAST_TOP_P),
        "min_p": params.min_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
        "logit_bias": dict(params.logit_bias) or None,
        "seed": None if params.greedy else ((params.seed or 0) + num_known * _SEED_STEP) % 2**63,
        "stop_token_ids": [*params.stop_token_ids, *ends],
        "ignore_eos": True,  # these are among the stop tokens
        "logprobs": params.logprobs,
        "prompt_logprobs": params.prompt_logprobs if scores_prompt else None,
    }
