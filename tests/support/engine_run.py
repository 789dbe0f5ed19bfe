"""Runs prompts through a real Engine over a real model, all at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shared.messages import ErrorCode, FinishReason, PromptLogprob, SamplingParams, TokenLogprob
from worker.engine.engine import Engine
from worker.engine.request import EngineRequest
from worker.model.build import BuiltModel

_MAX_STEPS = 20_000


@dataclass
class Generated:
    """One prompt's output."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: ErrorCode | None = None


def new_engine(built: BuiltModel) -> Engine:
    return Engine(built.engine_config, built.runner, disk=built.disk)


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    label: str = "r",
    resumed: Sequence[Sequence[int]] | None = None,
    cancelled: Mapping[int, int] | None = None,
) -> list[Generated]:
    """`resumed` are each prompt's tokens that an earlier attempt has emitted; `cancelled` says how
    many tokens of some prompts are waited for.

    Adds every prompt, steps until all have ended, checks the blocks after every step."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    results = {f"{label}{i}": Generated() for i in range(len(prompts))}
    for i, prompt in enumerate(prompts):
        engine.add(
            EngineRequest(
                request_id=f"{label}{i}",
                prompt_token_ids=tuple(prompt),
                params=each[i],
                output_token_ids=tuple(resumed[i]) if resumed is not None else (),
            )
        )
    steps = 0
    while engine.has_unfinished():
        steps += 1
        assert steps < _MAX_STEPS, "the engine does not come to an end"
        for output in engine.step():
            result = results[output.request_id]
            result.token_ids += output.token_ids
            result.logprobs += output.logprobs or ()
            result.prompt_logprobs += output.prompt_logprobs
            result.finish_reason = output.finish_reason or result.finish_reason
            result.error = output.error or result.error
        for i, count in (cancelled or {}).items():
            result = results[f"{label}{i}"]
            if len(result.token_ids) >= count and result.finish_reason is None:
                engine.cancel(f"{label}{i}")
        engine.check_integrity()
    return list(results.values())
