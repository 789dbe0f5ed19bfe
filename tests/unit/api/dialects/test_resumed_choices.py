"""Whatever is cut wherever, and however many choices share a stream in whatever events: what was
told, and the stream that goes on behind it, have each token of each choice once."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from api.dialects.chat.formatter import ChatFormatter
from api.dialects.completions.formatter import CompletionFormatter, CompletionShape
from api.dialects.generate.formatter import GenerateFormatter
from api.dialects.messages.formatter import MessageContext, MessageFormatter
from api.generation.formatter import Formatter, ResponseContext, Timing
from api.jobs.generation_response import generation_response
from api.jobs.reader_position import Extent, ResumePoint
from api.output_parsers.events import Reasoning, Text, ToolArguments, ToolCall
from api.output_parsers.parser import OutputParserFactory, ParserConfig, Thinking
from shared.messages import MAX_CHOICES, START, Cursor, Delta, SamplingParams, Segment
from shared.text.tool_formats import ReasoningFormat, ToolFormat
from tests.unit.api.dialects.cut_answers import Events, frontend_over, log_of_choices, tail_of
from tests.unit.api.dialects.response_logs import TOKENIZER, TURNS, response_formatter
from tests.unit.api.dialects.test_cut_streams import payloads_of, written
from tests.unit.api.dialects.test_sliced_answers import JOB

Told = dict[int, tuple[str, list[int]]]  # of each choice: its text and its token ids


def turns() -> OutputParserFactory:
    config = ParserConfig(
        tool_format=ToolFormat.HERMES,
        names=("get",),
        reasoning_format=ReasoningFormat.THINK,
        thinking=Thinking.MAYBE,
    )
    return OutputParserFactory(config, "s")


def context_of(num_choices: int) -> ResponseContext:
    return ResponseContext(
        id="x",
        model="m",
        created_s=7,
        num_choices=num_choices,
        include_usage=True,
        num_logprobs=0,
        prompt_token_ids=(),
    )


def completion(num_choices: int) -> Formatter:
    shape = CompletionShape(best_of=num_choices, n=num_choices)
    return CompletionFormatter(context_of(num_choices), TOKENIZER, shape)


def echo(num_choices: int) -> Formatter:
    shape = CompletionShape(best_of=num_choices, n=num_choices, echoes=("prompt",))
    return CompletionFormatter(context_of(num_choices), TOKENIZER, shape)


def chat(num_choices: int) -> Formatter:
    return ChatFormatter(context_of(num_choices), TOKENIZER)


def generate(num_choices: int) -> Formatter:
    return GenerateFormatter("x", "m", Timing())


def message(num_choices: int) -> Formatter:
    return MessageFormatter(MessageContext(id="x", model="m", prompt_tokens=3))


def chat_with_tools(num_choices: int) -> Formatter:
    return ChatFormatter(context_of(num_choices), TOKENIZER, turns())


def message_with_tools(num_choices: int) -> Formatter:
    return MessageFormatter(MessageContext(id="x", model="m", prompt_tokens=3), turns())


def response_with_tools(num_choices: int) -> Formatter:
    return response_formatter(TURNS, store=False)


def response(num_choices: int) -> Formatter:
    return response_formatter(store=False)


def answer(made: Formatter, num_choices: int, interval: int | None, frontend: Any) -> Any:
    sampling, prompt = SamplingParams(max_tokens=400), (1,) * 3
    job = replace(
        JOB, kind=made.kind, prompt_token_ids=prompt, sampling=sampling, num_choices=num_choices
    )
    return generation_response(
        frontend, (job,), made, Timing(), streamed=True, stream_interval=interval
    )


async def cut_answers(
    new_formatter: Callable[[int], Formatter],
    num_choices: int,
    interval: int | None,
    events: Events,
) -> list[tuple[list[Any], ResumePoint]]:
    """Returns the payloads of a stream that is cut at each of its writes (of many at each
    thirteenth), and its resume points."""
    frontend = frontend_over(events)
    whole = await written(
        answer(new_formatter(num_choices), num_choices, interval, frontend), frontend
    )
    found = []
    for cut_at in range(0, len(whole), 1 if len(whole) < 80 else 13):
        frontend = frontend_over(events)
        made = answer(new_formatter(num_choices), num_choices, interval, frontend)
        *result, error = payloads_of(await written(made, frontend, cut_at))
        point = re.search(r"'Last-Event-ID: ([^']+)' continues", json.dumps(error))
        assert point is not None
        found.append((result, ResumePoint.parse(point[1])))
    return found


def told_by(payloads: Sequence[Any]) -> Told:
    """Of plain text, in any dialect; a choice without an `index` is the only one."""
    result: Told = {}
    for payload in payloads:
        members = payload.get("choices", (payload,))
        for member in members:
            delta = member.get("delta", {})
            if isinstance(delta, str):  # of a response
                delta = {"content": delta}
            text = member.get("text") if payload.get("type") is None else None
            if payload.get("type") in (None, "content_block_delta", "response.output_text.delta"):
                text = text or delta.get("content") or delta.get("text") or ""
                choice = 0 if "type" in payload else member.get("index", 0)
                before = result.get(choice, ("", []))
                result[choice] = (before[0] + text, before[1] + (member.get("token_ids") or []))
    return result


def joined(result: Told, rest: Told) -> Told:
    nothing: tuple[str, list[int]] = ("", [])
    return {
        choice: tuple(a + b for a, b in zip(result.get(choice, nothing), rest[choice], strict=True))
        for choice in rest
    } | {choice: result[choice] for choice in result if choice not in rest}  # type: ignore[return-value]


async def whole_of(events: Events, num_choices: int) -> Told:
    return told_by(payloads_of([await tail_of(events, num_choices, ResumePoint())]))


LOGS = [(1, 0), (3, 140)]  # seed, steps of the long entry


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written in pieces is written an item at a time."""
    monkeypatch.setattr("api.http.time_slices.PIECE_BYTES", 1)


