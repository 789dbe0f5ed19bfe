"""Log probabilities of prompts: which ones a step computes and adds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shared.messages import PromptLogprob
from worker.engine.errors import IntegrityError
from worker.engine.plan import PlannedSequence
from worker.engine.ports import StepResult
from worker.engine.request import EngineOutput
from worker.engine.sequence import Sequence


def scores_of(sequence: Sequence, start: int, end: int) -> range:
    """Returns the prompt positions whose log probabilities computing [start, end) gives."""
    positions = range(
        max(start + 1, sequence.num_scored_tokens), min(end + 1, sequence.num_prompt_tokens)
    )
    return positions or range(0)


def score_outputs(planned: Iterable[PlannedSequence], result: StepResult) -> Iterator[EngineOutput]:
    """Yields the log probabilities of prompts that an uncommitted step adds.

    Scores are taken at the commit of the step that computed them, like tokens: a step that failed
    gave none. Raises IntegrityError when some are missing before the new ones.
    """
    for item in planned:
        if scores := _new_scores(item, result):
            yield EngineOutput(item.sequence.request_id, (), prompt_logprobs=scores)


def _new_scores(item: PlannedSequence, result: StepResult) -> tuple[PromptLogprob, ...]:
    """Returns the log probabilities that a step adds to one prompt.

    The token at position p is scored by the logits of position p - 1. A prompt that lost its blocks
    is computed again; repeated log probabilities are dropped here.
    """
    sequence = item.sequence
    num_known = sequence.num_scored_tokens - item.scores.start
    if sequence.is_finished or num_known >= len(item.scores):
        return ()
    if num_known < 0:
        raise IntegrityError("a prompt's log probabilities have a gap")
    return tuple(result.prompt_logprobs[sequence.seq_id][num_known:])
