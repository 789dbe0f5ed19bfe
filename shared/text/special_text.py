"""Special tokens in clients' texts are ordinary text of the message, and never start a turn.

A chat template writes special tokens such as `<|im_start|>` as text, and a message may have the
same text in it. So messages are marked before they are rendered: a mark inside the text of each
special token separates it from the template's own. The tokenizer removes the marks and encodes the
marked texts as ordinary text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from shared.messages import InvalidParameter

_MARK = "\ufdd0"  # no character
# Members of messages, parts and calls that templates compare; their values are checked elsewhere.
_STRUCTURE = ("role", "type")


class MarkedText(NamedTuple):
    """A text, and the mark in it; "" without one."""

    text: str
    mark: str = ""

    @property
    def plain(self) -> str:
        """The text without marks."""
        return unmarked(self.text, self.mark)


class SpecialTexts:
    """Marks the texts of special tokens in messages. Safe on several threads.

    `shown`: those that an assistant's own text may have, such as the markers of a call.
    """

    def __init__(self, texts: Collection[str], shown: Collection[str] = ()) -> None:
        # A mark follows the first character, so a single character cannot be marked.
        longer = [text for text in texts if len(text) > 1]
        self._in_any = _Finder(longer)
        self._in_assistant = _Finder([text for text in longer if text not in shown])

    def marked(
        self, messages: Sequence[Mapping[str, Any]]
    ) -> tuple[Sequence[Mapping[str, Any]], str]:
        """Returns the messages and the mark in them; unchanged messages and "" if none is needed.

        Marked are the messages of users, assistants and tools; those of the system are not. Raises
        InvalidParameter("messages").
        """
        finders = [
            None
            if message.get("role") == "system"
            else self._in_assistant
            if message.get("role") == "assistant"
            else self._in_any
            for message in messages
        ]
        messages = [
            message if finder is None else _readable(message, finder)
            for finder, message in zip(finders, messages, strict=True)
        ]
        written = [
            (finder, text)
            for finder, message in zip(finders, messages, strict=True)
            if finder is not None
            for text in _strings(message)
        ]
        if not any(finder.finds(text) for finder, text in written):
            return messages, ""
        # Random, so that no message, tool or template contains it, plain or escaped as JSON.
        mark = f"{_MARK}{secrets.token_hex(8)}{_MARK}"
        return [
            message if finder is None else _mapped(message, finder.marking(mark))
            for finder, message in zip(finders, messages, strict=True)
        ], mark


class _Finder:
    """Finds the texts of special tokens in a string, and their prefixes at its end, which the
    template's next text may complete."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._whole = re.compile(pattern_of(texts))
        self._beginnings = frozenset(text[:end] for text in texts for end in range(1, len(text)))
        self._longest = max(map(len, texts), default=0)

    def finds(self, text: str) -> bool:
        return self.finds_whole(text) or bool(self._open(text))

    def finds_whole(self, text: str) -> bool:
        return self._whole.search(text) is not None

    def marking(self, mark: str) -> Callable[[str], str]:
        """Returns a function that puts the mark after the first character of each."""

        def marked(text: str) -> str:
            places = {found.start() + 1 for found in self._whole.finditer(text)}
            pieces, begin = [], 0
            for place in sorted(places | self._open(text)):
                pieces.append(text[begin:place])
                begin = place
            return mark.join([*pieces, text[begin:]])

        return marked

    def _open(self, text: str) -> set[int]:
        """Returns the places after the first characters of tokens that the text's end starts."""
        end = len(text.rstrip())  # templates strip their input
        starts = range(max(0, end - self._longest), end)
        return {start + 1 for start in starts if text[start:end] in self._beginnings}


def pattern_of(texts: Collection[str]) -> str:
    """Returns a regular expression of the texts, the longest first, whose time does not grow with
    their number; one that matches nothing without any."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return _alternatives(tree) if tree else r"(?!)"


def _alternatives(node: Mapping[str, Any]) -> str:
    parts = [re.escape(char) + _alternatives(rest) for char, rest in node.items() if char]
    if not parts:
        return ""
    whole = parts[0] if len(parts) == 1 and "" not in node else f"(?:{'|'.join(parts)})"
    return f"{whole}?" if "" in node else whole


def unmarked(text: str, mark: str) -> str:
    """Returns a rendered text without its marks; templates may have written them as JSON."""
    if not mark:
        return text
    return text.replace(mark, "").replace(json.dumps(mark)[1:-1], "")


def _readable(message: Mapping[str, Any], finder: _Finder) -> Mapping[str, Any]:
    """Returns a message whose call arguments hide no special token in JSON's escapes (`\\u003c`):
    templates get the arguments parsed."""
    calls = message.get("tool_calls") or ()
    made = []
    for call in calls:
        text = call["function"]["arguments"]
        arguments = _parsed(text) if isinstance(text, str) and "\\" in text else None
        if any(map(finder.finds_whole, _strings(arguments, is_data=True))):
            text = json.dumps(arguments, ensure_ascii=False)
            call = {**call, "function": {**call["function"], "arguments": text}}
        made.append(call)
    return {**message, "tool_calls": made} if calls else message


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
    except RecursionError:
        raise InvalidParameter("messages", "tool call arguments nest too deeply") from None


def _strings(value: Any, *, is_data: bool = False) -> Iterator[str]:
    """Yields the strings that others wrote. `is_data`: below the arguments of a call, where the
    names of members are theirs, too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, member in value.items():
            if is_data:
                yield name
            if is_data or name not in _STRUCTURE:
                yield from _strings(member, is_data=is_data or name == "arguments")
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item, is_data=is_data)


def _mapped(value: Any, change: Callable[[str], str], *, is_data: bool = False) -> Any:
    """Returns the value with `change` applied to the strings of `_strings`."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            change(name) if is_data else name: member
            if not is_data and name in _STRUCTURE
            else _mapped(member, change, is_data=is_data or name == "arguments")
            for name, member in value.items()
        }
    if isinstance(value, list | tuple):
        return [_mapped(item, change, is_data=is_data) for item in value]
    return value
