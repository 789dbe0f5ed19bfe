"""VllmEngine: vLLM's engine behind the interface that EngineLoop drives.

vLLM schedules and computes. When an output ends is decided here, by the same rules as in
worker.engine, so that both engines end the same stream at the same token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm import LLMEngine, RequestOutput
from vllm import SamplingParams as VllmParams
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind

from shared.messages import ErrorCode, FinishReason, SamplingParams, TokenLogprob
from worker.engine.config import EngineConfig
from worker.engine.errors import EngineFull, RequestRefused
from worker.engine.request import EngineOutput, EngineRequest, EngineStats, check_request
from worker.engine.stop import StopMatch, find_stop
from worker.vllm.requests import NUM_EXTRA_TOP, prompt_logprobs, to_extra_args, token_logprob
from worker.vllm.stats import StatsReader


@dataclass(slots=True)
class _Live:
    """A request inside vLLM, and what it has generated."""

    request: EngineRequest
    most_tokens: int  # of its output
    output: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0

    @property
    def samples_nothing(self) -> bool:
        return self.request.params.max_tokens == 0


class VllmEngine:
    """Runs many requests at once on one LLMEngine, which steps in this process."""

    def __init__(
        self, llm: LLMEngine, config: EngineConfig, vocab_size: int, stats: StatsReader
    ) -> None:
        self.config = config
        self._llm = llm
        self._vocab_size = vocab_size
        self._stats = stats
        self._live: dict[str, _Live] = {}
        self._ended_on_arrival: dict[str, EngineOutput] = {}

    def add(self, request: EngineRequest) -> None:
        """Adds a request; `step` returns its outputs. Raises RequestRefused, such as EngineFull."""
        check_request(request, self.config, self._vocab_size)
        request_id = request.request_id
        if request_id in self._live or request_id in self._ended_on_arrival:
            raise RequestRefused(
                ErrorCode.PAYLOAD_INVALID, f"request {request_id!r} is running already"
            )
        if len(self._live) >= self.config.max_num_seqs + self.config.max_waiting:
            raise EngineFull(self.config.max_waiting)
        room = self.config.max_model_len - len(request.prompt_token_ids)
        live = _Live(request, min(request.params.max_tokens, room), [*request.output_token_ids])
        # An earlier attempt may have died between its last token and the report of its end.
        if stop := self._find_stop(live):
            self._ended_on_arrival[request_id] = _ended(live, stop)
            return
        try:
            self._llm.add_request(
                request_id,
                tokens_input(
                    [*request.prompt_token_ids, *request.output_token_ids],
                    cache_salt=request.tenant,
                ),
                self._vllm_params(live),
            )
        except (VLLMClientError, ValueError) as error:
            raise RequestRefused(ErrorCode.PAYLOAD_INVALID, f"vLLM: {error}") from error
        self._live[request_id] = live

    def cancel(self, request_id: str) -> bool:
        """Ends a request; its blocks are free at once and it has no further outputs."""
        if self._ended_on_arrival.pop(request_id, None) is not None:
            return True
        if self._live.pop(request_id, None) is None:
            return False
        self._llm.abort_request([request_id])
        return True

    def has_unfinished(self) -> bool:
        """Returns whether `step` has anything to do."""
        return bool(self._live or self._ended_on_arrival or self._llm.has_unfinished_requests())

    def step(self) -> list[EngineOutput]:
        """Runs one step of vLLM's and returns its outputs."""
        outputs = list(self._ended_on_arrival.values())
        self._ended_on_arrival.clear()
        if self._llm.has_unfinished_requests():
            for result in self._llm.step():
                assert isinstance(result, RequestOutput), "the model generates"
                live = self._live.get(result.request_id)
                if live is not None:
                    outputs += self._take(live, result)
        return outputs

    def stats(self) -> EngineStats:
        """Returns vLLM's own figures, of its last step."""
        return self._stats.engine_stats(self.config, is_idle=not self._live)

    def self_test(self) -> None:
        """Generates two tokens for no request. Raises what vLLM raises."""
        prompt = tuple(i % self._vocab_size for i in range(min(4, self.config.max_model_len - 1)))
        params = SamplingParams(max_tokens=2, temperature=0.0)
        self.add(EngineRequest(request_id="self-test", prompt_token_ids=prompt, params=params))
        while self.has_unfinished():
            self.step()

    def _vllm_params(self, live: _Live) -> VllmParams:
        params = live.request.params
        scores_prompt = live.request.scores_prompt and params.prompt_logprobs is not None
        return VllmParams(
            temperature=0.0,
            max_tokens=max(1, live.most_tokens - len(live.output)),
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            logprobs=None if params.logprobs is None else params.logprobs + NUM_EXTRA_TOP,
            prompt_logprobs=params.prompt_logprobs if scores_prompt else None,
            extra_args=to_extra_args(live.request),
            skip_clone=True,
        )

    def _find_stop(self, live: _Live) -> StopMatch | None:
        return find_stop(
            live.output, live.request.params, self.config.eos_token_ids, live.most_tokens
        )

    def _take(self, live: _Live, result: RequestOutput) -> list[EngineOutput]:
        request = live.request
        outputs = []
        live.num_cached_tokens = min(result.num_cached_tokens or 0, len(request.prompt_token_ids))
        if result.prompt_logprobs and request.params.prompt_logprobs is not None:
            scores = prompt_logprobs(
                request.prompt_token_ids, result.prompt_logprobs, request.params.prompt_logprobs
            )
            if scores:
                outputs.append(EngineOutput(request.request_id, (), prompt_logprobs=scores))
        completion = result.outputs[0]
        tokens, stop = self._grow(live, completion.token_ids)
        if live.samples_nothing and result.finished:
            stop = StopMatch(FinishReason.LENGTH)
        if not tokens and stop is None and not result.finished:
            return outputs
        if stop is not None or result.finished:
            self._live.pop(request.request_id)
            if not result.finished:
                self._llm.abort_request([request.request_id])
        if stop is None and result.finished:
            outputs.append(_failed(live, f"vLLM ended it: {completion.finish_reason}"))
            return outputs
        outputs.append(
            EngineOutput(
                request.request_id,
                tuple(tokens),
                logprobs=_logprobs(live, tokens, completion.logprobs),
                finish_reason=stop.reason if stop else None,
                stop_reason=stop.token_id if stop else None,
                num_cached_tokens=live.num_cached_tokens,
            )
        )
        return outputs

    def _grow(self, live: _Live, token_ids: Sequence[int]) -> tuple[list[int], StopMatch | None]:
        """Appends new tokens up to the first that ends the output; returns them and the end."""
        taken: list[int] = []
        if live.samples_nothing:
            return taken, None
        for token_id in token_ids:
            live.output.append(token_id)
            taken.append(token_id)
            if stop := self._find_stop(live):
                return taken, stop
        return taken, None


def _logprobs(
    live: _Live, tokens: Sequence[int], rows: Sequence[Mapping[int, Any]] | None
) -> tuple[TokenLogprob, ...] | None:
    num_top = live.request.params.logprobs
    if num_top is None:
        return None
    found = zip(tokens, rows or (), strict=False)
    return tuple(token_logprob(token_id, row, num_top) for token_id, row in found)


def _ended(live: _Live, stop: StopMatch) -> EngineOutput:
    return EngineOutput(
        live.request.request_id,
        (),
        logprobs=None if live.request.params.logprobs is None else (),
        finish_reason=stop.reason,
        stop_reason=stop.token_id,
    )


def _failed(live: _Live, message: str) -> EngineOutput:
    return EngineOutput(
        live.request.request_id,
        (),
        finish_reason=FinishReason.ERROR,
        error=ErrorCode.ENGINE_ERROR,
        message=message,
        num_cached_tokens=live.num_cached_tokens,
    )
