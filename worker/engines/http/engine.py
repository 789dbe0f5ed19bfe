"""HttpEngine: an upstream's tokens with the interface that EngineLoop drives.

An event loop in a thread of its own sends the requests and reads the streams; `step` takes the
tokens that have come. The upstream schedules and computes. When an output ends is decided here, by
the same rules as in worker.engine, and which requests are at an upstream is decided by Admission.

A request whose stream breaks continues after its last token, at the same upstream or another. If
its output has to match a grammar it is sent again from the start, because upstreams begin grammars
with the output; it continues where it makes the same tokens.

An upstream that fails takes all its requests with it. Those that saw two failures without getting
further are sent one at a time, with no other beside them: which of them it cannot bear shows then.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace

import uvloop

from shared.messages import ErrorCode, FinishReason, Grammar, SamplingParams, TokenLogprob
from shared.text.base import GrammarInvalid
from shared.text.grammar_compiler import GrammarCompiler
from worker.engine.admission import Admission
from worker.engine.config import EngineConfig
from worker.engine.errors import RequestRefused, StepsFailed, UpstreamsLost
from worker.engine.held_requests import Arrivals, HeldRequest
from worker.engine.measures import StepMeasures
from worker.engine.queue import make_policy
from worker.engine.request import (
    EngineOutput,
    EngineRequest,
    EngineStats,
    RequestTimes,
)
from worker.engine.stop import StopMatch
from worker.engines.http.output_check import OutputCheck, OutputChecks, Replay
from worker.engines.http.servers import END, LENGTH, Piece, UpstreamBroke, UpstreamRefused
from worker.engines.http.upstreams import Upstream, Upstreams

STEP_WAIT_S = 0.01  # for the first token; a new request or a cancel waits as long
MAX_SHARED_BREAKS = 2  # of one request within TRIAL_TOKENS, until it is sent alone
TRIAL_TOKENS = 16  # that it gets alone before others are beside it again
MAX_VAIN_BREAKS = 3  # in a row, alone and without a token, until it fails
MAX_BREAKS = 32  # alone
FIRST_PAUSE_S = 0.1  # after a break, doubled up to MAX_PAUSE_S
MAX_PAUSE_S = 2.0
MAX_UNREAD = 16_384  # events of all streams
GATHER_S = 0.004  # for events after the last that were taken, so that they are taken together
MAX_OUTAGE_S = 10.0  # without any upstream, until the jobs go to other workers

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class LiveRequest(HeldRequest):
    """A request and its output as reported; its reader may be ahead."""

    task: asyncio.Task[None] | None = None
    was_sent: bool = False
    arrived_s: float = field(default_factory=time.monotonic)
    sent_s: float = 0.0
    first_token_s: float = 0.0

    @property
    def times(self) -> RequestTimes:
        """Its times, after its last token."""
        first_s = self.first_token_s or time.monotonic()
        return RequestTimes(
            self.sent_s - self.arrived_s, first_s - self.sent_s, time.monotonic() - first_s
        )


@dataclass(frozen=True, slots=True)
class _Failure:
    code: ErrorCode
    message: str


_News = tuple[LiveRequest, Piece | _Failure]


@dataclass(slots=True)
class _Breaks:
    """The breaks of one request's streams for which it may be to blame."""

    num_tokens: int  # of its output at the last one
    num_close: int = 0  # with less than TRIAL_TOKENS between them
    num_vain: int = 0
    num_alone: int = 0
    pause_s: float = FIRST_PAUSE_S

    @property
    def is_suspect(self) -> bool:
        return self.num_close >= MAX_SHARED_BREAKS

    @property
    def are_too_many(self) -> bool:
        return self.num_vain >= MAX_VAIN_BREAKS or self.num_alone >= MAX_BREAKS

    def trusted(self) -> None:
        """Notes that it has run alone for TRIAL_TOKENS."""
        self.num_close = self.num_vain = 0

    def note(self, num_tokens: int, *, is_blamed: bool, is_alone: bool) -> float:
        """Takes a break. Returns the seconds to wait after it."""
        if num_tokens > self.num_tokens:
            self.num_vain, self.pause_s = 0, FIRST_PAUSE_S
        if num_tokens >= self.num_tokens + TRIAL_TOKENS:
            self.num_close = 0
        self.num_tokens = num_tokens
        self.num_close += is_blamed
        self.num_vain += is_blamed and is_alone
        self.num_alone += is_blamed and is_alone
        paused_s, self.pause_s = self.pause_s, min(2 * self.pause_s, MAX_PAUSE_S)
        return paused_s


