"""Input items: checked, and brought to the form in which they are kept and shown.

An item gets an id of this response (`<kind>_<job id>_in<n>`); what a client calls it is not kept,
since the same item may come back in any number of responses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from api.errors import (
    MAX_ECHO_CHARS,
    missing_parameter,
    unknown_parameter,
    unsupported,
)
from api.generation.messages import MAX_MESSAGES, PartCount
from api.http.pagination import Page
from shared.messages import InvalidParameter

Item = dict[str, Any]

MAX_ITEMS = MAX_MESSAGES
ROLES = ("user", "system", "developer", "assistant")
STATUSES = ("in_progress", "completed", "incomplete")

_TEXT_PARTS = frozenset({"input_text", "output_text"})
_LISTS = ("content", "output", "summary")  # members of items that have parts
_LABELS = frozenset({"id", "type", "status"})  # of any item; accepted, and not kept


def input_items(payload: str | Sequence[Any], job_id: str) -> list[Item]:
    """The items of a request's `input`, in order. Raises InvalidParameter."""
    if isinstance(payload, str):
        payload = [{"role": "user", "content": payload}]
    if not 0 < len(payload) <= MAX_ITEMS:
        raise InvalidParameter("input", f"must have 1 to {MAX_ITEMS} items")
    count = PartCount("input")
    for item in payload:
        count.add(item, *_LISTS)
    return [
        _item(item, f"input.{index}", f"{job_id}_in{index}") for index, item in enumerate(payload)
    ]


def _item(item: object, path: str, name: str) -> Item:
    present = _present(item, path)
    kind = present.get("type", "message")
    if not isinstance(kind, str):
        raise InvalidParameter(f"{path}.type", "must be a string")
    known = _KINDS.get(kind)
    if known is None:
        raise unsupported(f"{path}.type", f"items of type '{kind[:MAX_ECHO_CHARS]}' are not served")
    _text(present, "id", path, default="")
    if present.get("status", "completed") not in STATUSES:
        raise InvalidParameter(f"{path}.status", f"must be one of {', '.join(STATUSES)}")
    prefix, read = known
    return {"id": f"{prefix}_{name}", "type": kind, "status": "completed", **read(present, path)}


def _message(item: Mapping[str, Any], path: str) -> Item:
    _only(item, path, "role", "content", "phase")
    role = _text(item, "role", path)
    if role not in ROLES:
        raise InvalidParameter(f"{path}.role", f"must be one of {', '.join(ROLES)}")
    is_ours = role == "assistant"
    if "phase" in item and not is_ours:
        raise InvalidParameter(f"{path}.phase", "is a member of the assistant's messages")
    content = _given(item, "content", path)
    if isinstance(content, str):
        content = [{"type": "output_text" if is_ours else "input_text", "text": content}]
    if not isinstance(content, list) or not content:
        raise InvalidParameter(f"{path}.content", "must be a string or a list of parts")
    parts = [_part(part, f"{path}.content.{n}", is_ours=is_ours) for n, part in enumerate(content)]
    return {"role": role, "content": parts}


def _part(part: object, path: str, *, is_ours: bool) -> Item:
    present = _present(part, path)
    kind = _text(present, "type", path)
    if kind in _TEXT_PARTS:
        # The SDKs send the parts of an answer back with what they do not say anything by.
        _only(present, path, "text", "annotations", "logprobs", "parsed")
        text = _text(present, "text", path)
        if is_ours:
            return {"type": "output_text", "text": text, "annotations": []}
        return {"type": "input_text", "text": text}
    if kind == "refusal" and is_ours:
        _only(present, path, "refusal")
        return {"type": "refusal", "refusal": _text(present, "refusal", path)}
    what = "text and refusals" if is_ours else "text"
    raise unsupported(
        f"{path}.type", f"parts of type '{kind[:MAX_ECHO_CHARS]}' are not served, only {what}"
    )


def _function_call(item: Mapping[str, Any], path: str) -> Item:
    _only(item, path, "call_id", "name", "arguments", "parsed_arguments")
    names = ("call_id", "name", "arguments")
    return {name: _text(item, name, path) for name in names}


def _function_call_output(item: Mapping[str, Any], path: str) -> Item:
    _only(item, path, "call_id", "output")
    output = _given(item, "output", path)
    if isinstance(output, list):
        output = [_part(part, f"{path}.output.{n}", is_ours=False) for n, part in enumerate(output)]
    elif not isinstance(output, str):
        raise InvalidParameter(f"{path}.output", "must be a string or a list of parts")
    return {"call_id": _text(item, "call_id", path), "output": output}


def _reasoning(item: Mapping[str, Any], path: str) -> Item:
    if "encrypted_content" in item:
        raise unsupported(f"{path}.encrypted_content", "it can be read by its maker only")
    _only(item, path, "summary", "content")
    kept: Item = {}
    for member, kind in (("summary", "summary_text"), ("content", "reasoning_text")):
        parts = item.get(member, [])
        if not isinstance(parts, list):
            raise InvalidParameter(f"{path}.{member}", "must be a list of parts")
        kept[member] = [
            _reasoning_part(part, f"{path}.{member}.{n}", kind) for n, part in enumerate(parts)
        ]
    return kept


def _reasoning_part(part: object, path: str, kind: str) -> Item:
    present = _present(part, path)
    if _text(present, "type", path) != kind:
        raise InvalidParameter(f"{path}.type", f"must be '{kind}'")
    _only(present, path, "text")
    return {"type": kind, "text": _text(present, "text", path)}


# type -> prefix of its ids, how the rest of it is read
_KINDS: Mapping[str, tuple[str, Callable[[Mapping[str, Any], str], Item]]] = {
    "message": ("msg", _message),
    "function_call": ("fc", _function_call),
    "function_call_output": ("fco", _function_call_output),
    "reasoning": ("rs", _reasoning),
}


def _present(value: object, path: str) -> Mapping[str, Any]:
    """An object's members that are not null."""
    if not isinstance(value, dict):
        raise InvalidParameter(path, "must be an object")
    return {name: member for name, member in value.items() if member is not None}


def _only(item: Mapping[str, Any], path: str, *names: str) -> None:
    for name in item:
        if name not in names and name not in _LABELS:
            raise unknown_parameter(f"{path}.{name}")


def _given(item: Mapping[str, Any], name: str, path: str) -> Any:
    if name not in item:
        raise missing_parameter(f"{path}.{name}")
    return item[name]


def _text(item: Mapping[str, Any], name: str, path: str, *, default: str | None = None) -> str:
    value = item.get(name, default) if default is not None else _given(item, name, path)
    if not isinstance(value, str):
        raise InvalidParameter(f"{path}.{name}", "must be a string")
    return value


# Items in pages, as OpenAI lists them: newest first by default.

DEFAULT_LIMIT = 20
MAX_LIMIT = 100
ORDERS = ("desc", "asc")


def items_of_page(items: Sequence[Item], order: str, page: Page) -> list[Item]:
    """One more than `page.limit` where there are more. Raises InvalidParameter."""
    if order not in ORDERS:
        raise InvalidParameter("order", f"must be one of {', '.join(ORDERS)}")
    ordered = list(items) if order == "asc" else list(reversed(items))
    begin = _behind(ordered, page.after)
    return ordered[begin : begin + page.limit + 1]


def _behind(items: Sequence[Item], item_id: str | None) -> int:
    if item_id is None:
        return 0
    for index, item in enumerate(items):
        if item["id"] == item_id:
            return index + 1
    raise InvalidParameter("after", "must be the id of an item of this list")
