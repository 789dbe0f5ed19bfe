"""What vLLM is asked for: the SamplingParams, as vLLM has them, of a request that enters it."""

from __future__ import annotations

from collections.abc import Set

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from shared.messages import GrammarKind
from worker.engines.vllm.live_request import LiveRequest
from worker.engines.vllm.requests import for_vllms_sampler, to_extra_args

_KINDS = {
    GrammarKind.JSON_SCHEMA: "json",
    GrammarKind.REGEX: "regex",
    GrammarKind.LARK: "grammar",
}


def vllm_params(live: LiveRequest, eos_token_ids: Set[int], *, own_sampler: bool) -> SamplingParams:
    """Returns them for PenstockLogitsProcessor (`own_sampler`) or for vLLM's sampler."""
    params = live.request.params
    if not own_sampler:
        grammar = params.grammar
        return SamplingParams(
            **for_vllms_sampler(live.request, live.most_tokens, eos_token_ids),
            structured_outputs=grammar
            and StructuredOutputsParams(**{_KINDS[grammar.kind]: grammar.text}),
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            skip_clone=True,
        )
    return SamplingParams(
        temperature=0.0,
        max_tokens=max(1, live.most_tokens - len(live.output)),
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        prompt_logprobs=params.prompt_logprobs if live.wants_scores else None,
        extra_args=to_extra_args(live.request, live.sampler_id),
        skip_clone=True,
    )