@pytest.mark.parametrize("interval", [None, 4, 4096])
@pytest.mark.parametrize(("seed", "long_entry"), LOGS)
@pytest.mark.parametrize(
    ("new_formatter", "num_choices"),
    [(completion, 1), (completion, 3), (echo, 2), (chat, 1), (chat, 3), (generate, 1)],
)
async def test_each_token_is_published_once_whatever_write_is_cut(
    new_formatter: Callable[[int], Formatter],
    num_choices: int,
    seed: int,
    long_entry: int,
    interval: int | None,
) -> None:
    events = log_of_choices(num_choices, seed, long_entry=long_entry)
    whole = await whole_of(events, num_choices)
    cut = await cut_answers(new_formatter, num_choices, interval, events)
    assert len(cut) > 2
    for payloads, point in cut:
        result = told_by(payloads)
        if new_formatter is echo:
            result = {
                choice: (text.removeprefix("prompt"), ids) for choice, (text, ids) in result.items()
            }
        rest = told_by(payloads_of([await tail_of(events, num_choices, point)]))
        assert joined(result, rest) == whole, point


@pytest.mark.parametrize("interval", [None, 4])
@pytest.mark.parametrize(("seed", "long_entry"), LOGS)
@pytest.mark.parametrize("new_formatter", [message, response])
async def test_each_character_is_sent_once_where_token_ids_are_not_shown(
    new_formatter: Callable[[int], Formatter], seed: int, long_entry: int, interval: int | None
) -> None:
    events = log_of_choices(1, seed, long_entry=long_entry)
    whole = await whole_of(events, 1)
    for payloads, point in await cut_answers(new_formatter, 1, interval, events):
        rest = told_by(payloads_of([await tail_of(events, 1, point)]))
        assert joined(told_by(payloads), rest)[0][0] == whole[0][0], point


def turn_of(raw: str) -> list[str]:
    """What is sent of the front of a choice's raw text: reasoning, text, then each call."""
    parser = turns()()
    reasoning, text, calls = "", "", []
    for event in (*parser.push(raw), *parser.finish()):
        match event:
            case Text(more):
                text += more
            case Reasoning(more):
                reasoning += more
            case ToolCall(_, _, name):
                calls.append(name)
            case ToolArguments(_, more):
                calls[-1] += more
    return [reasoning, text, *calls]


def chat_turns(payloads: Sequence[Any], num_choices: int) -> list[list[str]]:
    turns_told = [["", ""] for _ in range(num_choices)]
    for payload in payloads:
        for member in payload["choices"]:
            turn, delta = turns_told[member["index"]], member["delta"]
            turn[0] += delta.get("reasoning_content", "")
            turn[1] += delta.get("content", "")
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    turn.append(call["function"]["name"])
                turn[-1] += call["function"].get("arguments", "")
    return turns_told


def message_turns(payloads: Sequence[Any], num_choices: int) -> list[list[str]]:
    turn = ["", ""]
    for payload in payloads:
        if payload["type"] == "content_block_start":
            block = payload["content_block"]
            turn += [block["name"]] if block["type"] == "tool_use" else []
        elif payload["type"] == "content_block_delta":
            delta = payload["delta"]
            turn[0] += delta.get("thinking", "")
            turn[1] += delta.get("text", "")
            turn[-1] += delta.get("partial_json", "")
    return [turn]


def response_turns(payloads: Sequence[Any], num_choices: int) -> list[list[str]]:
    turn = ["", ""]
    for payload in payloads:
        kind = payload["type"]
        if kind == "response.output_item.added" and payload["item"]["type"] == "function_call":
            turn.append(payload["item"]["name"])
        elif kind == "response.function_call_arguments.delta":
            turn[-1] += payload["delta"]
        elif kind == "response.reasoning_text.delta":
            turn[0] += payload["delta"]
        elif kind == "response.output_text.delta":
            turn[1] += payload["delta"]
    return [turn]


