"""ChoiceReader: reads a job's deltas as typed events, choice by choice.

An event has a piece of a choice's turn (text, reasoning, or a part of a tool call) with the token
ids and log probabilities that can be shown by then, or the choice's end. Formatters shape JSON from
these events and from nothing else, whether it is streamed or whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import msgspec

from api.on_demand import load_part
from api.output_parsers.events import NewParser, OutputEvent, OutputParser, PlainParser, Text
from shared.choice_deltas import ChoiceDelta, choice_deltas
from shared.messages import Delta, Failed, Finished, FinishReason, TokenLogprob
from shared.text.base import Tokenizer

EntryT = TypeVar("EntryT")
EntryT_co = TypeVar("EntryT_co", covariant=True)


class PlacedLogprob(msgspec.Struct, Generic[EntryT], frozen=True, gc=False):
    """An entry and where the text of its token is: UTF-8 bytes and characters from the start."""

    entry: EntryT
    start_bytes: int
    end_bytes: int
    start_chars: int


class EntryForm(Protocol[EntryT_co]):
    """How a dialect keeps a token's entry until it is shown."""

    def __call__(self, entry: TokenLogprob, /) -> EntryT_co: ...


class Aligner(Protocol[EntryT]):
    """Finds where in the text each token is: see `api.generation.logprobs.TokenAligner`."""

    def push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> None: ...
    def ends_up_to(self, num_bytes: int) -> Iterator[int]: ...
    def release(self, num_bytes: int) -> list[PlacedLogprob[EntryT]]: ...
    def rest(self, num_bytes: int, *, stopped: bool) -> list[PlacedLogprob[EntryT]]: ...
    def num_tokens_before(self, num_bytes: int) -> int: ...


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """How a choice ended; `reason` is None when its job failed."""

    reason: FinishReason | None
    stop_reason: str | int | None = None
    has_calls: bool = False  # it has started a tool call


@dataclass(slots=True)
class ChoiceEvent(Generic[EntryT]):
    """A piece of a choice, or its end; one of both."""

    choice: int  # from 0
    piece: OutputEvent | None
    logprobs: Sequence[PlacedLogprob[EntryT]] = ()  # of tokens whose text is shown by now
    token_ids: list[int] | None = None  # since the event before; None: not requested
    end: ChoiceEnd | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderOptions(Generic[EntryT]):
    """What a formatter needs of its events. `tokenizer` is for everything but token ids."""

    num_choices: int = 1
    new_parser: NewParser = PlainParser  # called once per choice, in order
    tokenizer: Tokenizer | None = None
    form: EntryForm[EntryT] | None = None  # of log probabilities; None: not shown
    has_token_ids: bool = False
    counts_reasoning: bool = False
    ranks_choices: bool = False  # by their mean log probabilities
    splits_by_token: bool = False  # events do not depend on how the log was cut into deltas
    prompt_chars: Sequence[int] | None = None  # shown before each choice; see `_Choice`


class ChoiceReader(Generic[EntryT]):
    """Reads the deltas of one job, or of several that are numbered as one."""

    def __init__(self, options: ReaderOptions[EntryT]) -> None:
        self._choices = [_Choice(index, options) for index in range(options.num_choices)]
        self._counts_reasoning = options.counts_reasoning

    def read(self, delta: Delta) -> list[ChoiceEvent[EntryT]]:
        """Returns the events that a delta completes."""
        if delta.segments is None:
            return self._choices[0].read(delta)
        events = []
        for part in choice_deltas(delta):
            events += self._choices[part.choice].read(part)
            if part.finish_reason is not None:
                end = self._choices[part.choice].finish(part.finish_reason, part.stop_reason)
                events += end
        return events

    def finish(self, end: Finished | Failed) -> list[ChoiceEvent[EntryT]]:
        """Returns the last events of every choice whose end was not read: it is the job's."""
        events = []
        for choice in self._choices:
            if choice.has_ended:
                continue
            if isinstance(end, Finished):
                events += choice.finish(end.reason, end.stop_reason)
            else:
                events += choice.finish(None, None)
        return events

    @property
    def is_plain(self) -> bool:
        """Returns whether choice 0's text becomes text as it comes, and nothing else is read."""
        return self._choices[0].is_plain

    @property
    def has_token_ids(self) -> bool:
        """Returns whether events have token ids."""
        return self._choices[0].has_token_ids

    def held_bytes(self, choice: int) -> int:
        """Returns how many UTF-8 bytes at the end of a choice's text are in no event yet."""
        return self._choices[choice].held_bytes

    @property
    def reasoning_tokens(self) -> int | None:
        """Returns the reasoning tokens of all choices; None: not counted."""
        if not self._counts_reasoning:
            return None
        return sum(choice.reasoning_tokens for choice in self._choices)

    def mean_logprob(self, choice: int) -> float:
        """Returns the mean log probability of a choice's tokens. Only with `ranks_choices`."""
        return self._choices[choice].mean_logprob


