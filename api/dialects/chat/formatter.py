"""ChatFormatter: events of a job as `chat.completion.chunk`s, or as one `chat.completion`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypedDict

import msgspec

from api.generation.choices import ChoiceEnd, ChoiceReader, PlacedLogprob, ReaderOptions, TokenTexts
from api.generation.formatter import ChunkFormatter, ResponseContext
from api.on_demand import load_part
from api.output_parsers.events import (
    NewParser,
    OutputEvent,
    PlainParser,
    Reasoning,
    Text,
    ToolArguments,
    ToolCall,
)
from shared.messages import Finished, FinishReason

TOOL_CALLS = "tool_calls"  # the finish reason of a choice that made calls


class ChatLogprobs(TypedDict):
    """`choices[].logprobs`."""

    content: Sequence[msgspec.Raw]
    refusal: None


class ChatFormatter(ChunkFormatter[msgspec.Raw]):
    """`new_parser` makes the parser of each choice's text; `counts_reasoning` where it may find
    some."""

    kind = "chat"
    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def __init__(
        self,
        context: ResponseContext,
        tokenizer: TokenTexts,
        new_parser: NewParser = PlainParser,
        *,
        counts_reasoning: bool = False,
        prompt_logprobs: Callable[[], Iterable[Any]] | None = None,
    ) -> None:
        form = None
        if context.num_logprobs is not None:
            form = load_part("logprobs").ChatEntryForm(tokenizer)
        options = ReaderOptions(
            num_choices=context.num_choices,
            new_parser=new_parser,
            tokenizer=tokenizer,
            form=form,
            has_token_ids=context.prompt_token_ids is not None,
            counts_reasoning=counts_reasoning,
        )
        super().__init__(context, ChoiceReader(options))
        self._prompt_logprobs = prompt_logprobs  # of whole responses
        self._messages = [WholeMessage() for _ in range(context.num_choices)]

    def opening(self) -> Sequence[Any]:
        has_ids = self._context.prompt_token_ids is not None
        choices = [
            self._choice(
                choice,
                {"delta": {"role": "assistant", "content": ""}},
                token_ids=[] if has_ids else None,
            )
            for choice in range(self._context.num_choices)
        ]
        return ({**self._chunk(choices), **self.prompt_members()},)

    def delta_member(self, piece: OutputEvent | None) -> dict[str, Any]:
        if isinstance(piece, Text):
            return {"delta": {"content": piece.text}}
        if piece is None:
            return {"delta": {}}
        if isinstance(piece, Reasoning):
            return {"delta": {"reasoning_content": piece.text}}
        call = (
            {"function": {"arguments": piece.text}}
            if isinstance(piece, ToolArguments)
            else _call(piece, "")
        )
        return {"delta": {"tool_calls": [{"index": piece.index, **call}]}}

    def keep_piece(self, choice: int, piece: OutputEvent) -> None:
        self._messages[choice].add(piece)

    def whole_member(self, choice: int) -> dict[str, Any]:
        return {"message": self._messages[choice].payload()}

    def entries(self, placed: Sequence[PlacedLogprob[msgspec.Raw]]) -> Sequence[msgspec.Raw]:
        return [item.entry for item in placed]

    def logprobs(self, entries: Sequence[msgspec.Raw]) -> ChatLogprobs | None:
        return {"content": entries, "refusal": None} if entries else None

    def finish_reason(self, end: ChoiceEnd) -> str | None:
        """Returns the finish reason; of a choice that was cut off, its length, also in a call."""
        is_called = end.has_calls and end.reason is FinishReason.STOP
        return TOOL_CALLS if is_called else super().finish_reason(end)

    def body(self, end: Finished) -> Any:
        body = super().body(end)
        if self._prompt_logprobs is not None:
            body["prompt_logprobs"] = self._prompt_logprobs()
        return body


def _call(call: ToolCall, arguments: str) -> dict[str, Any]:
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.call_id, "type": "function", "function": function}


class WholeMessage:
    """The message of a choice, from its pieces."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []
        self._arguments: list[list[str]] = []  # of each call

    def add(self, piece: OutputEvent) -> None:
        """Adds the next piece."""
        match piece:
            case Text(text):
                self._text.append(text)
            case Reasoning(text):
                self._reasoning.append(text)
            case ToolCall():
                self._calls.append(piece)
                self._arguments.append([])
            case ToolArguments(index, text):
                self._arguments[index].append(text)

    def payload(self) -> dict[str, Any]:
        """Returns the member `message`; its content is null where there are calls and no text."""
        text, reasoning = "".join(self._text), "".join(self._reasoning)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text if text or not self._calls else None,
            "refusal": None,
        }
        if reasoning:
            message["reasoning_content"] = reasoning
        if self._calls:
            message["tool_calls"] = [
                _call(call, "".join(parts))
                for call, parts in zip(self._calls, self._arguments, strict=True)
            ]
        return message
