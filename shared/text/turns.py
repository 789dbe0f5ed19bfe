"""The order of roles that a chat template takes, and conversations brought into that order.

Strict templates refuse a second or late system message, repeated roles, or a user's turn after a
tool's result; others drop such messages. Agents send all of these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
_AsRole = Callable[[Any, str], Any]  # content in the form that the template takes of a role
_SEPARATOR = "\n\n"
_REASONING = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, slots=True)
class TurnRules:
    """The orders of roles that a template renders without loss. False: `fitted` avoids it."""

    system: bool = True  # a system message at the start
    second_system: bool = True  # right after that one
    late_system: bool = True  # after another role
    repeated_user: bool = True
    repeated_assistant: bool = True
    user_after_result: bool = True
    user_before_result: bool = True  # between a call and its result
    assistant_first: bool = True
    no_user: bool = True


def probe_turns(shown: Callable[[str], bool]) -> TurnRules:
    """Returns the rules of a template. `shown` renders a tiny conversation, one letter a message,
    and returns whether all of its texts appear: S system, U user, A assistant, C call, R result.

    A template that does not render the plain conversation has no rules that could be found.
    """
    if not shown("UAU"):
        return TurnRules()
    system = shown("SUAU")
    begin = "S" if system else ""
    has_results = shown("UCRAU")
    return TurnRules(
        system=system,
        second_system=system and shown("SSUAU"),
        # A turn later too: some count a late system message as a turn, and refuse the next one.
        late_system=system and all(map(shown, ("SUS", "USAU", "SUSAUASUAU"))),
        repeated_user=all(map(shown, ("UU", "UUAU", "UAUUAU"))),
        repeated_assistant=shown("UAAUAAU") and (not has_results or shown("UACRAUACRAU")),
        user_after_result=not has_results or (shown("UCRU") and shown("UCRUAUCRUAU")),
        user_before_result=not has_results or shown("UCURAU"),
        assistant_first=shown(f"{begin}AU") and shown(f"{begin}AUAU"),
        no_user=shown(begin) if begin else True,
    )


def fitted(messages: Sequence[Message], rules: TurnRules, as_role: _AsRole) -> list[Message]:
    """Returns the conversation as the template takes it: new messages, the given ones unchanged.

    System messages that it does not take join the system message before them, or become text of
    the neighbouring user turn. Repeated roles are joined. The text of earlier turns stays the same
    when a turn is appended: a cached prefix stays valid. Calls and results keep their places.
    """
    if rules == TurnRules():
        return list(messages)
    if not rules.user_before_result:
        messages = _results_first(messages)
    turns = _Turns(rules, as_role)
    for message in messages:
        turns.add(message)
    return turns.finished()


def _results_first(messages: Sequence[Message]) -> list[Message]:
    """Returns the messages with the results of each call directly after it."""
    made: list[Message] = []
    behind: list[Message] = []  # text after a call
    has_call = False
    for message in messages:
        if message["role"] == "assistant":
            made += behind
            behind = []
            has_call = "tool_calls" in message
            made.append(message)
        elif has_call and message["role"] != "tool":
            behind.append(message)
        else:
            made.append(message)
    return made + behind


class _Turns:
    """The turns of one conversation, in the template's order."""

    def __init__(self, rules: TurnRules, as_role: _AsRole) -> None:
        self._rules = rules
        self._as_role = as_role
        self._made: list[Message] = []
        self._is_moved = False  # the last turn has text of a system message

    def add(self, message: Message) -> None:
        if message["role"] == "system":
            self._add_system(message)
        elif message["role"] == "user":
            self._add_user(message, is_moved=False)
        elif message["role"] == "assistant" and self._continues_assistant():
            self._join(message)
        else:
            self._append(message)

    def finished(self) -> list[Message]:
        """Returns the messages, with an empty user turn where the template insists on one."""
        roles = [message["role"] for message in self._made]
        first = next((index for index, role in enumerate(roles) if role != "system"), len(roles))
        is_missing = "user" not in roles and not self._rules.no_user
        if first < len(roles) and roles[first] != "user" and not self._rules.assistant_first:
            is_missing = True
        if is_missing:
            self._made.insert(first, {"role": "user", "content": self._as_role("", "user")})
        return self._made

    def _add_system(self, message: Message) -> None:
        is_late = any(made["role"] != "system" for made in self._made[:1])
        if self._rules.system and not is_late:
            is_second = bool(self._made) and self._made[-1]["role"] == "system"
            if is_second and not self._rules.second_system:
                self._join(message)
                return
            if is_second or not self._made:
                self._append(message)
                return
        if self._rules.late_system:
            self._append(message)
        else:
            content = self._as_role(message.get("content", ""), "user")
            self._add_user({"role": "user", "content": content}, is_moved=True)

    def _add_user(self, message: Message, *, is_moved: bool) -> None:
        last = self._made[-1]["role"] if self._made else ""
        joins_user = is_moved or self._is_moved or not self._rules.repeated_user
        joins_result = not self._rules.user_after_result
        if (last == "user" and joins_user) or (last == "tool" and joins_result):
            self._join(message)
        else:
            self._append(message)
        self._is_moved = self._is_moved or is_moved

    def _continues_assistant(self) -> bool:
        last = self._made[-1] if self._made else {}
        return (
            not self._rules.repeated_assistant
            and last.get("role") == "assistant"
            and "tool_calls" not in last
        )

    def _append(self, message: Message) -> None:
        self._made.append(message)
        self._is_moved = False

    def _join(self, message: Message) -> None:
        last = self._made[-1]
        content = self._as_role(message.get("content", ""), last["role"])
        joined = {**message, **last, "content": _joined(last.get("content", ""), content)}
        for name in _REASONING:
            if name in last and name in message:
                joined[name] = _joined(last[name], message[name])
        self._made[-1] = joined


def _joined(before: Any, after: Any) -> Any:
    """Returns two contents as one: texts, or lists of text parts."""
    if not before or not after:
        return before or after
    if isinstance(before, str) and isinstance(after, str):
        return before + _SEPARATOR + after
    *begin, last = _parts(before)
    first, *rest = _parts(after)
    # Within one part: templates strip the ends of parts.
    return [*begin, {**last, "text": last["text"] + _SEPARATOR + first["text"]}, *rest]


def _parts(content: Any) -> list[Mapping[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
