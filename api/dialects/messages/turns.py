"""From the messages of a Messages request to those that chat templates know.

The differences: a `tool_result` is a separate message (role `tool`), with the name of the
tool that was called; the result of a call that failed begins with `Error: `, since templates know
no `is_error`; messages of one role in a row are one turn; a summary replaces all that
comes before it. Documents and search results are text. An image, or a document that is not text,
becomes a text that names it if a tool returned it, and is refused if the user sent it. Other
blocks in a message with tool results belong to these: agents put them there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from api.dialects.messages.blocks import (
    AssistantMessage,
    BrowserStateBlock,
    CompactionBlock,
    ContentSource,
    DocumentBlock,
    DroppedBlock,
    FileSource,
    ImageBlock,
    Message,
    SearchResultBlock,
    SystemMessage,
    TextBlock,
    ThinkingBlock,
    ToolAdditionBlock,
    ToolNameReference,
    ToolReferenceBlock,
    ToolRemovalBlock,
    ToolResultBlock,
    ToolUseBlock,
    UserMessage,
    last_summary,
)
from api.dialects.messages.offered_tools import OfferedTools, added_name
from api.generation.messages import MAX_CALLS, left_out_part
from api.request_errors import image_not_supported, input_not_supported
from shared.messages import InvalidParameter

_THOUGHTS = "reasoning_content"
FAILED_PREFIX = "Error: "  # of the result of a call that failed

Content = str | list[dict[str, str]]
_Readable = TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | BrowserStateBlock


@dataclass(frozen=True, slots=True)
class _Seen:
    """The state that earlier blocks have set."""

    tools: OfferedTools
    names: dict[str, str] = field(default_factory=dict)  # id of a call -> name of its tool


def turns(messages: Sequence[Message], tools: OfferedTools) -> Iterator[dict[str, Any]]:
    """Yields the messages as templates know them, once. CPU-bound for long conversations.

    Raises InvalidParameter.
    """
    turn: dict[str, Any] | None = None
    for part in _all_parts(messages, _Seen(tools)):
        if turn is not None and _same_turn(turn, part):
            _join(turn, part)
            continue
        if turn is not None:
            yield _whole(turn)
        turn = part
    if turn is not None:
        yield _whole(turn)


def text_content(content: str | Sequence[TextBlock]) -> Content:
    """Returns text, or text parts."""
    if isinstance(content, str):
        return content
    return [_part(block.text) for block in content]


def _all_parts(messages: Sequence[Message], seen: _Seen) -> Iterator[dict[str, Any]]:
    first, begin, summary = last_summary(messages)
    if summary is not None:
        yield {"role": "user", "content": [_part(summary)]}
    last_user = max(
        (index for index, message in enumerate(messages) if isinstance(message, UserMessage)),
        default=-1,
    )
    for index, message in enumerate(messages[first:], start=first):
        if isinstance(message, SystemMessage):
            if not message.content and message.output_config is None:
                raise InvalidParameter(f"messages.{index}.content", "must not be empty")
            is_over = message.clear_at == "next_user_message" and index < last_user
            content = _system(message, seen.tools, is_over=is_over)
            if content:
                yield {"role": "system", "content": content}
        else:
            yield from _parts(message, f"messages.{index}", begin if index == first else 0, seen)


def _system(message: SystemMessage, tools: OfferedTools, *, is_over: bool) -> Content:
    """Returns the texts of a late system message; of one that is over, the changes of the tools."""
    if isinstance(message.content, str):
        return "" if is_over else message.content
    texts = []
    for block in message.content:
        match block:
            case TextBlock(text=text):
                texts += [] if is_over else [text]
            case ToolAdditionBlock():
                name = added_name(block)
                texts += [] if name is None else [tools.found(name)]
            case ToolRemovalBlock(tool=ToolNameReference(name=name)):
                texts.append(f"The tool '{name}' is no longer available.")
    return [_part(text) for text in texts]


def _parts(
    message: UserMessage | AssistantMessage, path: str, begin: int, seen: _Seen
) -> Iterator[dict[str, Any]]:
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
        return
    if not message.content:
        raise InvalidParameter(f"{path}.content", "must not be empty")
    if isinstance(message, AssistantMessage):
        yield from _assistant(message.content[begin:], f"{path}.content", begin, seen)
    else:
        yield from _user(message.content[begin:], f"{path}.content", begin, seen)


def _user(blocks: Sequence[Any], path: str, begin: int, seen: _Seen) -> Iterator[dict[str, Any]]:
    is_own = not any(isinstance(block, ToolResultBlock) for block in blocks)
    for index, block in enumerate(blocks, start=begin):
        if isinstance(block, ToolResultBlock):
            yield _tool_result(block, f"{path}.{index}", seen)
        elif not isinstance(block, DroppedBlock | CompactionBlock):
            own_path = f"{path}.{index}" if is_own else None
            yield {"role": "user", "content": [_part(_read(block, own_path))]}


def _tool_result(block: ToolResultBlock, path: str, seen: _Seen) -> dict[str, Any]:
    name = seen.names.get(block.tool_use_id)
    if name is None:
        raise InvalidParameter(
            f"{path}.tool_use_id", "must be the id of a tool_use in an earlier message"
        )
    content: Content
    if isinstance(block.content, list):
        content = [
            _part(
                seen.tools.found(inner.tool_name)
                if isinstance(inner, ToolReferenceBlock)
                else _read(inner, None)
            )
            for inner in block.content
        ] or ""
    else:
        content = block.content or ""
    if block.is_error:
        if isinstance(content, str):
            content = FAILED_PREFIX + content
        else:
            content = [_part(FAILED_PREFIX + content[0]["text"]), *content[1:]]
    return {"role": "tool", "tool_call_id": block.tool_use_id, "name": name, "content": content}


def _read(block: _Readable, own_path: str | None) -> str:
    """Returns a block as text. `own_path`: the path of a block of the user's own, of which nothing
    is left out. Raises InvalidParameter."""
    match block:
        case TextBlock(text=text):
            return text
        case SearchResultBlock():
            texts = [part.text for part in block.content]
            return "\n".join([block.title, block.source, *texts])
        case DocumentBlock():
            shown = [text for text in (block.title, block.context) if text]
            return "\n".join([*shown, _document(block, own_path)])
        case ImageBlock() if own_path is not None:
            raise image_not_supported(own_path)
        case ImageBlock() | BrowserStateBlock():
            return left_out_part(block.type.replace("_", " "))


def _document(block: DocumentBlock, own_path: str | None) -> str:
    source = block.source
    if isinstance(source, FileSource):
        if own_path is not None:
            raise input_not_supported(own_path, "PDF")
        return left_out_part("document")
    if not isinstance(source, ContentSource):
        return source.data
    if isinstance(source.content, str):
        return source.content
    inner = own_path and f"{own_path}.source.content"
    return "\n".join(
        _read(part, inner and f"{inner}.{index}") for index, part in enumerate(source.content)
    )


def _assistant(
    blocks: Sequence[Any], path: str, begin: int, seen: _Seen
) -> Iterator[dict[str, Any]]:
    turn: dict[str, Any] = {"role": "assistant"}
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(blocks, start=begin):
        if isinstance(block, TextBlock | ImageBlock | DocumentBlock | SearchResultBlock):
            texts.append(_part(_read(block, None)))
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            if block.id in seen.names:
                raise InvalidParameter(f"{path}.{index}.id", "must be unique")
            seen.names[block.id] = block.name
            calls.append(_call(block))
    if texts:
        turn["content"] = texts
    if thoughts:
        turn[_THOUGHTS] = thoughts  # a list until the turn is whole
    if calls:
        turn["tool_calls"] = calls
    if len(turn) > 1:
        yield turn


def _call(block: ToolUseBlock) -> dict[str, Any]:
    # With the spaces that models write: the client has an object, and no text of it.
    arguments = json.dumps(block.input, ensure_ascii=False)
    function = {"name": block.name, "arguments": arguments}
    return {"id": block.id, "type": "function", "function": function}


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _same_turn(turn: dict[str, Any], part: dict[str, Any]) -> bool:
    role: str = turn["role"]
    return role != "tool" and role == part["role"]


def _join(turn: dict[str, Any], part: dict[str, Any]) -> None:
    """Extends `turn` in place: the work for a turn is linear in its blocks."""
    if "content" in turn:
        turn["content"] = _as_parts(turn["content"])
    if "content" in part:
        turn.setdefault("content", []).extend(_as_parts(part["content"]))
    if _THOUGHTS in part:
        turn.setdefault(_THOUGHTS, []).extend(part[_THOUGHTS])
    if "tool_calls" in part:
        turn.setdefault("tool_calls", []).extend(part["tool_calls"])


def _whole(turn: dict[str, Any]) -> dict[str, Any]:
    if len(turn.get("tool_calls", ())) > MAX_CALLS:
        raise InvalidParameter("messages", f"at most {MAX_CALLS} tool_use blocks in one turn")
    if _THOUGHTS in turn:
        turn[_THOUGHTS] = "\n".join(turn[_THOUGHTS])
    return {"role": turn["role"], "content": "", **turn}


def _as_parts(content: Content) -> list[dict[str, str]]:
    return [_part(content)] if isinstance(content, str) else content
