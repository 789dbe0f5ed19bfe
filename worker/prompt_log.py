"""PromptLog: buffers the log probabilities of one job's prompt until they are in its log.

They are written in slices of PROMPT_SLICE_TOKENS, whose boundaries depend on the prompt alone: a
slice that an earlier attempt wrote is the same part of the prompt, and is left as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

from shared.messages import PROMPT_SLICE_TOKENS, PromptLogprob, PromptSlice, num_slices_of
from shared.transport.wire import encode_prompt_logprobs


class PromptLog:
    """Slices stay in memory, encoded, while the job runs: a log that was lost is written again."""

    def __init__(self, num_entries: int) -> None:
        """`num_entries`: how many will be added."""
        self.num_slices = num_slices_of(num_entries)
        self._num_left = num_entries
        self._slices: list[PromptSlice] = []
        self._rest: list[PromptLogprob] = []  # not a slice yet
        self._num_accepted = 0

    @classmethod
    def of_log(cls, slices: Sequence[PromptSlice]) -> PromptLog:
        """Returns the one of a log that has begun with output: it has all slices, or none."""
        prompt = cls(0)
        prompt._slices = list(slices)
        prompt.num_slices = prompt._num_accepted = len(slices)
        return prompt

    def add(self, entries: Sequence[PromptLogprob]) -> None:
        """Adds log probabilities of the prompt, in order."""
        assert len(entries) <= self._num_left, "more log probabilities than the prompt has tokens"
        self._num_left -= len(entries)
        self._rest += entries
        while len(self._rest) >= PROMPT_SLICE_TOKENS or (self._rest and not self._num_left):
            part = self._rest[:PROMPT_SLICE_TOKENS]
            del self._rest[:PROMPT_SLICE_TOKENS]
            self._slices.append(PromptSlice(len(self._slices), encode_prompt_logprobs(part)))

    @property
    def next_slice(self) -> PromptSlice | None:
        """The first slice that is not durable, or None."""
        waits = self._num_accepted < len(self._slices)
        return self._slices[self._num_accepted] if waits else None

    def accept(self) -> None:
        """Marks the next slice as durable."""
        self._num_accepted += 1

    def rewind(self) -> None:
        """Starts over with an empty log: every slice is written again where it is missing."""
        self._num_accepted = 0
