"""LiveRequest: a request of VllmEngine's from its arrival to its end, inside vLLM or held."""

from __future__ import annotations

import time
from collections.abc import Set
from dataclasses import dataclass, field

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.metrics.stats import RequestStateStats

from worker.engine.held_requests import HeldRequest
from worker.engine.request import RequestTimes
from worker.engines.sampling_members import STRUCTURED_OUTPUTS, sampling_members
from worker.engines.vllm.requests import to_extra_args
from worker.engines.vllm.sampler import Report


@dataclass(slots=True, eq=False)
class LiveRequest(HeldRequest):
    """A request and its output.

    Each time it enters vLLM it is a new request there, and to the sampler: tokens that a step in
    flight still draws for it after it has left are dropped. Its times are on vLLM's clock.
    """

    vllm_id: str = ""  # its id in vLLM's scheduler; empty while it is held
    sampler_id: int = -1  # its id in the sampler, since it entered
    reports: dict[int, Report] = field(default_factory=dict)  # by output index; vLLM may be ahead
    timing: RequestStateStats | None = None  # vLLM's, since it entered; each step adds to it
    arrived_s: float = field(default_factory=time.monotonic)
    scheduled_s: float = 0.0  # before it entered, as the next; zero: not then
    first_token_s: float = 0.0
    num_entered: int = 0  # times
    is_prefilling: bool = True  # since it entered: it has no output yet
    is_counted: bool = False  # its prompt, in vLLM's figures
    is_scored: bool = False  # the log probabilities of its prompt are out

    @property
    def known_tokens(self) -> list[int]:
        """Its prompt and output."""
        return [*self.request.prompt_token_ids, *self.output]

    @property
    def samples_nothing(self) -> bool:
        return self.request.params.max_tokens == 0

    @property
    def wants_scores(self) -> bool:
        """The log probabilities of its prompt are wanted and not out yet."""
        request = self.request
        wanted = request.scores_prompt and request.params.prompt_logprobs is not None
        return wanted and not self.is_scored

    @property
    def times(self) -> RequestTimes:
        """The state of a request after its last token."""
        timing = self.timing
        assert timing is not None, "vLLM keeps them where it has a stat logger"
        scheduled_s = self.scheduled_s or timing.scheduled_ts
        first_token_s = self.first_token_s or timing.first_token_ts
        return RequestTimes(
            scheduled_s - self.arrived_s,
            first_token_s - scheduled_s,
            timing.last_token_ts - first_token_s,
        )

    def enter(self, vllm_id: str, timing: RequestStateStats | None) -> None:
        """Notes that it is inside vLLM now."""
        self.vllm_id = vllm_id
        self.timing = timing
        self.num_entered += 1
        self.is_prefilling = True

    def leave(self) -> None:
        """Notes that it is held."""
        if self.timing is not None:
            self.scheduled_s = self.scheduled_s or self.timing.scheduled_ts
            self.first_token_s = self.first_token_s or self.timing.first_token_ts
        self.vllm_id = ""
        self.reports.clear()


def vllm_params(live: LiveRequest, eos_token_ids: Set[int], *, own_sampler: bool) -> SamplingParams:
    """Returns vLLM's SamplingParams of a request that enters it, for PenstockLogitsProcessor
    (`own_sampler`) or for vLLM's sampler."""
    params = live.request.params
    if not own_sampler:
        grammar = params.grammar
        return SamplingParams(
            **sampling_members(live.request, live.most_tokens, eos_token_ids),
            structured_outputs=grammar
            and StructuredOutputsParams(**{STRUCTURED_OUTPUTS[grammar.kind]: grammar.text}),
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