class _Choice(Generic[EntryT]):
    """One choice: its text that was read and is in no event yet."""

    def __init__(self, index: int, options: ReaderOptions[EntryT]) -> None:
        """With `prompt_chars` log probabilities follow those of a prompt of that many
        characters. They then have an entry for the token that ended it too: readers of such lists
        count from both ends."""
        self.has_ended = False
        self._index = index
        self._parser: OutputParser = options.new_parser()
        self._has_stop_entries = options.prompt_chars is not None
        self._splits_by_token = options.splits_by_token
        self._ranks = options.ranks_choices
        self._aligner: Aligner[EntryT] | None = None
        if options.form or options.counts_reasoning or options.splits_by_token:
            assert options.tokenizer is not None
            num_chars = options.prompt_chars[index] if options.prompt_chars is not None else 0
            new_aligner = load_part("logprobs").TokenAligner
            self._aligner = new_aligner(options.tokenizer, options.form, num_chars)
        self._is_plain = self._aligner is None and isinstance(self._parser, PlainParser)
        self._token_ids: list[int] | None = [] if options.has_token_ids else None
        self._placed: list[PlacedLogprob[EntryT]] = []  # whose text may become anything
        self._of_text: list[PlacedLogprob[EntryT]] = []  # whose text is text, for its next event
        self._num_bytes = 0  # of its text so far
        self._num_parsed = 0  # of these, given to the parser
        self._pending = b""  # text that ends within a token
        self._num_tokens = 0
        self._logprob_sum = 0.0

    @property
    def is_plain(self) -> bool:
        return self._is_plain and not self._ranks

    @property
    def has_token_ids(self) -> bool:
        return self._token_ids is not None

    @property
    def held_bytes(self) -> int:
        spans = self._parser.spans
        return self._num_bytes - (self._num_parsed if spans is None else spans.num_bytes)

    @property
    def reasoning_tokens(self) -> int:
        assert self._aligner is not None
        return self._aligner.num_tokens_before(self._parser.reasoning_bytes)

    @property
    def mean_logprob(self) -> float:
        return self._logprob_sum / max(1, self._num_tokens)

    def read(self, part: Delta | ChoiceDelta) -> list[ChoiceEvent[EntryT]]:
        text = part.text
        if self._token_ids is not None:
            self._token_ids.extend(part.token_ids)
        if self._ranks:
            self._num_tokens += len(part.token_ids)
            self._logprob_sum += sum(entry.logprob for entry in part.logprobs or ())
        if self._is_plain:  # the common stream, once per token
            return [ChoiceEvent(self._index, Text(text), (), self._take_ids())] if text else []
        self._num_bytes += len(text.encode())
        if self._aligner is not None:
            self._aligner.push(part.token_ids, part.logprobs)
        if self._splits_by_token:
            pieces = self._split(text)
            events = [event for piece in pieces for event in self._events(self._parser.push(piece))]
            self._decide()
            return events
        self._num_parsed = self._num_bytes
        if self._aligner is not None:
            self._placed += self._aligner.release(self._num_bytes)
        events = self._events(self._parser.push(text)) if text else []
        self._decide()
        return events

    def finish(
        self, reason: FinishReason | None, stop_reason: str | int | None
    ) -> list[ChoiceEvent[EntryT]]:
        """Returns its last events, the end among them."""
        self.has_ended = True
        if self._aligner is not None:
            stopped = reason is FinishReason.STOP and not self._has_stop_entries
            self._placed += self._aligner.rest(self._num_bytes, stopped=stopped)
        rest, self._pending = self._pending.decode(errors="replace"), b""
        self._num_parsed = self._num_bytes
        events = self._events(self._parser.push(rest)) if rest else []
        events += self._events(self._parser.finish())
        end = ChoiceEnd(reason, stop_reason, self._parser.has_calls)
        last = ChoiceEvent(self._index, None, self._take_placed(), self._take_ids(), end)
        return [*events, last]

    def _split(self, text: str) -> Iterator[str]:
        """Yields the text cut anew, at the ends of its tokens, never within a character.

        How tokens were gathered into log entries, and how a relay delivered these, is chance. Only
        the lengths are the tokenizer's: one that is not the writer's moves cuts and loses nothing.
        """
        assert self._aligner is not None
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

    def _events(self, pieces: Sequence[OutputEvent]) -> list[ChoiceEvent[EntryT]]:
        """Returns the events of pieces. Log probabilities go with text alone."""
        return [
            ChoiceEvent(
                self._index,
                piece,
                self._take_placed() if isinstance(piece, Text) else (),
                self._take_ids(),
            )
            for piece in pieces
        ]

    def _take_ids(self) -> list[int] | None:
        token_ids = self._token_ids
        if token_ids is not None:
            self._token_ids = []
        return token_ids

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

    def _take_placed(self) -> list[PlacedLogprob[EntryT]]:
        """Returns those of the text up to here."""
        self._decide()
        taken, self._of_text = self._of_text, []
        return taken
