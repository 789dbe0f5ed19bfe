"""Log probabilities of the prompt, in the two shapes that clients know.

`echo` with `logprobs`, of the completion dialect: the prompt's tokens stand before the answer's in
the lists of `choices[].logprobs`. `prompt_logprobs`, vLLM's: an item for each token of the prompt,
null for the first, else an object from token ids to log probability, rank and text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any

import msgspec

from api.generation.logprobs import CompletionEntryForm, CompletionLogprobs, finite
from shared.messages import (
    PROMPT_SLICE_TOKENS,
    Job,
    PromptLogprob,
    PromptSlice,
    TokenLogprob,
    num_slices_of,
)
from shared.text.base import Tokenizer
from shared.transport.wire import decode_prompt_logprobs


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """What a request's `prompt_logprobs` asks to see of one prompt."""

    prompt: ScoredPrompt
    num_top: int
    tokenizer: Tokenizer

    def payload(self) -> Iterator[dict[str, Any] | None]:
        """Yields an item for each token of the prompt, made as it is taken."""
        texts: dict[int, str] = {}
        for entry in self.prompt.all_entries():
            yield None if entry is None else self._item(entry, texts)

    def _item(self, entry: PromptLogprob, texts: dict[int, str]) -> dict[str, Any]:
        """The prompt's own token first, then the most likely ones, best first."""
        ranked = {entry.token_id: (entry.rank, entry.logprob)}
        for rank, (token_id, logprob) in enumerate(entry.top[: self.num_top], 1):
            ranked.setdefault(token_id, (rank, logprob))
        item = {}
        for token_id, (rank, logprob) in ranked.items():
            if token_id not in texts:
                texts[token_id] = self.tokenizer.token_text(token_id)
            item[str(token_id)] = {
                "logprob": finite(logprob),
                "rank": rank,
                "decoded_token": texts[token_id],
            }
        return item


class EchoedLogprobs:
    """One prompt's part of the lists in `choices[].logprobs`. Lists are made as they are read."""

    def __init__(self, prompt: ScoredPrompt, text: str, tokenizer: Tokenizer, num_top: int) -> None:
        """`text` is what the answer repeats of the prompt."""
        self._prompt = prompt
        self._text = text
        self._tokenizer = tokenizer
        self._form = CompletionEntryForm(tokenizer, num_top)
        self._num_top = num_top

    def before(self, output: CompletionLogprobs | None) -> CompletionLogprobs:
        """Returns the lists of the prompt, with those of the answer behind them."""
        prompt = self._prompt
        lists = self._lists(prompt.token_ids, prompt.all_entries, self._offsets())
        if output is None:
            return lists
        top = lists["top_logprobs"]
        return {
            "tokens": chain(lists["tokens"], output["tokens"]),
            "token_logprobs": chain(lists["token_logprobs"], output["token_logprobs"]),
            "top_logprobs": None if top is None else chain(top, output["top_logprobs"] or ()),
            "text_offset": chain(lists["text_offset"], output["text_offset"]),
        }

    def parts(self) -> Iterator[CompletionLogprobs]:
        """Yields the lists in parts, to be read in their order."""
        prompt, offsets = self._prompt, self._offsets()
        for part in range(prompt.num_parts):
            token_ids = prompt.tokens(part)
            entries = partial(prompt.entries, part)
            yield self._lists(token_ids, entries, islice(offsets, len(token_ids)))

    def _lists(
        self,
        token_ids: Sequence[int],
        entries: Callable[[], Iterator[PromptLogprob | None]],
        offsets: Iterator[int],
    ) -> CompletionLogprobs:
        return {
            "tokens": map(self._form.spell, token_ids),
            "token_logprobs": (None if e is None else finite(e.logprob) for e in entries()),
            "top_logprobs": map(self._top, entries()) if self._num_top else None,
            "text_offset": offsets,
        }

    def _top(self, entry: PromptLogprob | None) -> msgspec.Raw | None:
        if entry is None:
            return None
        top = entry.top[: self._num_top]
        return self._form(TokenLogprob(entry.token_id, entry.logprob, top)).top

    def _offsets(self) -> Iterator[int]:
        """Yields where in the text each token begins; one that is not in it, as a token that the
        tokenizer adds in front, begins where the next one does."""
        detokenizer = self._tokenizer.detokenizer(skip_special_tokens=False)
        at = 0
        for token_id in self._prompt.token_ids:
            yield at
            piece = detokenizer.push((token_id,))
            if self._text.startswith(piece, at):
                at += len(piece)


# ScoredPrompt: the log probabilities of one job's prompt, as its log has them.


class ScoredPrompt:
    """Filled by the reader of the job's log, before its first delta; read by the formatter.

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
