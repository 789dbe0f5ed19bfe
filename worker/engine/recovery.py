"""How the engine continues after a step or a sequence in it failed.

out of memory      the same again with half the prompt tokens; without any, the youngest quarter of
                   the decodes is preempted; the bound is doubled every REGROW_STEPS steps that
                   succeed, until it is the whole budget
any other error    each sequence of that step is computed alone until it has a token: one that
                   fails alone is at fault if the self-test passes
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from shared.messages import ErrorCode, SamplingParams
from worker.engine.config import EngineConfig
from worker.engine.errors import EngineFailed, StepsFailed, failure_named
from worker.engine.plan import Decoding, PlannedSequence
from worker.engine.ports import ModelRunner, StepResult
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import Sequence, SequenceStatus

# One step that raises may be a job's fault, and so may its repeat alone. Two faulty jobs in a row
# are rarer than a faulty engine.
MAX_FAILED_STEPS = 4
REGROW_STEPS = 100  # some seconds: long enough that a step out of memory stays rare
SELF_TEST_PROMPT_TOKENS = 4  # with two output tokens: a prefill and a decode


class StepRecovery:
    """Learns of each step that succeeds or raises; is read before the next one is planned."""

    def __init__(self, budget: int) -> None:
        """`budget`: most tokens of one step."""
        self._budget = budget
        self._alone: deque[Sequence] = deque()
        self._steps_to_regrow = 0
        self.most_tokens = budget  # of the next step
        self.num_failed = 0  # steps that raised, ever
        self.num_failed_in_row = 0  # steps that raised since one that did not

    @property
    def next_alone(self) -> Sequence | None:
        """The sequence that has to be computed alone now. One that lost its blocks meanwhile is
        computed with the others again."""
        while self._alone and self._alone[0].status is not SequenceStatus.RUNNING:
            self._alone.popleft()
        return self._alone[0] if self._alone else None

    @property
    def has_isolated(self) -> bool:
        return bool(self._alone)

    def isolate(self, sequences: Iterable[Sequence]) -> None:
        """Has each of them computed alone."""
        self._alone.extend(s for s in sequences if s not in self._alone)

    def rejoin(self, sequence: Sequence) -> None:
        """Ends the isolation of a sequence: it need not be computed alone any longer."""
        if sequence in self._alone:
            self._alone.remove(sequence)

    def shrink(self, num_decodes: int, num_prompt_tokens: int) -> bool:
        """Bounds the next steps to less than what did not fit the memory. Decodes are the last to
        be left out, and few of them: their streams stop.

        Returns False when there is no smaller step.
        """
        self.num_failed += 1
        smaller = num_decodes - max(1, num_decodes // 4)
        if num_prompt_tokens:
            smaller = num_decodes + num_prompt_tokens // 2
        self.most_tokens = max(1, smaller)
        self._steps_to_regrow = REGROW_STEPS
        return num_decodes + num_prompt_tokens > 1

    def raised(self) -> None:
        """Counts a step that raised something else."""
        self.num_failed += 1
        self.num_failed_in_row += 1

    def succeeded(self) -> None:
        """Counts a step that did not."""
        self.num_failed_in_row = 0
        if self.most_tokens < self._budget:
            self._steps_to_regrow -= 1
            if self._steps_to_regrow <= 0:
                self.most_tokens = min(self._budget, 2 * self.most_tokens)
                self._steps_to_regrow = REGROW_STEPS


def failure_of(
    item: PlannedSequence, result: StepResult, vocab_size: int
) -> tuple[ErrorCode, str] | None:
    """Returns why a step's result does not hold for one of its sequences, or None."""
    seq_id = item.sequence.seq_id
    reason = result.failed.get(seq_id)
    if reason is not None:
        return failure_named(reason)
    if len(result.prompt_logprobs.get(seq_id, ())) != len(item.scores):
        return ErrorCode.ENGINE_ERROR, "the model runner did not score the prompt"
    if not item.samples:
        return None
    token_id = result.token_ids.get(seq_id)
    if token_id is None or not 0 <= token_id < vocab_size:
        return ErrorCode.ENGINE_ERROR, "the model runner sampled no valid token"
    if item.sequence.params.logprobs is not None and seq_id not in result.logprobs:
        return ErrorCode.ENGINE_ERROR, "the model runner gave no log probability"
    return None


def valid_tokens(
    decoding: Decoding | None, result: StepResult, vocab_size: int
) -> list[int] | None:
    """Returns the decodes' tokens; None if `failure_of` would return a failure for some."""
    if result.failed:
        return None
    if decoding is None:
        return []
    try:
        token_ids = list(map(result.token_ids.__getitem__, decoding.run.seq_ids))
    except KeyError:
        return None
    wanting = decoding.wanting_logprobs
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        return None
    return token_ids if not wanting or wanting <= result.logprobs.keys() else None


def self_test(seq_id: int, config: EngineConfig, scheduler: Scheduler, runner: ModelRunner) -> None:
    """Computes a prefill and a decode of no request, alone, and forgets them.

    Raises StepsFailed, or the runner's own EngineFailed.

    Distinguishes an engine that fails from a sequence that makes its steps fail. Nothing may be
    in flight. When all blocks are taken, other sequences are preempted.
    """
    most = min(config.capacity_tokens, config.max_model_len) - 2
    num_prompt_tokens = max(1, min(SELF_TEST_PROMPT_TOKENS, most))
    sequence = Sequence(
        seq_id=seq_id,
        request_id="self-test",
        prompt_token_ids=tuple(i % runner.vocab_size for i in range(num_prompt_tokens)),
        params=SamplingParams(max_tokens=2, temperature=0.0),
        max_model_len=config.max_model_len,
        tenant="self-test",
    )
    scheduler.admit_at_once(sequence)
    try:
        while sequence.find_stop(config.eos_token_ids) is None:
            schedule = scheduler.schedule(only=sequence)
            if not schedule.planned:
                return  # a pool of one block has no room for the decode
            result = runner.launch(schedule.batch).collect()
            if failure := failure_of(schedule.planned[0], result, runner.vocab_size):
                raise StepsFailed(f"the self-test failed: {failure[1]}")
            scheduler.commit(schedule, result.token_ids)
    except EngineFailed:
        raise
    except Exception as error:
        raise StepsFailed(f"the self-test failed: {type(error).__name__}: {error}") from error
    finally:
        scheduler.finish(sequence)
