"""Requests on their way into vLLM, to its sampler, and their tokens on the way out."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from shared.messages import PromptLogprob, SamplingParams, TokenLogprob
from worker.engine.request import EngineRequest

_PARAMS, _NUM_PROMPT_TOKENS = "penstock_params", "penstock_num_prompt_tokens"
_DECIMALS = 6  # of prompts' log probabilities, as worker.model.sampling.prompt_scorer has them
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(SamplingParams)


class ValueAndRank(Protocol):
    """vLLM's Logprob."""

    logprob: float
    rank: int | None


def to_extra_args(request: EngineRequest) -> dict[str, Any]:
    """Returns what the sampler must know of a request, as plain data for any process of vLLM's."""
    return {
        _PARAMS: base64.b64encode(_encoder.encode(request.params)).decode(),
        _NUM_PROMPT_TOKENS: len(request.prompt_token_ids),
    }


def from_extra_args(extra_args: Mapping[str, Any] | None) -> tuple[SamplingParams, int] | None:
    """Returns a request's parameters and the length of its prompt; None: it is vLLM's own."""
    if extra_args is None or _PARAMS not in extra_args:
        return None
    params = _decoder.decode(base64.b64decode(extra_args[_PARAMS]))
    return params, extra_args[_NUM_PROMPT_TOKENS]


def eos_token_ids(model_config: Any) -> frozenset[int]:
    """Returns the tokens that end a sequence: of generation_config.json, else of config.json.

    `model_config` is vLLM's ModelConfig.
    """
    value = model_config.try_get_generation_config().get("eos_token_id")
    for config in (model_config.hf_config, model_config.hf_text_config):
        if value is None:
            value = getattr(config, "eos_token_id", None)
    if value is None:
        return frozenset()
    return frozenset(value if isinstance(value, list | tuple) else [value])


# A row of the sampler's is normalised by vLLM on its way. Two of its values are known to be the
# largest: that of the sampled token, which is SAMPLED less its log probability, and that of a token
# without a meaning, ANCHOR, from which the normalisation is undone.
SAMPLED, ANCHOR = 2.0, 1.0
NUM_EXTRA_TOP = 2  # best values of the row that are these two


def token_logprob(token_id: int, values: Mapping[int, ValueAndRank], num_top: int) -> TokenLogprob:
    """Returns a sampled token's log probability and the `num_top` best, from the sampler's row."""
    found = sorted(((value.logprob, other) for other, value in values.items()), reverse=True)
    (sampled, first), (anchor, _), *others = found
    assert first == token_id, "vLLM takes the largest value of the row"
    shift = ANCHOR - anchor
    logprob = SAMPLED - (sampled + shift)
    best = [(other, value + shift) for value, other in others if value > -math.inf]
    top = sorted([*best, (token_id, logprob)], key=lambda item: (-item[1], item[0]))
    return TokenLogprob(token_id, logprob, tuple(top[:num_top]))


def prompt_logprobs(
    token_ids: Sequence[int], entries: Sequence[Mapping[int, ValueAndRank] | None], num_top: int
) -> tuple[PromptLogprob, ...]:
    """Returns the log probabilities of all prompt tokens but the first, which has none."""
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
