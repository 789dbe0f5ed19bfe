"""The conversation of a chat request: its JSON, and the form of it that chat templates know."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, NotRequired

from pydantic import BeforeValidator, ConfigDict, Field, with_config
from typing_extensions import TypedDict

from api.generation.protocol import MAX_ENTRIES
from api.on_demand import load_part
from api.request_errors import input_not_supported, missing_parameter, unsupported
from shared.messages import InvalidParameter

MAX_MESSAGES = 10_000
MAX_PARTS = 10_000  # content parts and calls of all messages of a request together
MAX_CALLS = 128  # in one message

# Members that Anthropic's clients and LiteLLM add to a history; none changes a prompt.
_UNUSED = frozenset({"cache_control", "provider_specific_fields"})


# Typed dictionaries, as templates take them: a third of the cost of models.
def _describe_accepted(schema: dict[str, Any]) -> None:
    """Changes the JSON schema of an object of a conversation to that of its accepted values: null
    and empty members, and members without effect. An item without a type is a message."""
    properties, required = schema["properties"], schema.get("required", [])
    if properties.get("type", {}).get("const") == "message" and "type" in required:
        required.remove("type")
    for name in properties.keys() - set(required):
        properties[name] = load_part("request_schemas").or_null(properties[name])
    for name in sorted(_UNUSED):
        properties.setdefault(name, {"description": "Accepted without effect."})
    schema["additionalProperties"] = {"enum": [None, []]}


MEMBERS = ConfigDict(extra="forbid", strict=True, json_schema_extra=_describe_accepted)


@with_config(MEMBERS)
class ChatTextPart(TypedDict):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


@with_config(MEMBERS)
class ChatRefusalPart(TypedDict):
    """A part of an assistant's message: it is shown to the template as text."""

    type: Literal["refusal"]
    refusal: str


@with_config(MEMBERS)
class ChatCallFunction(TypedDict):
    """A function that was called. `arguments` is the JSON text of an object."""

    name: str
    arguments: str
    parsed_arguments: NotRequired[Any]


@with_config(MEMBERS)
class ChatCall(TypedDict):
    """A call of an earlier turn. `index` is where it came in a stream."""

    id: str
    type: NotRequired[Literal["function"]]
    function: ChatCallFunction
    index: NotRequired[Any]


@with_config(ConfigDict(extra="ignore", strict=True))
class ChatMediaPart(TypedDict):
    """A part of a tool's result, or of an earlier answer, that is not text. It is left out, and the
    template is given a text that names it."""

    type: Literal[
        "image_url",
        "input_image",
        "image",
        "input_audio",
        "audio_url",
        "audio",
        "video_url",
        "input_video",
        "video",
        "file",
        "input_file",
        "document",
    ]


_TextParts = Annotated[list[ChatTextPart], Field(fail_fast=True, min_length=1)]
_ToolPart = Annotated[ChatTextPart | ChatMediaPart, Field(discriminator="type")]
_ToolParts = Annotated[list[_ToolPart], Field(fail_fast=True, min_length=1)]
_AssistantPart = Annotated[
    ChatTextPart | ChatRefusalPart | ChatMediaPart, Field(discriminator="type")
]


@with_config(MEMBERS)
class ChatTextMessage(TypedDict):
    """Instructions, or a turn of the user. Templates know `developer` as `system`."""

    role: Literal["system", "developer", "user"]
    content: str | _TextParts
    name: NotRequired[str]


@with_config(MEMBERS)
class ChatAssistantMessage(TypedDict):
    """An earlier turn of the model. It has content, calls or a refusal."""

    role: Literal["assistant"]
    content: NotRequired[str | Annotated[list[_AssistantPart], Field(fail_fast=True)]]
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]  # another name of `reasoning_content`
    tool_calls: NotRequired[Annotated[list[ChatCall], Field(fail_fast=True, max_length=MAX_CALLS)]]
    refusal: NotRequired[str]
    name: NotRequired[str]
    parsed: NotRequired[Any]


