"""Earlier calls of tools as the templates of some formats must be given them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from api.ids import short_id
from shared.text.tool_formats import ToolFormat

Message = Mapping[str, Any]
_NewId = Callable[[str, str, int], str]  # of a call's id, its tool and its number


def history(messages: Sequence[Message], tool_format: ToolFormat | None) -> Sequence[Message]:
    """Returns a conversation as templates of the format take it.

    Clients have ids of calls from here, or from any other model. Mistral's templates refuse ids
    that are not nine letters and digits, and Kimi's write the id where others write the name.
    Llama's refuse a message with several calls; those of gpt-oss write the first one only, and
    refuse a call with reasoning and text.
    """
    if tool_format in (ToolFormat.OPENAI, ToolFormat.LLAMA3_JSON):
        return list(_one_call_each(messages, thinks=tool_format is ToolFormat.OPENAI))
    new_id = _NEW_IDS.get(tool_format) if tool_format is not None else None
    return messages if new_id is None else _with_ids(messages, new_id)


def _one_call_each(messages: Sequence[Message], *, thinks: bool) -> Iterator[Message]:
    """Yields the messages with one call in each, and its result after it. `thinks`: text before a
    call is reasoning."""
    index = 0
    while index < len(messages):
        message = messages[index]
        index += 1
        if "tool_calls" not in message:
            yield message
            continue
        results = []
        while index < len(messages) and "tool_call_id" in messages[index]:
            results.append(messages[index])
            index += 1
        before = {**message, **(_thought(message) if thinks else {})}
        for call in message["tool_calls"]:
            yield {**before, "tool_calls": [call]}
            before = {"role": "assistant", "content": ""}
            yield from (each for each in results if each["tool_call_id"] == call["id"])
        ids = {call["id"] for call in message["tool_calls"]}
        yield from (each for each in results if each["tool_call_id"] not in ids)


def _thought(message: Message) -> dict[str, Any]:
    """Returns the text before a call, as one message of analysis."""
    texts = [message.get("reasoning_content", ""), _text(message.get("content", ""))]
    return {"content": "", "reasoning_content": "\n".join(text for text in texts if text)}


def _text(content: str | Sequence[Mapping[str, str]]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _with_ids(messages: Sequence[Message], new_id: _NewId) -> list[Message]:
    """Returns the messages with other ids of calls, the same in a call and in its result."""
    ids: dict[str, str] = {}
    num_calls = 0
    made: list[Message] = []
    for message in messages:
        if "tool_calls" in message:
            calls = []
            for call in message["tool_calls"]:
                ids[call["id"]] = new_id(call["id"], call["function"]["name"], num_calls)
                calls.append({**call, "id": ids[call["id"]]})
                num_calls += 1
            message = {**message, "tool_calls": calls}
        elif "tool_call_id" in message:
            call_id = message["tool_call_id"]
            message = {**message, "tool_call_id": ids.get(call_id, call_id)}
        made.append(message)
    return made


def _short_id(call_id: str, name: str, index: int) -> str:
    return short_id(call_id) or hashlib.blake2b(call_id.encode(errors="replace")).hexdigest()[:9]


def _kimi_id(call_id: str, name: str, index: int) -> str:
    return f"functions.{name}:{index}"


_NEW_IDS: Mapping[ToolFormat, _NewId] = {
    ToolFormat.MISTRAL: _short_id,
    ToolFormat.KIMI_K2: _kimi_id,
}
