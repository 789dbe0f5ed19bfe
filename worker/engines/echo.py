"""EchoModelRunner: a model that repeats the prompt. For tests, demonstrations and load tests."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from shared.messages import PromptLogprob, TokenLogprob
from worker.engine.batch import ScheduledBatch, ScheduledSequence
from worker.engine.config import EngineConfig
from worker.engine.ports import ModelRunner, StepHandle, StepResult
from worker.engine_options import EngineOptions

NUM_BLOCKS = 4096
BLOCK_SIZE = 16
MAX_MODEL_LEN = 4096

IMPOSSIBLE_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot represent


@dataclass(frozen=True, slots=True)
class _Done:
    """A step that is over when it is launched."""

    result: StepResult

    def sample_structured(self, seq_ids: Collection[int]) -> Mapping[int, Future[None]]:
        """Does nothing: an echo follows no grammar."""
        return {}

    def collect(self) -> StepResult:
        return self.result


class EchoModelRunner:
    """Output token i is prompt token i modulo the prompt's length.

    With an `eos_token_id` it ends after one whole echo (or after `min_tokens`, if that is later).
    The choice depends on the prompt and on i alone, so a resumed sequence continues it. Sampling
    parameters do not change the output of a model without probabilities. Raises ValueError for an
    empty vocabulary, or an end outside of it.
    """

    def __init__(self, vocab_size: int, *, eos_token_id: int | None = None) -> None:
        if vocab_size < 1:
            raise ValueError(f"vocab_size must be at least 1, got {vocab_size}")
        if eos_token_id is not None and not 0 <= eos_token_id < vocab_size:
            raise ValueError(f"eos_token_id {eos_token_id} is not in a vocabulary of {vocab_size}")
        self.vocab_size = vocab_size
        self._eos_token_id = eos_token_id

    def launch(self, batch: ScheduledBatch) -> _Done:
        sampled = [s for s in batch.sequences if s.samples]
        token_ids = {s.seq_id: self._next_token(s) for s in sampled}
        logprobs = {
            s.seq_id: self._logprob(token_ids[s.seq_id], s.params.logprobs)
            for s in sampled
            if s.params.logprobs is not None
        }
        scores = {s.seq_id: tuple(map(self._score(s), s.scores)) for s in batch.sequences}
        return _Done(StepResult(token_ids, logprobs, prompt_logprobs=scores))

    def _next_token(self, sequence: ScheduledSequence) -> int:
        prompt = sequence.prompt_token_ids
        i = sequence.output_index
        if self._eos_token_id is not None and i == max(len(prompt), sequence.params.min_tokens):
            return self._eos_token_id
        return prompt[i % len(prompt)]

    def _score(self, sequence: ScheduledSequence) -> Callable[[int], PromptLogprob]:
        def score(position: int) -> PromptLogprob:
            token_id = sequence.prompt_token_ids[position]
            entry = self._logprob(token_id, sequence.params.prompt_logprobs or 0)
            return PromptLogprob(token_id, entry.logprob, 1, entry.top)

        return score

    def _logprob(self, token_id: int, num_top: int) -> TokenLogprob:
        others = (i for i in range(min(num_top + 1, self.vocab_size)) if i != token_id)
        ranked = [(token_id, 0.0), *((i, IMPOSSIBLE_LOGPROB) for i in others)]
        return TokenLogprob(token_id, 0.0, tuple(ranked[:num_top]))


def echo_runner(options: EngineOptions) -> tuple[EngineConfig, ModelRunner]:
    """Returns the bounds and the runner of an echo engine. Its checkpoint needs no weights."""
    checkpoint = json.loads((Path(options.checkpoint) / "config.json").read_bytes())
    max_model_len = options.max_model_len or checkpoint.get("max_position_embeddings")
    config = options.engine_config(
        num_blocks=options.num_kv_blocks or NUM_BLOCKS,
        block_size=options.block_size or BLOCK_SIZE,
        max_model_len=int(max_model_len or MAX_MODEL_LEN),
    )
    runner: ModelRunner = EchoModelRunner(int(checkpoint["vocab_size"]))
    if options.echo_step_ms:
        runner = PacedRunner(runner, options.echo_step_ms / 1000)
    return config, runner


class PacedRunner:
    """A ModelRunner whose steps take a set time, as a device's would.

    Wraps another runner; `collect` returns no sooner than `step_s` after `launch`.
    """

    def __init__(self, inner: ModelRunner, step_s: float) -> None:
        self._inner = inner
        self._step_s = step_s
        self.vocab_size = inner.vocab_size

    def launch(self, batch: ScheduledBatch) -> StepHandle:
        return _PacedStep(self._inner.launch(batch), time.monotonic() + self._step_s)


class _PacedStep:
    def __init__(self, inner: StepHandle, ready_at_s: float) -> None:
        self._inner = inner
        self._ready_at_s = ready_at_s

    def sample_structured(self, seq_ids: Collection[int]) -> Mapping[int, Future[None]]:
        return self._inner.sample_structured(seq_ids)

    def collect(self) -> StepResult:
        time.sleep(max(0.0, self._ready_at_s - time.monotonic()))
        return self._inner.collect()
