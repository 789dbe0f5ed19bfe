"""From items to the messages that chat templates know.

An assistant message may be several items: its reasoning, its text, the tools it called. Templates
know one message with all three, so items that follow one another become one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from api.dialects.responses.calls import (
    Item,
    call_output,
    function_call,
    is_call,
    is_call_output,
)
from api.dialects.responses.items import decoded_content
from api.dialects.responses.shown_tools import is_search_without_call
from api.generation.messages import MAX_CALLS
from shared.messages import InvalidParameter

# The last message of a conversation that is to be summarized.
SUMMARY_REQUEST = (
    "Summarize this conversation, so that it can go on from your summary alone. Keep the user's "
    "goals and instructions, what was decided and done, names, paths, commands and values that are "
    "still needed, open questions, and the next steps. Write the summary only, and call no tools."
)
SUMMARY_OPENING = "This is a summary of the conversation so far:"


def chat_messages(
    instructions: str | None, items: Sequence[Item], found: Mapping[int, str]
) -> list[dict[str, Any]]:
    """Returns the conversation as chat templates know it. `items` are kept ones; `found` has texts
    for those that bring tools, by index (ShownTools).

    Raises InvalidParameter for calls of one turn that are too many or have the same id.
    """
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    turn: dict[str, Any] | None = None
    names: dict[str, str] = {}  # id of a call -> name of its tool
    for index, item in enumerate(items):
        if is_search_without_call(item, names):
            continue  # its tools are listed
        if item["type"] == "additional_tools":
            if found[index]:
                turn = None
                messages.append({"role": "system", "content": found[index]})
            continue
        if not _is_assistants(item):
            turn = None
            messages.append(_message(item, names, found.get(index)))
            continue
        if turn is None or not _fits(turn, item):
            turn = {"role": "assistant", "content": ""}
            messages.append(turn)
        _add(turn, item)
        if is_call(item):
            names[item["call_id"]] = function_call(item).name
    return messages


def check_calls(earlier: Sequence[Item], items: Sequence[Item]) -> None:
    """Checks that every output has a call before it, in `earlier` or in the request itself.

    Raises InvalidParameter.
    """
    call_ids = {item["call_id"] for item in earlier if is_call(item)}
    for index, item in enumerate(items):
        if is_call(item):
            call_ids.add(item["call_id"])
        elif item["type"] == "tool_search_output":
            continue
        elif is_call_output(item) and item["call_id"] not in call_ids:
            raise InvalidParameter(
                f"input.{index}.call_id", "no call with this call_id comes before it"
            )


def _is_assistants(item: Item) -> bool:
    return item["type"] == "reasoning" or is_call(item) or item.get("role") == "assistant"


def _fits(turn: dict[str, Any], item: Item) -> bool:
    """Thoughts come first, then one message, then any number of calls."""
    if is_call(item):
        return True
    if item["type"] == "message":
        return not turn["content"] and "tool_calls" not in turn
    return turn.keys() == {"role", "content"} and not turn["content"]


def _add(turn: dict[str, Any], item: Item) -> None:
    if item["type"] == "message":
        turn["content"] = _content(item["content"])
    elif item["type"] == "reasoning":
        if thought := _thought(item):
            turn["reasoning_content"] = thought
    else:
        function = function_call(item)._asdict()
        calls = turn.setdefault("tool_calls", [])
        if len(calls) == MAX_CALLS or any(call["id"] == item["call_id"] for call in calls):
            raise InvalidParameter(
                "input", f"calls in one turn have distinct ids, and are at most {MAX_CALLS}"
            )
        calls.append({"id": item["call_id"], "type": "function", "function": function})


def _thought(item: Item) -> str:
    """Returns the text of a reasoning item: its own, else what this service has encoded, else a
    summary of it."""
    parts = item.get("content")
    if not parts and "encrypted_content" in item:
        return decoded_content(item["encrypted_content"]) or ""
    return "\n".join(part["text"] for part in parts or item["summary"])


def _message(item: Item, names: dict[str, str], found: str | None) -> dict[str, Any]:
    if item["type"] == "message":
        role = "system" if item["role"] == "developer" else item["role"]
        return {"role": role, "content": _content(item["content"])}
    if item["type"] == "compaction":
        summary = decoded_content(item["encrypted_content"]) or ""
        return {"role": "user", "content": f"{SUMMARY_OPENING}\n{summary}"}
    return {
        "role": "tool",
        "content": _content(call_output(item) if found is None else found),
        "tool_call_id": item["call_id"],
        "name": names[item["call_id"]],  # see `check_calls`
    }


def _content(content: str | Sequence[Item]) -> str | list[dict[str, str]]:
    """Returns text, or text parts where there are several."""
    if isinstance(content, str):
        return content
    texts = [part["refusal"] if part["type"] == "refusal" else part["text"] for part in content]
    if len(texts) == 1:
        return str(texts[0])
    return [{"type": "text", "text": text} for text in texts]
