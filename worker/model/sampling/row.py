"""SamplingRow: what the sampler knows about the sequence behind one row of logits."""

from __future__ import annotations

from collections.abc import Sequence as View
from dataclasses import dataclass

from shared.messages import SamplingParams
from worker.engine.batch import ScheduledSequence


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """`in_flight` is where the sequence's newest token lies in the step before's sample.

    It is None unless the host does not know that token yet; then `output_token_ids` lacks it.
    """

    seq_id: int
    params: SamplingParams
    prompt_token_ids: View[int]
    output_token_ids: View[int]
    position: int  # of the token to be drawn
    in_flight: int | None = None

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
        return (
            self.params.greedy
            and self.params.grammar is None
            and self.params.logprobs is None
            and not self.params.logit_bias
            and not self.has_penalties
            and self.num_outputs >= self.params.min_tokens
        )
