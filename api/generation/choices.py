"""ChoiceReader: reads a job's deltas as typed events, choice by choice.

An event has a piece of a choice's turn (text, reasoning, or a part of a tool call) with the token
ids and log probabilities that can be shown by then, or the choice's end. Formatters shape JSON from
these events and from nothing else, whether it is streamed or whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from api.on_demand import load_part
from api.output_parsers.events import NewParser, OutputEvent, OutputParser, PlainParser, Text
from shared.choice_deltas import ChoiceDelta, choice_deltas
from shared.messages import Delta, Failed, Finished, FinishReason, TokenLogprob

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


class TokenTexts(Protocol):
    """Returns the texts of tokens: a `shared.text.base.Tokenizer`."""

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Any: ...
    def token_text(self, token_id: int) -> str: ...
    def token_bytes(self, token_id: int) -> bytes: ...


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
    tokenizer: TokenTexts | None = None
    form: EntryForm[EntryT] | None = None  # of log probabilities; None: not shown
    has_token_ids: bool = False
    counts_reasoning: bool = False
    ranks_choices: bool = False  # by their mean log probabilities
    splits_by_token: bool = False  # events do not depend on how the log was cut into deltas
    prompt_chars: Sequence[int] | None = None  # shown before each choice; see AlignedChoice


class ChoiceReader(Generic[EntryT]):
    """Reads the deltas of one job, or of several that are numbered as one."""

    def __init__(self, options: ReaderOptions[EntryT]) -> None:
        new_choice: Any = Choice
        if options.form or options.counts_reasoning or options.splits_by_token:
            new_choice = load_part("aligned_choices").AlignedChoice
        self._choices: list[Choice[EntryT]] = [
            new_choice(index, options) for index in range(options.num_choices)
        ]
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


class Choice(Generic[EntryT]):
    """One choice, whose tokens' places in its text do not matter.

    `api.generation.aligned_choices.AlignedChoice` is one whose log probabilities are shown.
    """

    def __init__(self, index: int, options: ReaderOptions[EntryT]) -> None:
        self.has_ended = False
        self._index = index
        self._parser: OutputParser = options.new_parser()
        self._ranks = options.ranks_choices
        self._is_text = isinstance(self._parser, PlainParser)
        self._token_ids: list[int] | None = [] if options.has_token_ids else None
        self._num_bytes = 0  # of its text so far
        self._num_parsed = 0  # of these, given to the parser
        self._num_tokens = 0
        self._logprob_sum = 0.0

    @property
    def is_plain(self) -> bool:
        return self._is_text and not self._ranks

    @property
    def has_token_ids(self) -> bool:
        return self._token_ids is not None

    @property
    def held_bytes(self) -> int:
        spans = self._parser.spans
        return self._num_bytes - (self._num_parsed if spans is None else spans.num_bytes)

    @property
    def reasoning_tokens(self) -> int:
        return 0

    @property
    def mean_logprob(self) -> float:
        return self._logprob_sum / max(1, self._num_tokens)

    def read(self, part: Delta | ChoiceDelta) -> list[ChoiceEvent[EntryT]]:
        """Returns the events that a part of the log completes."""
        text = part.text
        if self._token_ids is not None:
            self._token_ids.extend(part.token_ids)
        if self._ranks:
            self._num_tokens += len(part.token_ids)
            self._logprob_sum += sum(entry.logprob for entry in part.logprobs or ())
        if self._is_text:  # the common stream, once per token
            return [ChoiceEvent(self._index, Text(text), (), self._take_ids())] if text else []
        self._num_bytes += len(text.encode())
        return self._parse(part)

    def finish(
        self, reason: FinishReason | None, stop_reason: str | int | None
    ) -> list[ChoiceEvent[EntryT]]:
        """Returns its last events, the end among them."""
        self.has_ended = True
        self._num_parsed = self._num_bytes
        events = self._events(self._parser.finish())
        end = ChoiceEnd(reason, stop_reason, self._parser.has_calls)
        last = ChoiceEvent(self._index, None, self._take_placed(), self._take_ids(), end)
        return [*events, last]

    def _parse(self, part: Delta | ChoiceDelta) -> list[ChoiceEvent[EntryT]]:
        self._num_parsed = self._num_bytes
        return self._events(self._parser.push(part.text)) if part.text else []

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

    def _take_placed(self) -> Sequence[PlacedLogprob[EntryT]]:
        """Returns the log probabilities of the text up to here."""
        return ()
