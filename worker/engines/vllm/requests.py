"""Requests on their way into vLLM, to its sampler, and their tokens on the way out."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from shared.messages import PromptLogprob, SamplingParams, TokenLogprob
from worker.engine.request import EngineRequest

# A row that failed yields it. Any token would do: when it comes the engine looks for a failure.
FAILED_TOKEN = 0

_KEY = "penstock"
_DECIMALS = 6  # of prompts' log probabilities, as worker.model.sampling.prompt_scorer has them
_encoder = msgspec.msgpack.Encoder()


class SampledRequest(NamedTuple):
    """What the sampler must know of a request."""

    seq_id: int  # unique in the engine's life
    params: SamplingParams
    num_prompt_tokens: int  # of the client's prompt: vLLM's has outputs of earlier attempts as well
    tenant: str


_decoder = msgspec.msgpack.Decoder(SampledRequest)


class ValueAndRank(Protocol):
    """vLLM's Logprob."""

    logprob: float
    rank: int | None


def to_extra_args(request: EngineRequest, seq_id: int) -> dict[str, Any]:
    """Returns a request's parameters for the sampler, as plain data for any process of vLLM's."""
    num_prompt_tokens = len(request.prompt_token_ids)
    sampled = SampledRequest(seq_id, request.params, num_prompt_tokens, request.tenant)
    return {_KEY: base64.b64encode(_encoder.encode(sampled)).decode()}


def from_extra_args(extra_args: Mapping[str, Any] | None) -> SampledRequest | None:
    """Returns what `to_extra_args` was given; None: the request is vLLM's own."""
    if extra_args is None or _KEY not in extra_args:
        return None
    return _decoder.decode(base64.b64decode(extra_args[_KEY]))


def vllms_logprob(token_id: int, values: Mapping[int, ValueAndRank], num_top: int) -> TokenLogprob:
    """Returns a sampled token's log probability and the `num_top` best, as vLLM has them."""
    best = sorted(values.items(), key=lambda item: (-item[1].logprob, item[0]))
    top = [(other, value.logprob) for other, value in best if value.logprob > -math.inf]
    return TokenLogprob(token_id, values[token_id].logprob, tuple(top[:num_top]))


def prompt_logprobs(
    token_ids: Sequence[int], entries: Sequence[Mapping[int, ValueAndRank] | None], num_top: int
) -> tuple[PromptLogprob, ...]:
    """Returns the log probabilities of all prompt tokens except the first, which has none."""
    scores = []
    for token_id, values in list(zip(token_ids, entries, strict=False))[1:]:
        assert values is not None, "the first token alone has no log probability"
        best = sorted(values.items(), key=lambda item: (-item[1].logprob, item[0]))
        own = values[token_id]
        scores.append(
            PromptLogprob(
                token_id,
                _rounded(own.logprob),
                own.rank or 0,
                tuple((other, _rounded(value.logprob)) for other, value in best[:num_top]),
            )
        )
    return tuple(scores)


def _rounded(logprob: float) -> float:
    return round(logprob, _DECIMALS) + 0.0
