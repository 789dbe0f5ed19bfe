"""Which log probabilities of a prompt a step gives, and which of them are new.

The token at position p is scored by the logits of position p - 1. So a sequence whose prompt is
scored takes no prefix hit that covers a position which has something to say yet (see
Sequence.num_skippable_tokens); its own blocks are published as everybody's.

Scores are taken at the commit of the step that computed them, like tokens: a step that failed gave
none. A prompt that lost its blocks is computed again, and what it gives twice is dropped here.
"""

from __future__ import annotations

from shared.messages import PromptLogprob
from worker.engine.errors import IntegrityError
from worker.engine.ports import StepResult
from worker.engine.scheduler import PlannedSequence


def new_prompt_logprobs(item: PlannedSequence, result: StepResult) -> tuple[PromptLogprob, ...]:
    """Returns what a step that is not committed yet adds to those of its sequence.

    Raises IntegrityError when some before them are missing.
    """
    sequence = item.sequence
    num_known = sequence.num_scored_tokens - item.scores.start
    if sequence.is_finished or num_known >= len(item.scores):
        return ()
    if num_known < 0:
        raise IntegrityError("a prompt's log probabilities have a gap")
    return tuple(result.prompt_logprobs[sequence.seq_id][num_known:])
