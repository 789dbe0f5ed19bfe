"""From items to the messages that chat templates know.

A message of the assistant may be several items: what it thought, what it said, the tools it called.
Templates know one message with all three, so items that follow one another become one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from api.responses.items import Item
from shared.messages import InvalidParameter

_ASSISTANT_ITEMS = frozenset({"reasoning", "function_call"})


def chat_messages(instructions: str | None, items: Sequence[Item]) -> list[dict[str, Any]]:
    """The conversation in the members of chat completions. `items` are kept ones."""
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    turn: dict[str, Any] | None = None
    names: dict[str, str] = {}  # id of a call -> name of its tool
    for item in items:
        if not _is_assistants(item):
            turn = None
            messages.append(_message(item, names))
            continue
        if turn is None or not _fits(turn, item):
            turn = {"role": "assistant", "content": ""}
            messages.append(turn)
        _add(turn, item)
        if item["type"] == "function_call":
            names[item["call_id"]] = item["name"]
    return messages


def check_calls(earlier: Sequence[Item], items: Sequence[Item]) -> None:
    """Every output needs a call before it, in `earlier` or in the request itself.

    Raises InvalidParameter.
    """
    call_ids = set(_call_ids(earlier))
    for index, item in enumerate(items):
        if item["type"] == "function_call":
            call_ids.add(item["call_id"])
        elif item["type"] == "function_call_output" and item["call_id"] not in call_ids:
            raise InvalidParameter(
                f"input.{index}.call_id", "no function call with this call_id comes before it"
            )


def _call_ids(items: Sequence[Item]) -> Iterator[str]:
    return (item["call_id"] for item in items if item["type"] == "function_call")


def _is_assistants(item: Item) -> bool:
    return item["type"] in _ASSISTANT_ITEMS or item.get("role") == "assistant"


def _fits(turn: dict[str, Any], item: Item) -> bool:
    """Thoughts come first, then one message, then any number of calls."""
    if item["type"] == "function_call":
        return True
    if item["type"] == "message":
        return not turn["content"] and "tool_calls" not in turn
    return turn.keys() == {"role", "content"} and not turn["content"]


def _add(turn: dict[str, Any], item: Item) -> None:
    if item["type"] == "message":
        turn["content"] = _content(item["content"])
    elif item["type"] == "reasoning":
        parts = item.get("content") or item["summary"]
        if parts:
            turn["reasoning_content"] = "\n".join(part["text"] for part in parts)
    else:
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(call)


def _message(item: Item, names: dict[str, str]) -> dict[str, Any]:
    if item["type"] == "message":
        return {"role": item["role"], "content": _content(item["content"])}
    message = {
        "role": "tool",
        "tool_call_id": item["call_id"],
        "content": _content(item["output"]),
    }
    if item["call_id"] in names:
        message["name"] = names[item["call_id"]]
    return message


def _content(content: str | Sequence[Item]) -> str | list[dict[str, str]]:
    """Text, or text parts where there are several."""
    if isinstance(content, str):
        return content
    texts = [part["refusal"] if part["type"] == "refusal" else part["text"] for part in content]
    if len(texts) == 1:
        return str(texts[0])
    return [{"type": "text", "text": text} for text in texts]
