"""ScheduledBatch: what one step computes, as plain data."""

from __future__ import annotations

from collections.abc import Sequence as View
from dataclasses import dataclass

from shared.messages import SamplingParams


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One sequence's part of a step: compute tokens [start, start + num_scheduled_tokens).

    `token_ids` are the known ones among them. With lookahead the last one may not be known on the
    host yet: then `len(token_ids) == num_scheduled_tokens - 1` and the runner takes the token that
    it sampled for this sequence in the step before.

    `block_table` covers at least `start + num_scheduled_tokens` places. When `samples`, the
    runner samples one token from the last position's logits; that token's absolute position is
    `start + num_scheduled_tokens`, which (with the seed) fixes its noise.

    `scores` are positions of prompt tokens whose log probabilities are wanted as well: that of the
    token at position p is among the logits of position p - 1, which this step computes.

    `prompt_token_ids` and `output_token_ids` are read-only views for penalties; with lookahead the
    outputs may lack the token in flight.
    """

    seq_id: int  # unique in the engine's life; never reused
    start: int
    num_scheduled_tokens: int
    token_ids: View[int]
    block_table: View[int]
    samples: bool
    params: SamplingParams
    prompt_token_ids: View[int]
    output_token_ids: View[int]
    scores: range = range(0)

    @property
    def end(self) -> int:
        return self.start + self.num_scheduled_tokens

    @property
    def output_index(self) -> int:
        """Index among the outputs of the token that this step samples, tokens in flight counted."""
        return self.end - len(self.prompt_token_ids)


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """Decodes (one scheduled token, sampled) come first, then chunks, each in schedule order.

    `finished_seq_ids` are gone since the last batch: the runner forgets their state. After a failed
    launch they may name a sequence again, or one that the runner never saw.
    """

    sequences: tuple[ScheduledSequence, ...]
    finished_seq_ids: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(s.num_scheduled_tokens for s in self.sequences)

    @property
    def num_decodes(self) -> int:
        """Leading sequences with exactly one scheduled token that samples."""
        count = 0
        for sequence in self.sequences:
            if sequence.num_scheduled_tokens != 1 or not sequence.samples:
                break
            count += 1
        return count
