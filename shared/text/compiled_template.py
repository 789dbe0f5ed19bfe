"""CompiledChatTemplate: a chat template that is rendered in this process.

Only a rendering process may do that (`shared.text.rendering_process`): the sandbox bounds loops,
but products, filters and methods of strings may take any memory and any time.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import Enum
from typing import Any

from shared.messages import InvalidParameter
from shared.text.base import TextInvalid
from shared.text.rendering import RenderRequest, TemplateSource
from shared.text.sandbox import BUDGET, ChatSandbox, WorkBudget, WrittenObject
from shared.text.turns import TurnRules, fitted, probe_turns

_MAX_REASON_CHARS = 500
_OURS = frozenset({"messages", "tools", "add_generation_prompt"})
_PROBE = "probe"
_PROBE_PARTS = [{"type": "text", "text": _PROBE}]
_MARK, _OTHER_MARK = "qzxj", "jxzq"  # short, lest a template cut it; in no template's own text
_PROBE_STEPS, _PROBE_CPU_SECONDS = 10_000, 0.5
_PROBE_CALL_ID = "call00001"  # nine letters and digits: what Mistral's templates insist on
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "probe",
        # Some templates refuse a property without a description.
        "parameters": {
            "type": "object",
            "properties": {"probe": {"type": "string", "description": "probe"}},
        },
    },
}


class CompiledChatTemplate:
    """A checkpoint's chat template, compiled once. Raises TextInvalid if it does not compile."""

    def __init__(self, template: TemplateSource, now: Callable[[], datetime]) -> None:
        sources = template.source
        if "default" not in sources:
            raise TextInvalid(
                f"the chat templates {sorted(sources)} do not include one named 'default'"
            )
        self._source = template
        self._sandbox = ChatSandbox(now)
        self._by_name: dict[str, _NamedTemplate] = {}
        self._default = self._named("default")
        self._tool_use = self._named("tool_use") if "tool_use" in sources else self._default
        self.variables = self._default.variables | self._tool_use.variables

    def render(self, request: RenderRequest, messages: Sequence[Mapping[str, Any]]) -> str:
        """Returns the prompt's text. Raises InvalidParameter as JinjaChatTemplate.render."""
        variables = dict(request.extra)
        for name in variables:
            if name in _OURS or name.startswith("_"):
                raise InvalidParameter("chat_template_kwargs", f"{name!r} cannot be set")
        tools = request.tools
        if request.name:
            template = self._requested(request.name)
        else:
            template = self._default if tools is None else self._tool_use
        variables["messages"] = prepare_messages(messages, template.traits)
        variables["add_generation_prompt"] = request.add_generation_prompt
        variables["tools"] = None if tools is None else _prepare_tools(tools)
        return template.render(variables, WorkBudget())

    def _requested(self, name: str) -> _NamedTemplate:
        """Raises InvalidParameter("chat_template")."""
        if name not in self._source.source:
            known = ", ".join(sorted(self._source.source))
            raise InvalidParameter(
                "chat_template",
                f"must be the name of one of this model's chat templates: {known}",
            )
        try:
            return self._named(name)
        except TextInvalid as error:
            raise InvalidParameter("chat_template", str(error)) from None

    def _named(self, name: str) -> _NamedTemplate:
        """Compiles a template when it is first needed. Raises TextInvalid."""
        if name not in self._by_name:
            self._by_name[name] = _NamedTemplate(self._sandbox, name, self._source)
        return self._by_name[name]


def _prepare_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if not all(isinstance(tool, Mapping) for tool in tools):
        raise InvalidParameter("tools", "each tool must be an object")
    return [dict(tool) for tool in tools]


class _NamedTemplate:
    """One compiled template and its traits, found by probing."""

    def __init__(self, sandbox: ChatSandbox, name: str, template: TemplateSource) -> None:
        source = template.source[name]
        try:
            self._template = sandbox.compile_chat(source)
            self.variables = sandbox.variables_of(source)
        except MemoryError:
            raise  # the rendering process ends and reports it
        except Exception as error:  # jinja computes constant expressions: anything can be raised
            raise TextInvalid(f"chat template {name!r} does not compile: {error}") from error
        self._special_tokens = template.special_tokens
        self._max_chars = template.max_chars
        budget = WorkBudget(_PROBE_STEPS, _PROBE_CPU_SECONDS)  # one for all probes
        self.traits = _probe(functools.partial(self._try, budget))

    def render(self, variables: Mapping[str, Any], budget: WorkBudget) -> str:
        """Returns the text. Raises InvalidParameter("messages") if the template refuses."""
        context = {"documents": None, **self._special_tokens, **variables}
        context[BUDGET] = budget.step
        parts: list[str] = []
        num_chars = 0
        try:
            for part in self._template.generate(context):
                num_chars += len(part)
                if num_chars > self._max_chars:
                    raise InvalidParameter("messages", "the rendered prompt is too long")
                parts.append(part)
            text = "".join(parts)
            text.encode()  # half a surrogate pair would fail later, far from its origin
        except (InvalidParameter, MemoryError):
            raise
        except UnicodeEncodeError as error:
            raise InvalidParameter("messages", "text has a lone surrogate") from error
        except Exception as error:  # a template is a program: anything may be raised in it
            reason = str(error)[:_MAX_REASON_CHARS] or type(error).__name__
            raise InvalidParameter("messages", f"refused by the chat template: {reason}") from error
        return text

    def _try(
        self,
        budget: WorkBudget,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
    ) -> str:
        """Returns '' where the template refuses."""
        variables = {"messages": messages, "tools": tools, "add_generation_prompt": False}
        try:
            return self.render(variables, budget)
        except (InvalidParameter, MemoryError):
            return ""