@pytest.mark.parametrize("interval", [None, 4])
@pytest.mark.parametrize(("seed", "long_entry"), LOGS)
@pytest.mark.parametrize(
    ("new_formatter", "turns_of", "num_choices"),
    [
        (chat_with_tools, chat_turns, 1),
        (chat_with_tools, chat_turns, 3),
        (message_with_tools, message_turns, 1),
        (response_with_tools, response_turns, 1),
    ],
)
async def test_what_a_parser_holds_is_neither_lost_nor_sent_twice(
    new_formatter: Callable[[int], Formatter],
    turns_of: Callable[[Sequence[Any], int], list[list[str]]],
    num_choices: int,
    seed: int,
    long_entry: int,
    interval: int | None,
) -> None:
    """The stream that goes on has the model's raw text: from the very character on before which
    everything was told as reasoning, text or a call."""
    events = log_of_choices(num_choices, seed, long_entry=long_entry)
    whole = await whole_of(events, num_choices)
    held = 0
    for payloads, point in await cut_answers(new_formatter, num_choices, interval, events):
        rest = told_by(payloads_of([await tail_of(events, num_choices, point)]))
        for choice, turn in enumerate(turns_of(payloads, num_choices)):
            raw, raw_rest = whole[choice][0], rest.get(choice, ("", []))[0]
            assert raw.endswith(raw_rest)
            assert turn_of(raw.removesuffix(raw_rest)) == turn, point
        held += bool(point.ahead)
    assert held or long_entry, "the parser held something at a cut"


@pytest.mark.parametrize("num_choices", [1, 3])
async def test_a_stream_resumes_after_any_byte(num_choices: int) -> None:
    """Cut at every byte, the job's stream itself, from its start and from where an answer in fours
    was cut, goes on behind the last whole event."""
    events = log_of_choices(num_choices, 5)
    whole = await whole_of(events, num_choices)
    cut = await cut_answers(chat, num_choices, 4, events)
    told_before = {str(point): told_by(payloads) for payloads, point in cut[::4]}
    told_before[str(ResumePoint())] = {}
    assert num_choices == 1 or any("." in name for name in told_before)
    for name, before in told_before.items():
        stream = await tail_of(events, num_choices, ResumePoint.parse(name))
        rests: dict[str, Told] = {}
        for num_bytes in range(len(stream)):
            read = stream[:num_bytes]
            blocks = read[: read.rfind(b"\n\n") + 2].decode()
            ids = re.findall(r"^id: (.+)$", blocks, re.MULTILINE)
            last = ids[-1] if ids else name
            if last not in rests:
                result = joined(before, told_by(payloads_of([blocks.encode()])))
                point = ResumePoint.parse(last)
                rest = told_by(payloads_of([await tail_of(events, num_choices, point)]))
                rests[last] = joined(result, rest)
                is_end = point.cursor.num_tokens > events[-1].end.num_tokens
                assert is_end or rests[last] == whole, (name, last)


@pytest.mark.parametrize(
    "point",
    [
        ResumePoint(),
        ResumePoint(Cursor(12, 40)),
        ResumePoint(Cursor(12, 40), {1: Extent(3, 9), 127: Extent(0, 4, has_end=True)}),
        ResumePoint(
            Cursor(10**11, 10**11),
            {choice: Extent(10**11, 10**11, has_end=True) for choice in range(MAX_CHOICES)},
        ),
    ],
)
def test_an_id_stands_for_its_resume_point(point: ResumePoint) -> None:
    assert ResumePoint.parse(str(point)) == point


@pytest.mark.parametrize(
    "text",
    [
        *("", "x", "1", "1-", "1-2-3", "1-2.", "1-2.0", "1-2.0-1", "1-2.0-1-1x", "1-2.128-1-1"),
        *(
            "1-2.0-1-1.0-1-1",
            "1-2.0-1-1.",
            "1-2. 0-1-1",
            "1-2.٣-1-1",
            "1-2.0-1-1" + ".1-1-1" * 9999,
        ),
    ],
)
def test_what_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a"):
        ResumePoint.parse(text)


async def test_an_id_that_cuts_a_character_ends_its_stream_with_an_error() -> None:
    segments = (Segment(0, 1, 2), Segment(1, 1, 2))
    entry = Delta(START, Cursor(2, 4), (1, 1), "éé", None, segments)
    point = ResumePoint(START, {1: Extent(0, 1)})
    first, error = payloads_of([await tail_of([entry], 2, point)])
    assert (first["index"], first["text"]) == (0, "é")
    assert error["error"]["code"] == "stream_diverged"
