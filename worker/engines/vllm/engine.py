"""VllmEngine: vLLM's engine with the interface that EngineLoop drives.

vLLM schedules and computes. When an output ends is decided here, by the same rules as in
worker.engine, so that both engines end the same stream at the same token. Which requests have a
slot is decided before vLLM, by Admission.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from vllm import LLMEngine, RequestOutput
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest

from shared.cpu_time import TenantSeconds
from shared.messages import (
    ErrorCode,
    FinishReason,
    Grammar,
    GrammarKind,
    SamplingParams,
    TokenLogprob,
)
from worker.engine.admission import Admission
from worker.engine.config import EngineConfig
from worker.engine.errors import RequestRefused, StepsFailed, failure_named
from worker.engine.held_requests import Arrivals
from worker.engine.measures import StepMeasures
from worker.engine.queue import make_policy
from worker.engine.request import EngineOutput, EngineRequest, EngineStats
from worker.engine.stop import StopMatch
from worker.engines.vllm.adapters import load_adapter
from worker.engines.vllm.grammars import bounded_grammar
from worker.engines.vllm.kv_blocks import FailedBlocks
from worker.engines.vllm.live_request import LiveRequest, vllm_params
from worker.engines.vllm.prefixes import VllmPrefixes
from worker.engines.vllm.requests import FAILED_TOKEN, prompt_logprobs, vllms_logprob
from worker.engines.vllm.sampler import drain_masks, take_reports
from worker.engines.vllm.stats import StatsReader, num_hashed_blocks
from worker.engines.vllm.vllm_compat import call_with_events, starved_ids, stats_of
from worker.model.device import step_failure

log = logging.getLogger(__name__)


class VllmEngine:
    """Runs many requests at once on one LLMEngine, which steps in this process."""

    def __init__(
        self,
        llm: LLMEngine,
        config: EngineConfig,
        vocab_size: int,
        stats: StatsReader,
        *,
        own_sampler: bool,
        adapters: Mapping[str, LoRARequest] = MappingProxyType({}),
    ) -> None:
        """`own_sampler`: PenstockLogitsProcessor draws the tokens, and not vLLM's sampler.
        `adapters`: those of `config`, as vLLM has them."""
        self.config = config
        self._adapters = adapters
        self._own_sampler = own_sampler
        self._llm = llm
        self._vocab_size = vocab_size
        self._stats = stats
        self._arrivals = Arrivals(config, vocab_size, LiveRequest)
        self._live = self._arrivals.live
        self._admission: Admission[LiveRequest] = Admission(
            config.max_num_seqs, make_policy(config.policy), preempts=config.preempts
        )
        self._num_entered = 0
        self._failed_blocks = FailedBlocks(llm)
        self._mask_times = TenantSeconds()
        stats.drain_masks = self._drain_masks
        prefixes = VllmPrefixes()
        call_with_events(llm, prefixes.take)
        stats.drain_prefixes = prefixes.drain

    def add(self, request: EngineRequest) -> None:
        """Adds a request; `step` returns its outputs. Raises RequestRefused, such as EngineFull."""
        live = self._arrivals.add(request)
        if live is not None:
            self._admission.add(live)

    def cancel(self, request_id: str) -> bool:
        """Ends a request; its blocks are free at once and it has no further outputs."""
        if self._arrivals.cancel_ended(request_id):
            return True
        live = self._live.pop(request_id, None)
        if live is None:
            return False
        self._admission.remove(live)
        if live.vllm_id:
            self._llm.abort_request([request_id])
        return True

    def has_unfinished(self) -> bool:
        """Returns whether `step` has anything to do."""
        return bool(self._arrivals) or bool(self._llm.has_unfinished_requests())

    def step(self) -> list[EngineOutput]:
        """Runs one step of vLLM's and returns its outputs.

        Raises EngineFailed when the device fails, and vLLM's other errors unchanged: they do not
        name the request at fault and vLLM cannot undo the step, so this process ends, and its jobs
        are blamed as after a crash.
        """
        outputs = self._arrivals.take_ended()
        outputs += self._move()
        if not self._own_sampler:
            outputs += self._end_slow_grammars()
        if self._llm.has_unfinished_requests():
            results = self._step()
            if any(map(self._is_reported, results)):
                self._take_reports()
            for result in results:
                live = self._live.get(result.request_id)
                if live is not None:
                    outputs += self._take(live, result)
        return outputs

    @property
    def measures(self) -> StepMeasures:
        return self._stats.measures

    def stats(self) -> EngineStats:
        """Returns vLLM's own figures, of its last step."""
        inside = [live for live in self._live.values() if live.vllm_id]
        return self._stats.engine_stats(
            self.config,
            num_live=len(self._live),
            num_inside=len(inside),
            num_without_token=sum(live.is_prefilling for live in inside),
            num_preempted=self._admission.num_preemptions,
            num_hashed=num_hashed_blocks(self._llm),
        )

    def self_test(self) -> None:
        """Generates two tokens for no request. Raises vLLM's errors."""
        prompt = tuple(i % self._vocab_size for i in range(min(4, self.config.max_model_len - 1)))
        params = SamplingParams(max_tokens=2, temperature=0.0)
        self.add(EngineRequest(request_id="self-test", prompt_token_ids=prompt, params=params))
        while self.has_unfinished():
            self.step()

    def warm_up(self, report: Callable[[float], None]) -> None:
        """Runs each kind of request once, so that the first real one compiles nothing.

        vLLM compiles the ranks of log probabilities and its sampler's filters at first use, in a
        step: for one row, for several, and then for any number. `report` gets the share that is
        done. A kind that this model refuses is skipped. Raises vLLM's errors.
        """
        requests = warm_up_requests(self.config, self._vocab_size)
        for done, request in enumerate(requests):
            report(done / len(requests))
            try:
                self.add(request)
            except RequestRefused as refused:
                log.debug(
                    "vLLM refused a warm-up request",
                    extra={"request": request.request_id, "reason": refused},
                )
            while self.has_unfinished():
                self.step()
        self._stats.reset()

    def _move(self) -> list[EngineOutput]:
        """Moves requests out of and into vLLM; returns the ends of those that vLLM refuses."""
        starved: list[LiveRequest] = []
        if self._own_sampler and (ids := starved_ids(self._llm)):
            starved = [live for live in self._live.values() if live.vllm_id in ids]
        moves = self._admission.moves(starved)
        self.measures.gave_way = [live.request.request_id for live in moves.gave_way]
        if moves.leaving:
            self._llm.abort_request([live.request.request_id for live in moves.leaving])
            for live in moves.leaving:
                live.leave()
        return [failed for live in moves.entering for failed in self._enter(live)]

    def _enter(self, live: LiveRequest) -> list[EngineOutput]:
        request = live.request
        live.sampler_id = self._num_entered
        self._num_entered += 1
        adapter = self._adapters.get(request.adapter)  # the config's check has let it in
        if adapter is not None and (why := load_adapter(self._llm, adapter)):
            self.cancel(request.request_id)
            return [live.failed(ErrorCode.ENGINE_ERROR, why)]
        try:
            vllm_id = self._llm.add_request(
                request.request_id,
                tokens_input(live.known_tokens, cache_salt=request.tenant),
                vllm_params(live, self.config.eos_token_ids, own_sampler=self._own_sampler),
                lora_request=adapter,
                priority=live.priority if self.config.policy == "priority" else 0,
            )
        except (VLLMClientError, ValueError) as error:
            self.cancel(request.request_id)
            return [live.failed(ErrorCode.PAYLOAD_INVALID, f"vLLM: {error}")]
        live.enter(vllm_id, stats_of(self._llm, vllm_id))
        return []

    def _end_slow_grammars(self) -> list[EngineOutput]:
        """Ends the requests that vLLM's sampler keeps to a grammar which cannot be followed on."""
        outputs = []
        for live in list(self._live.values()):
            if live.request.params.grammar is None or not live.vllm_id:
                continue
            grammar = bounded_grammar(self._llm, live.vllm_id)
            if grammar is None:
                continue
            self._mask_times.add(live.tenant, grammar.take_cpu_s())
            if why := grammar.failure:
                self.cancel(live.request.request_id)
                outputs.append(live.failed(ErrorCode.GRAMMAR_FAILED, why))
        return outputs

    def _step(self) -> list[RequestOutput]:
        try:
            self._failed_blocks.begin_step()
            return [each for each in self._llm.step() if isinstance(each, RequestOutput)]
        except Exception as error:
            device = torch.device(self._llm.vllm_config.device_config.device_type)
            failure = step_failure(error, device)
            if failure is None:
                raise
            raise StepsFailed(str(failure)) from error

    def _is_reported(self, result: RequestOutput) -> bool:
        live = self._live.get(result.request_id)
        token_ids = result.outputs[0].token_ids
        if live is None or not token_ids or not self._own_sampler:
            return False
        return live.request.params.logprobs is not None or FAILED_TOKEN in token_ids

    def _drain_masks(self) -> dict[str, float]:
        if self._own_sampler:
            for times in self._llm.collective_rpc(drain_masks):
                for tenant, seconds in times.items():
                    self._mask_times.add(tenant, seconds)
        return self._mask_times.drain()

    def _take_reports(self) -> None:
        live_by_id = {live.sampler_id: live for live in self._live.values() if live.vllm_id}
        # Every worker draws the same tokens; those of a pipeline's earlier stages draw none.
        for reports in self._llm.collective_rpc(take_reports):
            for report in reports:
                if report.seq_id in live_by_id:
                    live_by_id[report.seq_id].reports[report.output_index] = report

    def _take(self, live: LiveRequest, result: RequestOutput) -> list[EngineOutput]:
        request = live.request
        outputs = []
        if live.is_prefilling:
            self._note_first_output(live, result.num_cached_tokens or 0)
        if result.prompt_logprobs and request.params.prompt_logprobs is not None:
            scores = prompt_logprobs(
                request.prompt_token_ids, result.prompt_logprobs, request.params.prompt_logprobs
            )
            if scores:
                live.is_scored = True
                outputs.append(EngineOutput(request.request_id, (), prompt_logprobs=scores))
        completion = result.outputs[0]
        grown = self._grow(live, completion.token_ids, completion.logprobs)
        if grown.failure is not None:
            self.cancel(request.request_id)
            if grown.failure[0] is ErrorCode.NONFINITE_LOGITS:
                self._failed_blocks.discard(live.vllm_id)
            return [*outputs, live.failed(*grown.failure)]
        stop = grown.stop
        if live.samples_nothing and result.finished:
            stop = StopMatch(FinishReason.LENGTH)
        if not grown.token_ids and stop is None and not result.finished:
            return outputs
        if stop is not None or result.finished:
            self._live.pop(request.request_id)
            self._admission.remove(live)
            if not result.finished:
                self._llm.abort_request([request.request_id])
        if stop is None and result.finished:
            reason = f"vLLM ended it: {completion.finish_reason}"
            return [*outputs, live.failed(ErrorCode.ENGINE_ERROR, reason)]
        outputs.append(
            EngineOutput(
                request.request_id,
                tuple(grown.token_ids),
                logprobs=None if request.params.logprobs is None else tuple(grown.logprobs),
                finish_reason=stop.reason if stop else None,
                stop_reason=stop.token_id if stop else None,
                num_cached_tokens=live.num_cached_tokens,
                times=None if stop is None else live.times,
            )
        )
        return outputs

    def _note_first_output(self, live: LiveRequest, num_cached_tokens: int) -> None:
        """Notes that its tokens are computed, since it entered vLLM."""
        live.is_prefilling = False
        if live.is_counted:
            self._stats.uncount_prompt(len(live.known_tokens))
        elif live.num_entered == 1:  # later hits are blocks that it computed itself
            live.num_cached_tokens = min(num_cached_tokens, len(live.request.prompt_token_ids))
        live.is_counted = True

    def _grow(
        self,
        live: LiveRequest,
        token_ids: Sequence[int],
        vllms_logprobs: Sequence[Mapping[int, Any]] | None,
    ) -> _Grown:
        """Appends new tokens up to the first that ends the output, or was not drawn."""
        grown = _Grown()
        num_top = live.request.params.logprobs
        if live.samples_nothing:
            return grown
        for place, token_id in enumerate(token_ids):
            report = live.reports.pop(len(live.output), None)
            if report is not None and report.failure:
                grown.failure = failure_named(report.failure)
                return grown
            if num_top is not None and not self._own_sampler:
                assert vllms_logprobs is not None, "they were requested"
                grown.logprobs.append(vllms_logprob(token_id, vllms_logprobs[place], num_top))
            elif num_top is not None:
                if report is None or report.logprob is None:
                    grown.failure = ErrorCode.ENGINE_ERROR, "the sampler gave no log probability"
                    return grown
                grown.logprobs.append(report.logprob)
            live.output.append(token_id)
            grown.token_ids.append(token_id)
            if stop := live.find_stop(self.config.eos_token_ids):
                grown.stop = stop
                return grown
        return grown


@dataclass(slots=True)
class _Grown:
    """What a step has added to an output."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    stop: StopMatch | None = None
    failure: tuple[ErrorCode, str] | None = None


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
