"""Input items: their JSON, and the form in which they are kept and shown.

An item gets an id of this response (`<kind>_<job id>_in<n>`); what a client calls it is not kept,
since the same item may come back in any number of responses. An item that a request refers to is
kept as a copy: it lasts as long as the response, whatever becomes of its source.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired, cast

from pydantic import BeforeValidator, ConfigDict, Field, with_config
from typing_extensions import TypedDict

from api.dialects.responses.call_items import (
    KEPT_MEMBERS,
    InputCallItem,
    InputTextPart,
    ItemT,
    NonEmpty,
    Status,
)
from api.dialects.responses.calls import Item
from api.dialects.responses.tools import left_out_of, tool_payload
from api.generation.messages import (
    MAX_MESSAGES,
    MEDIA_KINDS,
    MEMBERS,
    PartCount,
    left_out_part,
    without_nulls,
)
from api.ids import item_id
from api.request_errors import input_not_supported, unsupported
from shared.messages import InvalidParameter

MAX_ITEMS = MAX_MESSAGES
COMPACTION_TRIGGER = "compaction_trigger"
REFERENCE = "item_reference"
_PARTS = ("content", "output", "summary")  # members of items that have parts
_OBJECTS = ("action", "operation")
# Items of tools that OpenAI runs, and unknown ones: the conversation is complete without them.
HOSTED_ITEMS = (
    *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call"),
    *("computer_call", "computer_call_output", "program", "program_output"),
    *("mcp_list_tools", "mcp_call", "mcp_approval_request", "mcp_approval_response"),
    "configuration_update",
)
_Hosted = Literal[HOSTED_ITEMS]  # type: ignore[valid-type]
PREFIXES = {  # type of an item -> its id's prefix
    "message": "msg",
    "reasoning": "rs",
    "compaction": "cmp",
    **{kind: prefix for kind, (prefix, _) in KEPT_MEMBERS.items()},
}

_List = Annotated[list[ItemT], Field(fail_fast=True)]


@with_config(MEMBERS)
class InputRefusalPart(TypedDict):
    """A refusal of the assistant."""

    type: Literal["refusal"]
    refusal: str


_MessagePart = Annotated[InputTextPart | InputRefusalPart, Field(discriminator="type")]


@with_config(MEMBERS)
class SummaryPart(TypedDict):
    """A part of a summary of reasoning."""

    type: Literal["summary_text"]
    text: str


@with_config(MEMBERS)
class ReasoningPart(TypedDict):
    """A part of a reasoning."""

    type: Literal["reasoning_text"]
    text: str


@with_config(MEMBERS)
class InputMessage(TypedDict):
    """A message; items without a type are messages."""

    type: NotRequired[Literal["message"]]
    id: NotRequired[str]
    status: NotRequired[Status]
    role: Literal["user", "system", "developer", "assistant"]
    content: str | NonEmpty[_MessagePart]
    phase: NotRequired[Any]  # of the assistant's messages


@with_config(MEMBERS)
class InputReasoning(TypedDict):
    """What the model thought in an earlier turn."""

    type: Literal["reasoning"]
    id: NotRequired[str]
    status: NotRequired[Status]
    summary: NotRequired[_List[SummaryPart]]
    content: NotRequired[_List[ReasoningPart]]
    encrypted_content: NotRequired[str]


@with_config(MEMBERS)
class InputCompaction(TypedDict):
    """The summary of what came before it."""

    type: Literal["compaction"]
    id: NotRequired[str]
    encrypted_content: str
    created_by: NotRequired[Any]


@with_config(MEMBERS)
class InputCompactionTrigger(TypedDict):
    """Asks for a summary of what came before it, as the response."""

    type: Literal["compaction_trigger"]
    id: NotRequired[str]


@with_config(MEMBERS)
class InputReference(TypedDict):
    """An item of a stored response, by its id; an item with only an `id` is one."""

    type: NotRequired[Literal["item_reference"]]
    id: str


@with_config(ConfigDict(extra="allow", strict=True))
class InputHosted(TypedDict):
    """An item of a hosted tool: it is left out."""

    type: _Hosted


InputItem = Annotated[
    InputMessage
    | InputReasoning
    | InputCompaction
    | InputCompactionTrigger
    | InputReference
    | InputCallItem
    | InputHosted,
    Field(discriminator="type"),
]


def _present_items(payload: object) -> object:
    """Returns the items without null members, each with its type. Raises InvalidParameter for more
    items or parts than are allowed, and for parts of a message that are not text."""
    if not isinstance(payload, list):
        return payload
    if not 0 < len(payload) <= MAX_ITEMS:
        raise InvalidParameter("input", f"must have 1 to {MAX_ITEMS} items")
    count = PartCount("input")
    for item in payload:
        count.add(item, *_PARTS)
    return [_present(item, f"input.{index}") for index, item in enumerate(payload)]


def _present(item: object, path: str) -> object:
    if not isinstance(item, dict):
        return item
    present: Item = {"type": "message"}
    for name, member in item.items():
        if name in _PARTS and isinstance(member, list):
            present[name] = [without_nulls(part) for part in member]
        elif name in _OBJECTS:
            present[name] = without_nulls(member)
        elif member is not None:
            present[name] = member
    if present.keys() == {"type", "id"} and item.get("type") is None:
        present["type"] = REFERENCE
    if present["type"] == "message":
        _check_is_text(present.get("content"), f"{path}.content")
    return present


def _check_is_text(content: object, path: str) -> None:
    for index, part in enumerate(content if isinstance(content, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in MEDIA_KINDS:
            raise input_not_supported(f"{path}.{index}", MEDIA_KINDS[kind])


def left_out_items(payload: str | Sequence[InputItem]) -> Iterator[str]:
    """Yields the names of what the model does not see of an input."""
    for item in () if isinstance(payload, str) else cast(Sequence[Item], payload):
        kind, content = item["type"], item.get("encrypted_content")
        if is_left_out(item):
            yield f"input.{kind}"
        elif isinstance(content, str) and decoded_content(content) is None:
            yield "input.encrypted_content"
        elif "tools" in item:
            yield from left_out_of(item["tools"], "tools")
        parts = item.get("output")
        for part in parts if isinstance(parts, list) else ():
            if part.get("type") in MEDIA_KINDS:
                yield f"input.output.{part['type']}"


def is_left_out(item: Item) -> bool:
    """Returns whether an item is of a tool that OpenAI runs, or can only be read by its maker."""
    if item["type"] == "tool_search_call":
        return item.get("execution") != "client" or "call_id" not in item
    if item["type"] == "compaction":
        return decoded_content(item["encrypted_content"]) is None
    return item["type"] in HOSTED_ITEMS


ResponseInput = Annotated[
    str | Annotated[list[InputItem], Field(fail_fast=True)], BeforeValidator(_present_items)
]


def references(payload: str | Sequence[InputItem]) -> list[str]:
    """Returns the ids of the items that an input refers to, each as often as it does."""
    items = () if isinstance(payload, str) else cast(Sequence[Item], payload)
    return [item["id"] for item in items if item["type"] == REFERENCE]


NO_ITEMS: Mapping[str, Item] = {}


def input_items(
    payload: str | Sequence[InputItem], job_id: str, referenced: Mapping[str, Item] = NO_ITEMS
) -> list[Item]:
    """Returns the items of a request's `input` as they are kept. `referenced`: kept items of stored
    responses by their ids, all that the input refers to. Raises InvalidParameter."""
    if isinstance(payload, str):
        payload = [{"type": "message", "role": "user", "content": payload}]
    call_ids: dict[str, str] = {}  # id of an item -> id of its call
    items: list[Item] = []
    for index, item in enumerate(cast(Sequence[Item], payload)):
        if is_left_out(item) or item["type"] == COMPACTION_TRIGGER:
            continue
        source = referenced[item["id"]] if item["type"] == REFERENCE else item
        kind = source["type"]
        own_id = item_id(PREFIXES[kind], job_id, index, is_input=True)
        if source is item:
            kept = _kept(item, f"input.{index}", call_ids)
            items.append({"id": own_id, "type": kind, "status": "completed", **kept})
        else:
            items.append({**source, "id": own_id})
        if kind == "local_shell_call":
            call_ids[item.get("id", "")] = source["call_id"]
    return items


def _kept(item: Item, path: str, call_ids: dict[str, str]) -> Item:
    """Returns the kept members of an item, without its labels."""
    if item["type"] == "message":
        return _message(item, path)
    if item["type"] == "reasoning":
        kept: Item = {"summary": item.get("summary", []), "content": item.get("content", [])}
        if decoded_content(item.get("encrypted_content", "")) is not None:
            kept["encrypted_content"] = item["encrypted_content"]
        return kept
    if item["type"] == "compaction":
        return {"encrypted_content": item["encrypted_content"]}
    _, members = KEPT_MEMBERS[item["type"]]
    kept = {name: value for name, value in item.items() if name in members}
    if item["type"] in ("function_call_output", "custom_tool_call_output"):
        if not isinstance(kept["output"], str):
            texts = [
                part["text"] if "text" in part else left_out_part(MEDIA_KINDS[part["type"]])
                for part in kept["output"]
            ]
            kept["output"] = [{"type": "input_text", "text": text} for text in texts]
    elif item["type"] == "local_shell_call_output" and "call_id" not in kept:
        kept["call_id"] = call_ids.get(item.get("id", ""), item.get("id", ""))
    elif "tools" in kept:
        kept["tools"] = [tool_payload(tool) for tool in kept["tools"]]
    return kept


def _message(item: Item, path: str) -> Item:
    role, content = item["role"], item["content"]
    is_assistants = role == "assistant"
    if "phase" in item and not is_assistants:
        raise InvalidParameter(f"{path}.phase", "is a member of the assistant's messages")
    if isinstance(content, str):
        content = [{"type": "input_text", "text": content}]
    parts: list[Item] = []
    for index, part in enumerate(content):
        if part["type"] == "refusal":
            if not is_assistants:
                raise unsupported(f"{path}.content.{index}.type", "only text is served")
            parts.append(dict(part))
        elif is_assistants:
            parts.append({"type": "output_text", "text": part["text"], "annotations": []})
        else:
            parts.append({"type": "input_text", "text": part["text"]})
    return {"role": role, "content": parts}


# Items in pages, as OpenAI lists them: newest first by default.

Order = Literal["desc", "asc"]


def items_of_page(items: Sequence[Item], order: Order, after: str | None, limit: int) -> list[Item]:
    """Returns the items of a page, and one more where there are more. Raises InvalidParameter."""
    ordered = list(items) if order == "asc" else list(reversed(items))
    begin = _behind(ordered, after)
    return ordered[begin : begin + limit + 1]


def _behind(items: Sequence[Item], item_id: str | None) -> int:
    if item_id is None:
        return 0
    for index, item in enumerate(items):
        if item["id"] == item_id:
            return index + 1
    raise InvalidParameter("after", "must be the id of an item of this list")


# Content that only this service reads: encoded, since clients must not rely upon it. Not encrypted,
# as there is no secret in it: it is what the model wrote to this client.

_OWN = "penstock1."


def encoded_content(text: str) -> str:
    """Returns the `encrypted_content` that stands for a text."""
    raw = text.encode(errors="replace")
    return _OWN + base64.urlsafe_b64encode(raw).decode()


def decoded_content(content: str) -> str | None:
    """Returns the text of an `encrypted_content`; None where another service made it."""
    if not content.startswith(_OWN):
        return None
    try:
        return base64.urlsafe_b64decode(content.removeprefix(_OWN).encode()).decode()
    except (binascii.Error, ValueError):
        return None