_Messages = list[dict[str, Any]]
_Try = Callable[[_Messages, "list[dict[str, Any]] | None"], str]


def _probe(attempt: _Try) -> TemplateTraits:
    """Returns the template's traits, found by rendering tiny conversations.

    A template that loops over content parts gets them unchanged, as in transformers; another one
    would raise, or print Python's notation of a list into the prompt.
    """
    user = _probe_content(attempt, lambda content: [{"role": "user", "content": content}])
    opening: Any = _PROBE_PARTS if user is ContentForm.PARTS else _PROBE
    begin = [{"role": "user", "content": opening}]
    forms = {"user": user}
    forms["system"] = _probe_content(
        attempt, lambda content: [{"role": "system", "content": content}, *begin]
    )
    forms["assistant"] = _probe_content(
        attempt, lambda content: [*begin, {"role": "assistant", "content": content}, *begin]
    )
    forms["tool"] = _probe_content(
        attempt, lambda content: [*begin, _call_message({}, ""), _result_message(content)]
    )
    traits = TemplateTraits(content=forms, arguments_as_text=_probe_arguments(attempt, begin))
    return replace(traits, turns=probe_turns(lambda roles: _shows(attempt, roles, traits)))


def _shows(attempt: _Try, roles: str, traits: TemplateTraits) -> bool:
    """Returns whether all texts of a conversation appear. `roles`: see `probe_turns`."""
    marks = [f"qz{chr(ord('a') + index)}xj" for index in range(len(roles))]
    messages = prepare_messages(
        [_PROBE_TURNS[role](mark) for role, mark in zip(roles, marks, strict=True)], traits
    )
    wanted = [mark for role, mark in zip(roles, marks, strict=True) if role != "C"]
    for tools in (None, [_PROBE_TOOL]) if "C" in roles else (None,):
        text = attempt(messages, tools).casefold()
        if all(mark in text for mark in wanted):
            return True
    return False


def _probe_content(attempt: _Try, conversation: Callable[[Any], _Messages]) -> ContentForm:
    text = attempt(conversation(_MARK), None).casefold()
    part = {"type": "text", "text": _MARK, _OTHER_MARK: ""}  # seen where a list is printed whole
    parts = attempt(conversation([part]), None).casefold()
    takes_parts = _MARK in parts and _OTHER_MARK not in parts
    if _MARK in text:
        return ContentForm.EITHER if takes_parts else ContentForm.TEXT
    return ContentForm.PARTS if takes_parts else ContentForm.TEXT


def _probe_arguments(attempt: _Try, begin: _Messages) -> bool:
    """Returns whether arguments are rendered as JSON only if they go in as text."""
    as_object = _probe_call(attempt, begin, {_MARK: "x"})
    if _MARK in as_object and f"'{_MARK}'" not in as_object:
        return False
    return f'"{_MARK}"' in _probe_call(attempt, begin, json.dumps({_MARK: "x"}))


def _probe_call(attempt: _Try, begin: _Messages, arguments: object) -> str:
    for content in ("", None):
        for tools in ([_PROBE_TOOL], None):
            text = attempt(
                [*begin, _call_message(arguments, content), _result_message("ok")], tools
            )
            if text:
                return text
    return ""


def _call_message(arguments: object, content: str | None) -> dict[str, Any]:
    call = {
        "id": _PROBE_CALL_ID,
        "type": "function",
        "function": {"name": "probe", "arguments": arguments},
    }
    message: dict[str, Any] = {"role": "assistant", "tool_calls": [call]}
    return message if content is None else {**message, "content": content}


def _result_message(content: object) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": _PROBE_CALL_ID, "name": "probe", "content": content}