@dataclass(slots=True)
class _Counts:
    steps: int = 0
    prompt_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    generated_tokens: int = 0
    breaks: int = 0


class HttpEngine:
    """Runs requests at upstreams, at most `config.max_num_seqs` at once."""

    def __init__(
        self,
        config: EngineConfig,
        vocab_size: int,
        connect: Callable[[], Upstreams],
        grammars: GrammarCompiler,
    ) -> None:
        """`connect` is called in the event loop that uses the upstreams."""
        self.config = config
        self.measures = StepMeasures()
        self._arrivals = Arrivals(config, vocab_size, LiveRequest)
        self._live = self._arrivals.live
        self._running: set[LiveRequest] = set()
        self._admission: Admission[LiveRequest] = Admission(
            config.max_num_seqs, make_policy(config.policy), preempts=config.preempts
        )
        self._news: queue.SimpleQueue[list[_News]] = queue.SimpleQueue()
        self._num_put = self._num_taken = 0  # each is changed by one thread
        self._gathered: list[_News] = []  # in the loop
        self._gather_until_s = 0.0
        self._checks = OutputChecks(grammars)
        self._counts = _Counts()
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="upstreams", daemon=True
        )
        self._thread.start()
        self._upstreams = asyncio.run_coroutine_threadsafe(_call(connect), self._loop).result()

    def close(self) -> None:
        """Ends its connections and its thread. The engine process itself just ends."""
        asyncio.run_coroutine_threadsafe(self._upstreams.aclose(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def add(self, request: EngineRequest) -> None:
        """Adds a request; `step` returns its outputs. Raises RequestRefused, such as EngineFull."""
        if request.params.prompt_logprobs is not None and request.scores_prompt:
            raise RequestRefused(
                ErrorCode.PAYLOAD_INVALID,
                "the log probabilities of a prompt are not available from this model's server",
            )
        live = self._arrivals.add(request)
        if live is not None and live.most_tokens == 0:
            self._arrivals.end(live, StopMatch(FinishReason.LENGTH))
        elif live is not None:
            self._admission.add(live)

    def cancel(self, request_id: str) -> bool:
        """Ends a request and closes its connection; it has no further outputs."""
        if self._arrivals.cancel_ended(request_id):
            return True
        live = self._live.get(request_id)
        if live is None:
            return False
        self._forget(live)
        return True

    def has_unfinished(self) -> bool:
        """Returns whether `step` has anything to do."""
        return bool(self._arrivals)

    def step(self) -> list[EngineOutput]:
        """Returns the tokens that have come; waits briefly for the first.

        Raises UpstreamsLost when no upstream has answered for MAX_OUTAGE_S.
        """
        outputs = self._arrivals.take_ended()
        for live in self._admission.moves().entering:
            self._send(live)
        self._counts.steps += 1
        self.measures.sequences.observe(len(self._running))
        num_before = self._counts.generated_tokens
        for live, news in self._arrived(wait=not outputs):
            if self._live.get(live.request.request_id) is live:
                outputs += self._take(live, news)
        self.measures.tokens.observe(self._counts.generated_tokens - num_before)
        self._check_outage()
        return outputs

    def stats(self) -> EngineStats:
        """Returns gauges of now; blocks are those that the tokens known here would fill."""
        config, counts = self.config, self._counts
        prefilling = sum(not live.first_token_s for live in self._running)
        num_tokens = (
            len(live.request.prompt_token_ids) + len(live.output) for live in self._running
        )
        used = sum(-(-number // config.block_size) for number in num_tokens)
        return EngineStats(
            step=counts.steps,
            waiting=len(self._live) - len(self._running),
            prefilling=prefilling,
            active=len(self._running) - prefilling,
            running=len(self._running),
            preemptions=0,
            free_blocks=max(0, config.num_blocks - used),
            cached_blocks=0,
            total_blocks=config.num_blocks,
            prompt_tokens=counts.prompt_tokens,
            generated_tokens=counts.generated_tokens,
            prefix_query_tokens=counts.prefix_query_tokens,
            prefix_hit_tokens=counts.prefix_hit_tokens,
            mixed_steps=0,
            failed_steps=counts.breaks,
        )

    def self_test(self) -> None:
        """Generates two tokens for no request. Raises StepsFailed."""
        params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        self.add(EngineRequest(request_id="self-test", prompt_token_ids=(1, 2), params=params))
        outputs: list[EngineOutput] = []
        while self.has_unfinished():
            with suppress(UpstreamsLost):  # as at the start, it waits for one
                outputs += self.step()
        if outputs[-1].error is not None:
            raise StepsFailed(f"the upstream failed its test: {outputs[-1].message}")
        self._counts = _Counts()
        self.measures = StepMeasures()

    def _send(self, live: LiveRequest) -> None:
        live.sent_s = time.monotonic()
        self._running.add(live)

        def start() -> None:
            live.task = self._loop.create_task(self._run(live, list(live.output)))
            live.task.add_done_callback(ended)

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error(
                    "failed to read an upstream's stream",
                    exc_info=error,
                    extra={"job_id": live.job_id},
                )
                self._pass_on(live, _Failure(ErrorCode.ENGINE_ERROR, repr(error)))

        self._loop.call_soon_threadsafe(start)

    async def _run(self, live: LiveRequest, output: list[int]) -> None:
        """Reads the tokens of a request over all of its breaks; `output` are those so far."""
        breaks, pause_s = _Breaks(len(output)), 0.0
        while True:
            try:
                async with self._upstreams.stay(alone=breaks.is_suspect) as stay:
                    try:
                        most_tokens = live.most_tokens
                        if breaks.is_suspect:
                            most_tokens = min(most_tokens, len(output) + TRIAL_TOKENS)
                        num_before = len(output)
                        if await self._read(live, output, stay.upstream, most_tokens):
                            return
                        if len(output) == num_before:
                            raise UpstreamBroke("it ended an answer that has no token")
                        breaks.trusted()
                        pause_s = 0.0
                    except UpstreamBroke as error:
                        self._counts.breaks += 1
                        is_alone = self._upstreams.failed(stay, error)
                        pause_s = breaks.note(
                            len(output), is_blamed=error.is_blamed, is_alone=is_alone
                        )
                        if breaks.are_too_many:
                            sentence = (
                                f"the model's server failed {breaks.num_alone} times with this "
                                f"request alone in it; the last time: {error}"
                            )
                            raise RequestRefused(ErrorCode.ENGINE_ERROR, sentence) from error
            except RequestRefused as refused:
                self._pass_on(live, _Failure(refused.code, refused.message))
                return
            except UpstreamRefused as refused:
                sentence = f"the model's server refused the request: {refused}"
                self._pass_on(live, _Failure(ErrorCode.PAYLOAD_INVALID, sentence))
                return
            await asyncio.sleep(pause_s)

    async def _read(
        self, live: LiveRequest, output: list[int], upstream: Upstream, most_tokens: int
    ) -> bool:
        """Reads until the output ends, or has `most_tokens`. Returns whether it has ended.

        Raises RequestRefused, UpstreamBroke or UpstreamRefused.
        """
        params, check = live.request.params, None
        num_sent, known = len(output), tuple(output)
        if params.grammar is not None:
            grammar = upstream.grammar(params.grammar)
            params, num_sent = replace(params, grammar=grammar), 0
            check = await self._output_check(grammar, params.stop_token_ids)
        request = replace(live.request, params=params, output_token_ids=known[:num_sent])
        body = upstream.body(request, most_tokens, self.config.eos_token_ids)
        replay = Replay(known[num_sent:])
        is_first, live.was_sent = not live.was_sent and not known, True
        is_over = False
        pieces = self._upstreams.generate(upstream, body, params.logprobs)
        async with aclosing(pieces):
            async for read in pieces:
                for piece in read:
                    if check is not None:
                        check.take(piece)
                    piece = replay.new(piece)
                    if not is_first:
                        piece = piece._replace(num_cached_tokens=None)
                    output += piece.token_ids
                    if piece.reason == LENGTH and most_tokens < live.most_tokens:
                        piece = piece._replace(reason="")
                    is_over = is_over or bool(piece.reason)
                    self._pass_on(live, piece)
                while self._num_put - self._num_taken > MAX_UNREAD:  # the service is paused
                    await asyncio.sleep(MAX_PAUSE_S / 10)
        return is_over

    async def _output_check(self, grammar: Grammar, stop_token_ids: Collection[int]) -> OutputCheck:
        try:
            return await self._checks.check(grammar, stop_token_ids)
        except GrammarInvalid as error:
            raise RequestRefused(ErrorCode.GRAMMAR_FAILED, str(error)) from error

    def _pass_on(self, live: LiveRequest, news: Piece | _Failure) -> None:
        """Gives `step` a piece; those of one moment together, so that it wakes up once for them."""
        self._gathered.append((live, news))
        self._num_put += 1
        if len(self._gathered) > 1:
            return
        self._loop.call_at(max(self._loop.time(), self._gather_until_s), self._give)

    def _give(self) -> None:
        self._gather_until_s = self._loop.time() + GATHER_S
        self._news.put(self._gathered)
        self._gathered = []

    def _arrived(self, *, wait: bool) -> list[tuple[LiveRequest, Piece | _Failure]]:
        arrived = []
        try:
            arrived += self._news.get(timeout=STEP_WAIT_S) if wait else self._news.get_nowait()
            while True:
                arrived += self._news.get_nowait()
        except queue.Empty:
            self._num_taken += len(arrived)
            return arrived

    def _take(self, live: LiveRequest, news: Piece | _Failure) -> list[EngineOutput]:
        request_id = live.request.request_id
        if isinstance(news, _Failure):
            self._forget(live)
            return [live.failed(news.code, news.message)]
        if news.num_cached_tokens is not None:
            num_prompt = len(live.request.prompt_token_ids)
            live.num_cached_tokens = min(news.num_cached_tokens, num_prompt)
            self._counts.prefix_query_tokens += num_prompt
            self._counts.prefix_hit_tokens += live.num_cached_tokens
        if news.token_ids and not live.first_token_s:
            live.first_token_s = time.monotonic()
            self._counts.prompt_tokens += len(live.request.prompt_token_ids)
        new: list[int] = []
        stop = None
        for token_id in news.token_ids:
            live.output.append(token_id)
            new.append(token_id)
            stop = live.find_stop(self.config.eos_token_ids)
            if stop is not None:
                break
        self._counts.generated_tokens += len(new)
        if stop is not None or news.reason:
            self._forget(live)
        if stop is None and news.reason:
            stop = StopMatch(FinishReason.STOP if news.reason == END else FinishReason.LENGTH)
        if not new and stop is None:
            return []
        logprobs: tuple[TokenLogprob, ...] | None = None
        if live.request.params.logprobs is not None:
            logprobs = news.logprobs[: len(new)]
        return [
            EngineOutput(
                request_id,
                tuple(new),
                logprobs=logprobs,
                finish_reason=stop.reason if stop else None,
                stop_reason=stop.token_id if stop else None,
                num_cached_tokens=live.num_cached_tokens,
                times=live.times if stop else None,
            )
        ]

    def _forget(self, live: LiveRequest) -> None:
        del self._live[live.request.request_id]
        self._admission.remove(live)
        if live in self._running:
            self._running.discard(live)
            self._loop.call_soon_threadsafe(_cancel, live)

    def _check_outage(self) -> None:
        if self._running and self._upstreams.outage_s() > MAX_OUTAGE_S:
            raise UpstreamsLost(f"no upstream answers: {self._upstreams.failures}")


async def _call(connect: Callable[[], Upstreams]) -> Upstreams:
    return connect()


def _cancel(live: LiveRequest) -> None:
    if live.task is not None:
        live.task.cancel()