@with_config(MEMBERS)
class ChatToolMessage(TypedDict):
    """The result of a call of an earlier message."""

    role: Literal["tool"]
    content: str | _ToolParts
    tool_call_id: str
    name: NotRequired[str]


ChatMessage = Annotated[
    ChatTextMessage | ChatAssistantMessage | ChatToolMessage, Field(discriminator="role")
]

# type of a part that is not text -> its name
MEDIA_KINDS = {
    "image_url": "image",
    "input_image": "image",
    "image": "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "audio": "audio",
    "video_url": "video",
    "input_video": "video",
    "video": "video",
    "file": "file",
    "input_file": "file",
    "document": "document",
}

# param -> why a value of it is not served
UNSERVED_MESSAGES = (
    (
        re.compile(r"messages\.\d+\.content\.\d+\.type"),
        "messages have parts of type 'text'; other content of tools' results is left out",
    ),
    (
        re.compile(r"messages\.\d+\.tool_calls\.\d+\.type"),
        "only calls of type 'function' are known",
    ),
)


def left_out_part(kind: str) -> str:
    """Returns the text that stands for a part of another kind."""
    return f"[{kind} left out: this model does not support {kind} input]"


class PartCount:
    """Counts the parts of a conversation, in any dialect. `param` is the member that has them."""

    def __init__(self, param: str) -> None:
        self._param = param
        self._count = 0

    def add(self, value: object, *members: str) -> None:
        """Adds the parts in the lists that an object has under these names.

        Raises InvalidParameter when there are more than MAX_PARTS, and for an object with more than
        MAX_ENTRIES members: pydantic describes each one that is unknown, deep in the conversation.
        """
        if not isinstance(value, dict):
            return
        self._check_size(value)
        for member in members:
            parts = value.get(member)
            if not isinstance(parts, list):
                continue
            self._count += len(parts)
            if self._count > MAX_PARTS:
                raise InvalidParameter(
                    self._param, f"must have at most {MAX_PARTS} content parts and calls in all"
                )
            for part in parts:
                if isinstance(part, dict):
                    self._check_size(part)

    def _check_size(self, value: dict[str, Any]) -> None:
        if len(value) > MAX_ENTRIES:
            raise InvalidParameter(self._param, f"an object has at most {MAX_ENTRIES} members")


def _present_members(messages: object) -> object:
    """Returns the messages without null and empty members, which the SDKs send (`refusal: null`,
    `annotations: []`). Raises InvalidParameter for more messages or parts than are allowed."""
    if not isinstance(messages, list):
        return messages
    if not 0 < len(messages) <= MAX_MESSAGES:
        raise InvalidParameter("messages", f"must have 1 to {MAX_MESSAGES} entries")
    count = PartCount("messages")
    for message in messages:
        count.add(message, "content", "tool_calls")
        if isinstance(message, dict) and isinstance(calls := message.get("tool_calls"), list):
            for call in calls:
                count.add(call.get("function") if isinstance(call, dict) else None)
    return [_present(message, index) for index, message in enumerate(messages)]


def _present(message: object, index: int) -> object:
    if not isinstance(message, dict):
        return message
    if message.get("role") == "function":
        raise unsupported(f"messages.{index}.role", "it is deprecated, use 'tool'")
    present = {
        name: value
        for name, value in message.items()
        if value is not None and (value != [] or name == "content") and name not in _UNUSED
    }
    if message.get("role") not in ("assistant", "tool"):
        _check_is_text(message.get("content"), f"messages.{index}.content")
    if isinstance(parts := present.get("content"), list):
        present["content"] = [_without_unused(part) for part in parts]
    if isinstance(calls := present.get("tool_calls"), list):
        present["tool_calls"] = [
            _without_unused(without_nulls(call, "function"), "function") for call in calls
        ]
    return present


