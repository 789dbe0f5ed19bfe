"""A job's prompt and answer as text, for its page and for debugging.

Both are read on demand, by callers that may see the job, and never on the path of a request. The
caller does not become a reader of the job: watching a job does not change it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Literal

from pydantic import Field

from api.generation.choices import ChoiceEvent, ChoiceReader, ReaderOptions
from api.generation.models import ServedModel
from api.generation.response_schemas import ResponseModel
from api.generation.thread_pool import TextPool
from api.http.pagination import ListQuery
from api.http.time_slices import TimeSlices
from api.jobs.event_stream import FIRST_PAGE_EVENTS, next_page
from api.jobs.log_page import is_missing_text
from api.jobs.sent_events import split_long
from api.on_demand import load_part
from api.output_parsers.events import OutputParser, PlainParser, Reasoning, Text, ToolCall
from api.output_parsers.parser import ParserConfig, Thinking, thinking_after
from shared.messages import START, Cursor, Delta, Failed, Finished, JobEvent, PromptSlice
from shared.text.base import Tokenizer
from shared.text.tool_formats import reasoning_format_of, tool_format_of
from shared.transport.ports.jobs import JobRecord, JobStore
from shared.transport.ports.prompts import KeptPrompts

MAX_PROMPT_TOKENS = 65_536  # of a page
MAX_ANSWER_TOKENS = 262_144
JOINED_TOKENS = 8  # before a page and after it, with which its characters are whole
TAIL_TOKENS = 64  # of a prompt, which show whether it has opened the reasoning
PARSED_KINDS = frozenset({"chat", "message", "response"})  # whose answers have parts


class PromptQuery(ListQuery):
    """The query of GET /v1/jobs/{id}/prompt."""

    limit: int = Field(4096, ge=1, le=MAX_PROMPT_TOKENS, description="Tokens.")
    after: int = Field(0, ge=0, lt=2**31, description="`next` of the page before.")


class AnswerQuery(ListQuery):
    """The query of GET /v1/jobs/{id}/answer."""

    limit: int = Field(16_384, ge=1, le=MAX_ANSWER_TOKENS, description="Tokens, from the first.")


class JobPrompt(ResponseModel):
    """A page of a prompt as the model got it, with the template and its special tokens.

    `text` is null if it cannot be shown, and `missing` has the reason: the prompt is no longer
    stored, or no worker has announced the model lately. `next`: `after` of the next page; null:
    none.
    """

    object: Literal["job.prompt"] = "job.prompt"
    text: str | None = None
    missing: Literal["not_stored", "model_unknown"] | None = None
    num_tokens: int  # of the whole prompt
    next: int | None = None


class ShownCall(ResponseModel):
    name: str
    arguments: str


class ShownChoice(ResponseModel):
    """What one choice has so far. Reasoning and calls are in `text` where the model is not known
    any more, and if the request had no chat."""

    index: int
    reasoning: str = ""
    text: str = ""
    tool_calls: list[ShownCall]
    finish_reason: str | None = None


class JobAnswer(ResponseModel):
    """A job's answer as far as it is; `num_tokens`: of all choices, as far as they are shown.

    `is_cut`: the log has more than `limit` tokens; `has_expired`: the text is no longer stored, and
    `message` has the reason.
    """

    object: Literal["job.answer"] = "job.answer"
    choices: list[ShownChoice]
    num_tokens: int
    is_cut: bool
    has_expired: bool
    message: str | None


async def read_prompt(
    record: JobRecord,
    query: PromptQuery,
    prompts: KeptPrompts,
    model: ServedModel | None,
    pool: TextPool,
) -> JobPrompt:
    """Returns a page of the job's prompt. Raises TransportError, and UnavailableError where no
    thread is free."""
    page = JobPrompt(num_tokens=record.prompt_tokens)
    tokens = await prompts.tokens(record.job_id)
    if tokens is None:
        page.missing = "not_stored"
    elif model is None:
        page.missing = "model_unknown"
    else:
        page.text, page.next = await pool.run(
            _decoded_page, model.text.tokenizer, tokens, query.after, query.limit
        )
    return page


async def read_answer(
    record: JobRecord,
    limit: int,
    store: JobStore,
    prompts: KeptPrompts,
    model: ServedModel | None,
    pool: TextPool,
    slices: TimeSlices,
) -> JobAnswer:
    """Returns the job's answer as far as it is, at most `limit` tokens. Raises as `read_prompt`.

    The log is read a page at a time, and parsed in slices of time.
    """
    thinking = Thinking.NO
    if model is not None and record.kind in PARSED_KINDS:
        thinking = await _thinking(record, prompts, model, pool)
    answer = _Answer(record, model, thinking)
    after, num_events = START, FIRST_PAGE_EVENTS
    while True:
        events = await store.read_log(record.job_id, after, num_events)
        for event in events:
            if isinstance(event, Failed) and is_missing_text(event, record):
                return JobAnswer(
                    choices=[], num_tokens=0, is_cut=False, has_expired=True, message=event.message
                )
        await slices.run(answer.read(events, limit))
        is_cut = answer.num_tokens >= limit and answer.is_behind(events)
        is_over = any(isinstance(event, Finished | Failed) for event in events)
        if is_cut or is_over or len(events) < num_events:
            return answer.shown(is_cut=is_cut)
        after, num_events = _end_of(events[-1]), next_page(events)


def _end_of(event: Delta | JobEvent) -> Cursor:
    """Returns the cursor after an event that is not the last one of a log."""
    if isinstance(event, PromptSlice):
        return Cursor(0, event.index + 1)
    assert isinstance(event, Delta), "nothing else precedes the end"
    return event.end


async def _thinking(
    record: JobRecord, prompts: KeptPrompts, model: ServedModel, pool: TextPool
) -> Thinking:
    """Returns how the answer begins, by the end of the prompt where it is stored."""
    reasoning_format = reasoning_format_of(model.card.reasoning_format)
    tokens = None if reasoning_format is None else await prompts.tokens(record.job_id)
    tail = ""
    if tokens is not None:
        begin = max(0, record.prompt_tokens - TAIL_TOKENS)
        tail, _ = await pool.run(_decoded_page, model.text.tokenizer, tokens, begin, TAIL_TOKENS)
    return thinking_after(tail, reasoning_format)


def _decoded_page(
    tokenizer: Tokenizer, tokens: bytes, after: int, limit: int
) -> tuple[str, int | None]:
    """Returns the text of at most about `limit` ids after `after`, and where the next page begins;
    None: nowhere. Pages joined are the whole text. For a thread; `tokens`: as KeptPrompts has them.
    """
    ids = [int(token_id) for token_id in tokens.rstrip(b",").split(b",") if token_id]
    decode = partial(tokenizer.decode, skip_special_tokens=False)
    begin = max(0, after - JOINED_TOKENS)
    before = decode(ids[begin:after])
    end = min(after + limit, len(ids))
    text = decode(ids[begin:end])
    most = min(end + JOINED_TOKENS, len(ids))
    while text.endswith("\ufffd") and end < most:  # a character of several tokens continues
        end += 1
        text = decode(ids[begin:end])
    return text[len(before) :], end if end < len(ids) else None


class _AnyTool(Collection[str]):
    """The names of all tools: which of them a request had is not stored."""

    def __contains__(self, name: object) -> bool:
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 1


def _parsers_of(
    record: JobRecord, model: ServedModel | None, thinking: Thinking
) -> list[OutputParser]:
    count = record.num_choices
    if model is None or record.kind not in PARSED_KINDS:
        return [PlainParser() for _ in range(count)]
    config = ParserConfig(
        tool_format=tool_format_of(model.card.tool_format),
        reasoning_format=reasoning_format_of(model.card.reasoning_format),
        thinking=thinking,
    )
    if config.tool_format is None and config.reasoning_format is None:
        return [PlainParser() for _ in range(count)]
    new_parser = load_part("format_parser").new_parser
    return [new_parser(config, record.job_id, choice, _AnyTool()) for choice in range(count)]


@dataclass(slots=True)
class _ChoiceText:
    """The parts of a choice so far, each in pieces."""

    reasoning: list[str] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    calls: list[tuple[str, list[str]]] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, event: ChoiceEvent[object]) -> None:
        piece = event.piece
        if event.end is not None and event.end.reason is not None:
            self.finish_reason = event.end.reason.value
        if isinstance(piece, Text):
            self.text.append(piece.text)
        elif isinstance(piece, Reasoning):
            self.reasoning.append(piece.text)
        elif isinstance(piece, ToolCall):
            self.calls.append((piece.name, []))
        elif piece is not None:
            self.calls[piece.index][1].append(piece.text)


class _Answer:
    """Collects a job's answer out of its log."""

    def __init__(self, record: JobRecord, model: ServedModel | None, thinking: Thinking) -> None:
        parsers = iter(_parsers_of(record, model, thinking))
        options: ReaderOptions[object] = ReaderOptions(
            num_choices=record.num_choices, new_parser=lambda: next(parsers)
        )
        self._reader = ChoiceReader(options)
        self._choices = [_ChoiceText() for _ in range(record.num_choices)]
        self.num_tokens = 0

    def read(self, events: Sequence[Delta | JobEvent], limit: int) -> Iterator[None]:
        """Reads the events as it is iterated, until `limit` tokens are read."""
        deltas = (event for event in events if isinstance(event, Delta))
        for delta in chain.from_iterable(map(split_long, deltas)):
            if self.num_tokens >= limit:
                return
            self.num_tokens += len(delta.token_ids)
            self._add(self._reader.read(delta._replace(logprobs=None)))
            yield
        for event in events:
            if isinstance(event, Finished | Failed) and self.num_tokens == event.end.num_tokens:
                self._add(self._reader.finish(event))

    def is_behind(self, events: Sequence[Delta | JobEvent]) -> bool:
        """Returns whether the events end after the part that was read."""
        ends = [event.end for event in events if isinstance(event, Delta | Finished | Failed)]
        return bool(ends) and ends[-1].num_tokens > self.num_tokens

    def shown(self, *, is_cut: bool) -> JobAnswer:
        """Returns the answer as far as it was read."""
        return JobAnswer(
            choices=[_shown(*item) for item in enumerate(self._choices)],
            num_tokens=self.num_tokens,
            is_cut=is_cut,
            has_expired=False,
            message=None,
        )

    def _add(self, events: Sequence[ChoiceEvent[object]]) -> None:
        for event in events:
            self._choices[event.choice].add(event)


def _shown(index: int, choice: _ChoiceText) -> ShownChoice:
    return ShownChoice(
        index=index,
        reasoning="".join(choice.reasoning),
        text="".join(choice.text),
        tool_calls=[
            ShownCall(name=name, arguments="".join(pieces)) for name, pieces in choice.calls
        ],
        finish_reason=choice.finish_reason,
    )
