"""Input items: their JSON, and the form in which they are kept and shown.

An item gets an id of this response (`<kind>_<job id>_in<n>`); what a client calls it is not kept,
since the same item may come back in any number of responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NotRequired, TypeVar

from pydantic import BeforeValidator, Field, with_config
from typing_extensions import TypedDict

from api.errors import unsupported
from api.generation.messages import MAX_MESSAGES, MEMBERS, PartCount, without_nulls
from shared.messages import InvalidParameter

Item = dict[str, Any]
ItemT = TypeVar("ItemT")

MAX_ITEMS = MAX_MESSAGES
_PARTS = ("content", "output", "summary")  # members of items that have parts
_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}

_Status = Literal["in_progress", "completed", "incomplete"]
_NonEmpty = Annotated[list[ItemT], Field(fail_fast=True, min_length=1)]
_List = Annotated[list[ItemT], Field(fail_fast=True)]


@with_config(MEMBERS)
class InputTextPart(TypedDict):
    """Text. The SDKs send the parts of an output back with the other members."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: NotRequired[Any]
    logprobs: NotRequired[Any]
    parsed: NotRequired[Any]


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

    type: Literal["message"]
    id: NotRequired[str]
    status: NotRequired[_Status]
    role: Literal["user", "system", "developer", "assistant"]
    content: str | _NonEmpty[_MessagePart]
    phase: NotRequired[Any]  # of the assistant's messages


@with_config(MEMBERS)
class InputFunctionCall(TypedDict):
    """A call of a function by the model."""

    type: Literal["function_call"]
    id: NotRequired[str]
    status: NotRequired[_Status]
    call_id: str
    name: str
    arguments: str
    parsed_arguments: NotRequired[Any]


@with_config(MEMBERS)
class InputFunctionCallOutput(TypedDict):
    """The result of a call."""

    type: Literal["function_call_output"]
    id: NotRequired[str]
    status: NotRequired[_Status]
    call_id: str
    output: str | _NonEmpty[InputTextPart]


@with_config(MEMBERS)
class InputReasoning(TypedDict):
    """What the model thought in an earlier turn."""

    type: Literal["reasoning"]
    id: NotRequired[str]
    status: NotRequired[_Status]
    summary: NotRequired[_List[SummaryPart]]
    content: NotRequired[_List[ReasoningPart]]


InputItem = Annotated[
    InputMessage | InputFunctionCall | InputFunctionCallOutput | InputReasoning,
    Field(discriminator="type"),
]


def _present_items(payload: object) -> object:
    """Returns the items without null members, each with its type. Raises InvalidParameter for more
    items or parts than are allowed."""
    if not isinstance(payload, list):
        return payload
    if not 0 < len(payload) <= MAX_ITEMS:
        raise InvalidParameter("input", f"must have 1 to {MAX_ITEMS} items")
    count = PartCount("input")
    for item in payload:
        count.add(item, *_PARTS)
    return [_present(item) for item in payload]


def _present(item: object) -> object:
    if not isinstance(item, dict):
        return item
    present: Item = {"type": "message"}
    for name, member in item.items():
        if name in _PARTS and isinstance(member, list):
            present[name] = [without_nulls(part) for part in member]
        elif member is not None:
            present[name] = member
    return present


ResponseInput = Annotated[
    str | Annotated[list[InputItem], Field(fail_fast=True)], BeforeValidator(_present_items)
]


def input_items(payload: str | Sequence[InputItem], job_id: str) -> list[Item]:
    """Returns the items of a request's `input` as they are kept. Raises InvalidParameter."""
    if isinstance(payload, str):
        payload = [{"type": "message", "role": "user", "content": payload}]
    return [
        {
            "id": f"{_PREFIXES[item['type']]}_{job_id}_in{index}",
            "type": item["type"],
            "status": "completed",
            **_kept(item, f"input.{index}"),
        }
        for index, item in enumerate(payload)
    ]


def _kept(item: InputItem, path: str) -> Item:
    """Returns what is kept of an item, beside its labels."""
    if item["type"] == "message":
        return _message(item, path)
    if item["type"] == "function_call":
        return {name: item[name] for name in ("call_id", "name", "arguments")}
    if item["type"] == "function_call_output":
        output = item["output"]
        if not isinstance(output, str):
            output = [{"type": "input_text", "text": part["text"]} for part in output]
        return {"call_id": item["call_id"], "output": output}
    return {"summary": item.get("summary", []), "content": item.get("content", [])}


def _message(item: InputMessage, path: str) -> Item:
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
