"""ScoredPrompt: the log probabilities of one job's prompt, as its log has them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from shared.messages import PROMPT_SLICE_TOKENS, Job, PromptLogprob, PromptSlice, num_slices_of
from shared.transport.entries import decode_prompt_logprobs


class ScoredPrompt:
    """Filled by whoever reads the job's log, before its first delta; read by the dialect.

    Slices are kept as they came and decoded each time they are read: they take a tenth of the
    memory so, and less time than what is made of them.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = token_ids
        self.num_slices = num_slices_of(len(token_ids) - 1)
        self._slices: list[bytes] = []

    @property
    def is_complete(self) -> bool:
        return len(self._slices) == self.num_slices

    def take(self, part: PromptSlice) -> None:
        """The next slice; one that is here already changes nothing."""
        if part.index == len(self._slices) < self.num_slices:
            self._slices.append(part.entries)

    @property
    def num_parts(self) -> int:
        """A part is a slice; the first has the prompt's first token as well."""
        return max(1, self.num_slices)

    def tokens(self, part: int) -> Sequence[int]:
        """Returns the token ids of a part."""
        begin = part * PROMPT_SLICE_TOKENS + 1 if part else 0
        return self.token_ids[begin : (part + 1) * PROMPT_SLICE_TOKENS + 1]

    def entries(self, part: int) -> Iterator[PromptLogprob | None]:
        """Yields what is known of each token of a part: of the first of all nothing.

        Raises ValueError for a slice that cannot be read.
        """
        if part == 0:
            yield None
        if part < len(self._slices):
            yield from decode_prompt_logprobs(self._slices[part])

    def all_entries(self) -> Iterator[PromptLogprob | None]:
        """Yields what is known of each token."""
        return chain.from_iterable(map(self.entries, range(self.num_parts)))


def scored_prompt(job: Job) -> ScoredPrompt | None:
    """Returns a place for the log probabilities of a job's prompt; None: it asks for none."""
    if job.sampling.prompt_logprobs is None:
        return None
    return ScoredPrompt(job.prompt_token_ids)
