"""SamplingRow: the sequence of a row of logits; RowThreads: threads over such rows."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from collections.abc import Sequence as View
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shared.messages import SamplingParams
from worker.engine.batch import ScheduledSequence


@dataclass(slots=True)
class SamplingRow:
    """What one row of logits is drawn by; made for one step, or kept and moved on by `position`.

    `in_flight` is where the sequence's newest token lies in the step before's sample.

    It is None unless the host did not know that token at launch; then `output_token_ids` lacks it,
    until the step before is committed.
    """

    seq_id: int
    params: SamplingParams
    prompt_token_ids: View[int]
    output_token_ids: View[int]
    position: int  # of the token to be drawn
    in_flight: int | None = None
    tenant: str = ""  # is charged for its masks
    # From which position on it is plain, see below: the sampler asks every row at every step.
    _plain_from: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        params = self.params
        is_plain = (
            params.greedy
            and params.grammar is None
            and params.logprobs is None
            and not params.logit_bias
            and not self.has_penalties
        )
        least = len(self.prompt_token_ids) + params.min_tokens
        self._plain_from = least if is_plain else sys.maxsize

    @classmethod
    def of(cls, sequence: ScheduledSequence, in_flight: int | None) -> SamplingRow:
        unknown = len(sequence.token_ids) < sequence.num_scheduled_tokens
        return cls(
            seq_id=sequence.seq_id,
            params=sequence.params,
            prompt_token_ids=sequence.prompt_token_ids,
            output_token_ids=sequence.output_token_ids,
            position=sequence.end,
            in_flight=in_flight if unknown else None,
            tenant=sequence.tenant,
        )

    @property
    def num_outputs(self) -> int:
        """Output tokens before this one, the one in flight included."""
        return self.position - len(self.prompt_token_ids)

    @property
    def has_penalties(self) -> bool:
        params = self.params
        return (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )

    @property
    def is_plain_greedy(self) -> bool:
        """Nothing but the argmax of the raw logits is wanted."""
        return self.position >= self._plain_from


# Elements of a part. Parts go to the first free thread, so that a thread without a core holds up
# few rows; a batch of less than two is done sooner than another thread has woken.
_PART_ELEMENTS = 1 << 19

OfRows = Callable[[Tensor, Any], Tensor]  # of logits, and of what belongs to each of their rows


class RowThreads:
    """Computes a function of independent rows by several threads, where torch is kept to one.

    The caller is one of `num_threads`.

    Unlike the runtime's own threads, these sleep while they have nothing to do.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_others = num_threads - 1
        self._executor = ThreadPoolExecutor(self._num_others, "rows") if self._num_others else None

    def map(self, function: OfRows, logits: Tensor, rows: Sequence[Any] | Tensor) -> Tensor:
        """Returns `function(logits, rows)`, [rows, ...]. Raises what it raises."""
        size = max(1, _PART_ELEMENTS // logits.shape[1])
        starts = range(0, len(rows), size)
        if self._executor is None or len(starts) < 2:
            return function(logits, rows)
        results: list[Tensor] = [logits] * len(starts)
        todo = iter(enumerate(starts))
        lock = threading.Lock()

        @torch.inference_mode()
        def work() -> None:
            while True:
                with lock:
                    part, start = next(todo, (-1, 0))
                if part < 0:
                    return
                these = slice(start, start + size)
                results[part] = function(logits[these], rows[these])

        others = [self._executor.submit(work) for _ in range(min(self._num_others, len(starts)))]
        try:
            work()
        finally:
            wait(others)
        for other in others:
            other.result()
        return torch.cat(results)
