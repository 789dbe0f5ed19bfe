"""Requests that use each part of vLLM once which is compiled at its first use."""

from __future__ import annotations

from shared.messages import Grammar, GrammarKind, SamplingParams
from worker.engine.config import EngineConfig
from worker.engine.request import EngineRequest

# Numbers of ranked rows: one, several, and another one, which compiles the code for any number.
_SCORED_ROWS = (1, 3, 5)


def warm_up_requests(config: EngineConfig, vocab_size: int) -> list[EngineRequest]:
    """Returns short requests without a job, for a model of `vocab_size` tokens."""
    longest = config.max_model_len - 2
    kinds = [
        (rows + 1, SamplingParams(max_tokens=0, temperature=0.0, seed=0, prompt_logprobs=top))
        for rows, top in zip(_SCORED_ROWS, (0, 1, 5), strict=True)
    ]
    sampled = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "seed": 0}
    penalties = {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1}
    kinds += [
        (4, SamplingParams(max_tokens=2, temperature=0.0, seed=0, logprobs=5)),
        (4, SamplingParams(max_tokens=2, **sampled)),  # type: ignore[arg-type]
        (4, SamplingParams(max_tokens=2, logprobs=1, **sampled, **penalties)),  # type: ignore[arg-type]
        (4, SamplingParams(max_tokens=2, logit_bias={0: -1.0}, seed=0, min_tokens=1)),
    ]
    if config.structured_output:
        grammar = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "integer"}')
        kinds.append((4, SamplingParams(max_tokens=2, seed=0, grammar=grammar)))
    return [
        EngineRequest(
            request_id=f"warm-up-{number}",
            prompt_token_ids=tuple((number + at) % vocab_size for at in range(num_tokens)),
            params=params,
        )
        for number, (num_tokens, params) in enumerate(kinds)
        if num_tokens <= longest
    ]