_PROBE_TURNS: Mapping[str, Callable[[str], dict[str, Any]]] = {
    "S": lambda text: {"role": "system", "content": text},
    "U": lambda text: {"role": "user", "content": text},
    "A": lambda text: {"role": "assistant", "content": text},
    "C": lambda text: _call_message({"probe": "x"}, ""),
    "R": _result_message,
}


MAX_MESSAGES = 10_000

_REASONING_MEMBERS = ("reasoning_content", "thinking", "reasoning")
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


class ContentForm(Enum):
    """How a template takes a message's content."""

    TEXT = "text"  # a string only
    PARTS = "parts"  # a list of parts only
    EITHER = "either"


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """What a template was found to understand by rendering probes."""

    content: Mapping[str, ContentForm] = field(default_factory=dict)  # by role; others: TEXT
    arguments_as_text: bool = False  # tool call arguments stay the JSON text they arrive as
    turns: TurnRules = field(default_factory=TurnRules)


def prepare_messages(
    messages: Sequence[Mapping[str, Any]], traits: TemplateTraits
) -> list[dict[str, Any]]:
    """Returns messages adapted to a template, as new dictionaries.

    Members that are None are dropped, and reasoning is given under each of its names, both as in
    transformers. Text parts are joined by a newline if the template takes only a string. Tool call
    arguments that are the JSON text of an object become that object (or the other way round, if
    the template expects text); other text is a model's mistake and kept. Messages in an order that
    the template refuses are joined or moved (`turns.fitted`). Raises InvalidParameter("messages",
    ...).
    """
    if not messages:
        raise InvalidParameter("messages", "must not be empty")
    if len(messages) > MAX_MESSAGES:
        raise InvalidParameter("messages", f"at most {MAX_MESSAGES} messages")
    prepared = [_prepare(message, index, traits) for index, message in enumerate(messages)]

    def as_role(content: Any, role: str) -> Any:
        return _content(content, 0, traits.content.get(role, ContentForm.TEXT))

    return fitted(prepared, traits.turns, as_role)


def _prepare(message: Mapping[str, Any], index: int, traits: TemplateTraits) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidParameter("messages", f"message {index} must be an object")
    if not isinstance(message.get("role"), str):
        raise InvalidParameter("messages", f"message {index} must have a role")
    prepared = {name: value for name, value in message.items() if value is not None}
    reasoning = next((prepared[name] for name in _REASONING_MEMBERS if name in prepared), None)
    if reasoning is not None:
        prepared = {"thinking": reasoning, **prepared, "reasoning_content": reasoning}
    if "content" in prepared:
        form = traits.content.get(message["role"], ContentForm.TEXT)
        prepared["content"] = _content(prepared["content"], index, form)
    if "tool_calls" in prepared:
        prepared["tool_calls"] = _tool_calls(prepared["tool_calls"], index, traits)
    return prepared


def _content(content: Any, index: int, form: ContentForm) -> Any:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if form is ContentForm.PARTS else content
    if not isinstance(content, list | tuple):
        raise InvalidParameter("messages", f"content of message {index} must be text or parts")
    texts = [_part_text(part, index) for part in content]
    if form is ContentForm.TEXT:
        return "\n".join(texts)
    return [{"type": "text", "text": text} for text in texts]


def _part_text(part: Any, index: int) -> str:
    if not isinstance(part, Mapping):
        raise InvalidParameter("messages", f"content parts of message {index} must be objects")
    kind = part.get("type")
    member = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if member is None:
        raise InvalidParameter(
            "messages", f"content part {kind!r:.60} of message {index} is not supported: only text"
        )
    text = part.get(member)
    if not isinstance(text, str):
        raise InvalidParameter("messages", f"a text part of message {index} has no text")
    return text


def _tool_calls(calls: Any, index: int, traits: TemplateTraits) -> list[Any]:
    if not isinstance(calls, list | tuple):
        raise InvalidParameter("messages", f"tool_calls of message {index} must be a list")
    prepared = []
    for call in calls:
        if not isinstance(call, Mapping):
            raise InvalidParameter("messages", f"tool_calls of message {index} must be objects")
        function = call.get("function")
        if isinstance(function, Mapping) and "arguments" in function:
            arguments = _arguments(function["arguments"], as_text=traits.arguments_as_text)
            call = {**call, "function": {**function, "arguments": arguments}}
        prepared.append(dict(call))
    return prepared


def _arguments(arguments: Any, *, as_text: bool) -> Any:
    if as_text:
        if isinstance(arguments, str):
            return arguments
        try:
            return json.dumps(arguments, ensure_ascii=False)
        except RecursionError as error:
            raise InvalidParameter("messages", "tool call arguments nest too deeply") from error
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments
    if not isinstance(parsed, dict):
        return arguments
    return WrittenObject(parsed, arguments.strip() or "{}")
