"""HttpEngine: an upstream's tokens with the interface that EngineLoop drives.

An event loop in a thread of its own sends the requests and reads the streams; `step` takes the
tokens that have come. The upstream schedules and computes. When an output ends is decided here, by
the same rules as in worker.engine, and which requests are at an upstream is decided by Admission.

A request whose stream breaks continues after its last token, at the same upstream or another.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace

from shared.messages import ErrorCode, FinishReason, SamplingParams, TokenLogprob
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
from worker.engines.http.servers import END, Piece
from worker.engines.http.upstreams import UpstreamBroke, UpstreamRefused, Upstreams

STEP_WAIT_S = 0.01  # for the first token; a new request or a cancel waits as long
MAX_BREAKS = 10  # of one request, one after the other, without a token between them
MAX_BLAME = 4.0  # for them: each counts as one, shared by all requests at the upstream
FIRST_PAUSE_S = 0.1  # after a break, doubled up to MAX_PAUSE_S
MAX_PAUSE_S = 2.0
MAX_UNREAD = 16_384  # events of all streams
MAX_OUTAGE_S = 10.0  # without any upstream, until the jobs go to other workers

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class LiveRequest(HeldRequest):
    """A request and its output as reported; its reader may be ahead."""

    task: asyncio.Task[None] | None = None
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


@dataclass(slots=True)
class _Counts:
    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    breaks: int = 0


class HttpEngine:
    """Runs requests at upstreams, at most `config.max_num_seqs` at once."""

    def __init__(
        self, config: EngineConfig, vocab_size: int, connect: Callable[[], Upstreams]
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
        self._news: queue.SimpleQueue[tuple[LiveRequest, Piece | _Failure]] = queue.SimpleQueue()
        self._counts = _Counts()
        self._loop = asyncio.new_event_loop()
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
            prefix_query_tokens=0,
            prefix_hit_tokens=0,
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
                self._news.put((live, _Failure(ErrorCode.ENGINE_ERROR, repr(error))))

        self._loop.call_soon_threadsafe(start)

    async def _run(self, live: LiveRequest, output: list[int]) -> None:
        """Reads the tokens of a request over all of its breaks; `output` are those so far."""
        num_breaks, blame, pause_s = 0, 0.0, FIRST_PAUSE_S
        while True:
            upstream = await self._upstreams.choose()
            num_before = len(output)
            upstream.num_running += 1
            try:
                request = replace(live.request, output_token_ids=tuple(output))
                body = upstream.body(request, live.most_tokens, self.config.eos_token_ids)
                pieces = self._upstreams.generate(upstream, body, request.params.logprobs)
                async with aclosing(pieces):
                    async for piece in pieces:
                        output += piece.token_ids
                        self._news.put((live, piece))
                        while self._news.qsize() > MAX_UNREAD:  # the service is paused
                            await asyncio.sleep(MAX_PAUSE_S / 10)
                return
            except RequestRefused as refused:
                self._news.put((live, _Failure(refused.code, refused.message)))
                return
            except UpstreamRefused as refused:
                sentence = f"the model's server refused the request: {refused}"
                self._news.put((live, _Failure(ErrorCode.PAYLOAD_INVALID, sentence)))
                return
            except UpstreamBroke as error:
                self._counts.breaks += 1
                if len(output) > num_before:
                    num_breaks, blame, pause_s = 0, 0.0, FIRST_PAUSE_S
                num_breaks += error.is_blamed
                blame += self._upstreams.failed(upstream, error)
                if blame >= MAX_BLAME or num_breaks >= MAX_BREAKS:
                    sentence = (
                        f"the model's server failed {num_breaks} times at this request; the last "
                        f"time: {error}"
                    )
                    self._news.put((live, _Failure(ErrorCode.ENGINE_ERROR, sentence)))
                    return
            finally:
                upstream.num_running -= 1
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    def _arrived(self, *, wait: bool) -> list[tuple[LiveRequest, Piece | _Failure]]:
        arrived = []
        try:
            arrived.append(self._news.get(timeout=STEP_WAIT_S) if wait else self._news.get_nowait())
            while True:
                arrived.append(self._news.get_nowait())
        except queue.Empty:
            return arrived

    def _take(self, live: LiveRequest, news: Piece | _Failure) -> list[EngineOutput]:
        request_id = live.request.request_id
        if isinstance(news, _Failure):
            self._forget(live)
            return [live.failed(news.code, news.message)]
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
