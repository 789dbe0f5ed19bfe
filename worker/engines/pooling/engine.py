"""PoolingEngine: computes vectors of the inputs of many requests, a batch of inputs per step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from shared.messages import ErrorCode, FinishReason, Pooling
from worker.engine.config import EngineConfig
from worker.engine.errors import (
    DeviceLost,
    EngineFull,
    OutOfMemory,
    RequestRefused,
    StepsFailed,
)
from worker.engine.measures import StepMeasures
from worker.engine.request import EngineOutput, EngineRequest, EngineStats

AGEING_STEPS = 8  # in every eighth step the request that has waited longest comes first

log = logging.getLogger(__name__)

# Returns for each input its vector of the given number of dimensions; None: it is not finite.
Embed = Callable[[Sequence[Sequence[int]], Sequence[int]], Sequence[bytes | None]]


@dataclass(slots=True, eq=False)
class _Pending:
    """A request, the inputs of it that wait (the longest is the last), and vectors that precede
    the first one which is missing."""

    request: EngineRequest
    pooling: Pooling
    starts: Sequence[int]
    waiting: list[int]
    served_step: int
    vectors: dict[int, bytes] = field(default_factory=dict)
    num_sent: int = 0

    def tokens(self, index: int) -> Sequence[int]:
        begin = self.starts[index]
        return self.request.prompt_token_ids[begin : begin + self.pooling.lengths[index]]

    def next_vectors(self) -> tuple[bytes, ...]:
        """Takes the vectors that follow those sent so far without a gap."""
        found = []
        while self.num_sent in self.vectors:
            found.append(self.vectors.pop(self.num_sent))
            self.num_sent += 1
        return tuple(found)


class PoolingEngine:
    """Implements EngineInterface for a model that returns vectors.

    A step computes inputs of similar length, as many as the token budget takes with their padding.
    Requests take turns to be first, those of a higher lane before others; what room is left in
    the step goes to the next ones. A step that fails is computed again for each request alone.
    """

    def __init__(self, config: EngineConfig, vocab_size: int, size: int, embed: Embed) -> None:
        """`size`: of the model's vectors."""
        self.measures = StepMeasures()
        self._config, self._vocab_size, self._size = config, vocab_size, size
        self._embed = embed
        self._live: dict[str, _Pending] = {}
        self._num_steps = self._num_failed = self._num_tokens = 0
        self._budget = config.max_num_batched_tokens

    def add(self, request: EngineRequest) -> None:
        pooling = request.pooling
        if pooling is None:
            raise RequestRefused(
                ErrorCode.PAYLOAD_INVALID, "this model computes embeddings and generates no text"
            )
        if pooling.dimensions > self._size:
            raise RequestRefused(
                ErrorCode.PAYLOAD_INVALID,
                f"{pooling.dimensions} dimensions were requested of a model with {self._size}",
            )
        if max(pooling.lengths) > self._config.max_model_len:
            raise RequestRefused(
                ErrorCode.CONTEXT_LENGTH_EXCEEDED,
                f"an input has {max(pooling.lengths)} tokens; the model takes at most "
                f"{self._config.max_model_len}",
            )
        token_ids = request.prompt_token_ids
        if not 0 <= min(token_ids) <= max(token_ids) < self._vocab_size:
            raise RequestRefused(
                ErrorCode.PAYLOAD_INVALID,
                f"an input names a token outside the vocabulary of {self._vocab_size}",
            )
        if len(self._live) >= self._config.max_num_seqs + self._config.max_waiting:
            raise EngineFull(self._config.max_waiting)
        starts = [0]
        for length in pooling.lengths[:-1]:
            starts.append(starts[-1] + length)
        by_length = sorted(range(len(starts)), key=lambda index: pooling.lengths[index])
        self._live[request.request_id] = _Pending(
            request, pooling, starts, by_length, self._num_steps
        )

    def cancel(self, request_id: str) -> bool:
        return self._live.pop(request_id, None) is not None

    def has_unfinished(self) -> bool:
        return bool(self._live)

    def step(self) -> Sequence[EngineOutput]:
        self._num_steps += 1
        batch = self._plan()
        self.measures.sequences.observe(len(batch))
        self.measures.tokens.observe(sum(pending.pooling.lengths[at] for pending, at in batch))
        try:
            self._compute(batch)
        except OutOfMemory:
            self._num_failed += 1
            if len(batch) == 1:
                return [self._failed(batch[0][0], "no memory for one input")]
            self._put_back(batch)
            self._budget = max(1, self._budget // 2)
            log.warning(
                "a step was out of memory; the following ones are smaller",
                extra={"max_num_batched_tokens": self._budget},
            )
            return ()
        except DeviceLost:
            raise
        except Exception:
            self._num_failed += 1
            log.exception("a step failed; it is computed again for each request alone")
            return self._apart(batch)
        return self._outputs(_requests_of(batch))

    def stats(self) -> EngineStats:
        running = sum(bool(pending.vectors or pending.num_sent) for pending in self._live.values())
        blocks = self._config.num_blocks
        return EngineStats(
            step=self._num_steps,
            waiting=len(self._live) - running,
            prefilling=running,
            active=0,
            running=running,
            preemptions=0,
            free_blocks=blocks,  # nothing is kept: the worker counts what it has taken
            cached_blocks=0,
            total_blocks=blocks,
            prompt_tokens=self._num_tokens,
            generated_tokens=0,
            prefix_query_tokens=0,
            prefix_hit_tokens=0,
            mixed_steps=0,
            failed_steps=self._num_failed,
        )

    def self_test(self) -> None:
        """Raises EngineFailed."""
        try:
            (vector,) = self._embed([[0]], [self._size])
        except Exception as error:
            raise StepsFailed(f"the self-test failed: {type(error).__name__}: {error}") from error
        if vector is None:
            raise StepsFailed("the self-test failed: its vector is not finite")

    def _plan(self) -> list[tuple[_Pending, int]]:
        """Takes the inputs of a step, of each request in its turn from the longest down."""
        is_ageing = self._num_steps % AGEING_STEPS == 0
        turns = sorted(
            self._live.values(),
            key=lambda one: (0 if is_ageing else one.request.priority, one.served_step),
        )
        batch: list[tuple[_Pending, int]] = []
        longest = 0
        for pending in turns:
            while pending.waiting and len(batch) < self._budget:
                length = pending.pooling.lengths[pending.waiting[-1]]
                padded = max(longest, length)
                if batch and padded * (len(batch) + 1) > self._budget:
                    break
                longest = padded
                batch.append((pending, pending.waiting.pop()))
                pending.served_step = self._num_steps
        return batch

    def _compute(self, batch: Sequence[tuple[_Pending, int]]) -> None:
        vectors = self._embed(
            [pending.tokens(at) for pending, at in batch],
            [pending.pooling.dimensions for pending, _ in batch],
        )
        for (pending, at), vector in zip(batch, vectors, strict=True):
            self._num_tokens += pending.pooling.lengths[at]
            pending.vectors[at] = b"" if vector is None else vector

    def _put_back(self, batch: Sequence[tuple[_Pending, int]]) -> None:
        for pending, at in reversed(batch):
            pending.waiting.append(at)

    def _apart(self, batch: Sequence[tuple[_Pending, int]]) -> list[EngineOutput]:
        outputs: list[EngineOutput] = []
        for pending in _requests_of(batch):
            try:
                self._compute([item for item in batch if item[0] is pending])
            except DeviceLost:
                raise
            except Exception as error:
                outputs.append(self._failed(pending, f"{type(error).__name__} in its step"))
            else:
                outputs += self._outputs([pending])
        return outputs

    def _outputs(self, computed: Iterable[_Pending]) -> list[EngineOutput]:
        outputs = []
        for pending in computed:
            request_id = pending.request.request_id
            vectors = pending.next_vectors()
            if b"" in vectors:
                outputs.append(
                    self._failed(pending, "a vector is not finite", code=ErrorCode.NONFINITE_LOGITS)
                )
                continue
            if vectors:
                outputs.append(EngineOutput(request_id, (), vectors=vectors))
            if pending.num_sent == len(pending.pooling.lengths):
                del self._live[request_id]
                outputs.append(EngineOutput(request_id, (), finish_reason=FinishReason.STOP))
        return outputs

    def _failed(
        self, pending: _Pending, message: str, code: ErrorCode = ErrorCode.ENGINE_ERROR
    ) -> EngineOutput:
        self._live.pop(pending.request.request_id, None)
        return EngineOutput(
            pending.request.request_id,
            (),
            finish_reason=FinishReason.ERROR,
            error=code,
            message=message,
        )


def _requests_of(batch: Sequence[tuple[_Pending, int]]) -> list[_Pending]:
    return list({id(pending): pending for pending, _ in batch}.values())
