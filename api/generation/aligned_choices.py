"""AlignedChoice: a choice whose tokens are placed in its text, for log probabilities and counts.

Log probabilities keep step with the text. Text may be held back (a possible stop string, an open
character) after its tokens are known. An entry is released when the text of its token is, and never
when that text was cut off.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Generic

from api.generation.choices import (
    Choice,
    ChoiceEvent,
    EntryForm,
    EntryT,
    PlacedLogprob,
    ReaderOptions,
    TokenTexts,
)
from shared.choice_deltas import ChoiceDelta
from shared.messages import Delta, FinishReason, TokenLogprob


class AlignedChoice(Choice[EntryT]):
    """A choice whose log probabilities are shown, whose reasoning is counted, or whose events do
    not depend on how the log was cut into deltas."""

    def __init__(self, index: int, options: ReaderOptions[EntryT]) -> None:
        """With `prompt_chars` log probabilities follow those of a prompt of that many
        characters. They then have an entry for the token that ended it too: readers of such lists
        count from both ends."""
        super().__init__(index, options)
        assert options.tokenizer is not None
        num_chars = options.prompt_chars[index] if options.prompt_chars is not None else 0
        self._is_text = False
        self._aligner = TokenAligner(options.tokenizer, options.form, num_chars)
        self._has_stop_entries = options.prompt_chars is not None
        self._splits_by_token = options.splits_by_token
        self._placed: list[PlacedLogprob[EntryT]] = []  # whose text may become anything
        self._of_text: list[PlacedLogprob[EntryT]] = []  # whose text is text, for its next event
        self._pending = b""  # text that ends within a token

    @property
    def reasoning_tokens(self) -> int:
        return self._aligner.num_tokens_before(self._parser.reasoning_bytes)

    def finish(
        self, reason: FinishReason | None, stop_reason: str | int | None
    ) -> list[ChoiceEvent[EntryT]]:
        self.has_ended = True
        stopped = reason is FinishReason.STOP and not self._has_stop_entries
        self._placed += self._aligner.rest(self._num_bytes, stopped=stopped)
        rest, self._pending = self._pending.decode(errors="replace"), b""
        self._num_parsed = self._num_bytes
        events = self._events(self._parser.push(rest)) if rest else []
        return [*events, *super().finish(reason, stop_reason)]

    def _parse(self, part: Delta | ChoiceDelta) -> list[ChoiceEvent[EntryT]]:
        self._aligner.push(part.token_ids, part.logprobs)
        if self._splits_by_token:
            pieces = self._split(part.text)
            events = [event for piece in pieces for event in self._events(self._parser.push(piece))]
        else:
            self._placed += self._aligner.release(self._num_bytes)
            events = super()._parse(part)
        self._decide()
        return events

    def _split(self, text: str) -> Iterator[str]:
        """Yields the text cut anew, at the ends of its tokens, never within a character.

        How tokens were gathered into log entries, and how a relay delivered these, is chance. Only
        the lengths are the tokenizer's: one that is not the writer's moves cuts and loses nothing.
        """
        self._pending += text.encode()
        for end in self._aligner.ends_up_to(self._num_bytes):
            size = end - self._num_parsed
            while 0 < size < len(self._pending) and self._pending[size] & 0xC0 == 0x80:
                size -= 1
            if size > 0:
                piece, self._pending = self._pending[:size].decode(), self._pending[size:]
                self._num_parsed += size
                self._placed += self._aligner.release(end)
                yield piece

    def _decide(self) -> None:
        """Keeps the log probabilities of text, drops those of reasoning and tool calls, and leaves
        those of held back text."""
        placed, spans = self._placed, self._parser.spans
        if not placed:
            return
        decided = placed
        if spans is not None and (not self.has_ended or self.held_bytes):
            decided = [one for one in placed if one.end_bytes <= spans.num_bytes]
        self._placed = placed[len(decided) :]
        if spans is not None:
            decided = [one for one in decided if spans.holds(one.start_bytes, one.end_bytes)]
        self._of_text += decided

    def _take_placed(self) -> Sequence[PlacedLogprob[EntryT]]:
        self._decide()
        taken, self._of_text = self._of_text, []
        return taken


class TokenAligner(Generic[EntryT]):
    """Finds where in the text each token is, and holds entries until the text of theirs is there.

    The text is not tokenized again: a token is as long as its own text. A token that is a part of a
    character has no text; its offset is that of the next one.
    """

    def __init__(
        self, tokenizer: TokenTexts, form: EntryForm[EntryT] | None, num_chars: int = 0
    ) -> None:
        """`form` encodes entries; None: no log probabilities. `num_chars`: shown before this."""
        self._form = form
        self._detokenizer = tokenizer.detokenizer()
        self._held: deque[PlacedLogprob[EntryT]] = deque()
        self._ends = array("q", (0,))  # the byte offset of each token's end
        self._next = 1  # index into `_ends` of the next that `ends_up_to` yields
        self._num_chars = num_chars

    def push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> None:
        """Places the next tokens; `logprobs` has an entry for each of them, or is empty."""
        for index, token_id in enumerate(token_ids):
            text = self._detokenizer.push((token_id,))
            start = self._ends[-1]
            end = start + len(text.encode())
            self._ends.append(end)
            if logprobs and self._form is not None:
                entry = self._form(logprobs[index])
                self._held.append(PlacedLogprob(entry, start, end, self._num_chars))
            self._num_chars += len(text)

    def ends_up_to(self, num_bytes: int) -> Iterator[int]:
        """Yields the end of each next token whose text is in the first `num_bytes`."""
        while self._next < len(self._ends) and self._ends[self._next] <= num_bytes:
            self._next += 1
            yield self._ends[self._next - 1]

    def release(self, num_bytes: int) -> list[PlacedLogprob[EntryT]]:
        """Returns the entries whose text is in the first `num_bytes`."""
        held, released = self._held, []
        # `<` for tokens without text: one at the end may be the token that stops, see `rest`.
        while held and held[0].end_bytes <= num_bytes and held[0].start_bytes < num_bytes:
            released.append(held.popleft())
        return released

    def rest(self, num_bytes: int, *, stopped: bool) -> list[PlacedLogprob[EntryT]]:
        """Returns the entries left at the end of a text of `num_bytes`, none of them beyond it.

        After a stop, tokens that begin where the text ends stand for nothing that was shown (the
        stop string, the end token) and are dropped.
        """
        left = [
            PlacedLogprob(
                held.entry,
                min(held.start_bytes, num_bytes),
                min(held.end_bytes, num_bytes),
                held.start_chars,
            )
            for held in self._held
            if not stopped or held.start_bytes < num_bytes
        ]
        self._held.clear()
        return left

    def num_tokens_before(self, num_bytes: int) -> int:
        """Returns how many tokens begin in the first `num_bytes`."""
        return bisect_left(self._ends, num_bytes, hi=len(self._ends) - 1)