def _check_is_text(content: object, path: str) -> None:
    """Raises InvalidParameter for a picture and the like: nothing is left out of a message that was
    written for the model."""
    for index, part in enumerate(content if isinstance(content, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in MEDIA_KINDS:
            raise input_not_supported(f"{path}.{index}", MEDIA_KINDS[kind])


def left_out_parts(messages: Sequence[ChatMessage]) -> Iterator[str]:
    """Yields the name of each part that the template is given a text for."""
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if part["type"] in MEDIA_KINDS:
                yield f"messages.content.{part['type']}"


def _without_unused(value: object, *inner: str) -> object:
    if not isinstance(value, dict) or (_UNUSED.isdisjoint(value) and not inner):
        return value
    return {
        name: _without_unused(member) if name in inner else member
        for name, member in value.items()
        if name not in _UNUSED
    }


def without_nulls(value: object, *inner: str) -> object:
    """Returns an object without its null members, nor those of the objects that it has under the
    names `inner`; and any other value as it is."""
    if not isinstance(value, dict):
        return value
    return {
        name: without_nulls(member) if name in inner else member
        for name, member in value.items()
        if member is not None
    }


ChatMessages = Annotated[
    list[ChatMessage],
    Field(fail_fast=True, json_schema_extra={"minItems": 1, "maxItems": MAX_MESSAGES}),
    BeforeValidator(_present_members),
]


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Returns role, content (text, or text parts), name, and what only some roles have, of each
    message. Raises InvalidParameter for an id without its call, and for calls with the same id."""
    called: dict[str, str] = {}  # id of a call -> name of its tool
    return [
        _template_message(message, f"messages.{index}", called)
        for index, message in enumerate(messages)
    ]


def _template_message(message: ChatMessage, path: str, called: dict[str, str]) -> dict[str, Any]:
    made: dict[str, Any]
    if message["role"] == "assistant":
        made = {"role": "assistant", "content": _assistant_content(message, path)}
        reasoning = message.get("reasoning", message.get("reasoning_content"))
        if reasoning is not None:
            made["reasoning_content"] = reasoning
        if "tool_calls" in message:
            made["tool_calls"] = _calls(message["tool_calls"], f"{path}.tool_calls", called)
    elif message["role"] == "tool":
        call_id = message["tool_call_id"]
        if call_id not in called:
            raise InvalidParameter(
                f"{path}.tool_call_id", "is not the id of a call in an earlier assistant message"
            )
        content = message["content"]
        made = {
            "role": "tool",
            "content": content if isinstance(content, str) else [_text(part) for part in content],
            "tool_call_id": call_id,
            "name": called[call_id],
        }
    else:
        role = "system" if message["role"] == "developer" else message["role"]
        made = {"role": role, "content": message["content"]}
    if "name" in message:
        made["name"] = message["name"]
    return made


def _assistant_content(message: ChatAssistantMessage, path: str) -> str | list[dict[str, str]]:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content:
        return [_text(part) for part in content]
    if "refusal" in message:
        return message["refusal"]
    if "tool_calls" in message:
        return ""  # some templates do not check that there is any
    if content is None:
        raise missing_parameter(f"{path}.content")
    raise InvalidParameter(f"{path}.content", "must not be an empty list")


def _text(part: ChatTextPart | ChatRefusalPart | ChatMediaPart) -> dict[str, str]:
    if part["type"] == "text":
        text = part["text"]
    elif part["type"] == "refusal":
        text = part["refusal"]
    else:
        text = left_out_part(MEDIA_KINDS[part["type"]])
    return {"type": "text", "text": text}


def _calls(calls: Sequence[ChatCall], path: str, called: dict[str, str]) -> list[dict[str, Any]]:
    made: dict[str, dict[str, Any]] = {}  # by id
    for index, call in enumerate(calls):
        if call["id"] in made:
            raise InvalidParameter(
                f"{path}.{index}.id", "is the id of another call of this message"
            )
        name = called[call["id"]] = call["function"]["name"]
        function = {"name": name, "arguments": call["function"]["arguments"]}
        made[call["id"]] = {"id": call["id"], "type": "function", "function": function}
    return list(made.values())
