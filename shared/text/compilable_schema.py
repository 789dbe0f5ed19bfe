"""Finds what in a JSON schema the grammar compiler does not take, and leaves it out.

The compiler names no place. So each part is compiled alone, with the schema that its
references lead to.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher

from shared.text.deep_stack import start_deep

MAX_CPU_SECONDS = 1.0  # for one schema; a part that is not looked at by then is dropped whole
MAX_REASON_CHARS = 200
_KEPT_LONGEST = {"properties": 1, "items": 1, "type": 2}  # a schema without them is worth little
_ROOT = "#/$defs/root"
_NAMED = ("$defs", "definitions", "properties", "patternProperties")  # those of references first
_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE = ("items", "additionalItems", "additionalProperties")


@dataclass(frozen=True, slots=True)
class SchemaFault:
    """A keyword that does not compile. `at`: the JSON pointer of its schema."""

    at: str
    keyword: str
    reason: str

    def __str__(self) -> str:
        return (
            f"the schema at {self.at} has a {self.keyword!r} that cannot be enforced: {self.reason}"
        )


def without_faults(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema without the keywords that do not compile, the innermost first."""
    return start_deep(lambda: _Parts(schema).mended()).result()


def fault_in(schema: Mapping[str, Any]) -> SchemaFault | None:
    """Returns the innermost fault; None if all compiles."""
    return start_deep(lambda: _Parts(schema).fault()).result()


class _Parts:
    """The parts of one schema. Its references are to its copy below `$defs` of another."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._root: dict[str, Any] = _moved(schema, "#", _ROOT)
        self._begun_s = time.thread_time()
        self._has_references = True
        self._faults: list[SchemaFault] = []

    def mended(self) -> dict[str, Any]:
        self._mend_all()
        return dict(_moved(self._root, _ROOT, "#"))

    def fault(self) -> SchemaFault | None:
        self._mend_all()
        return self._faults[0] if self._faults else None

    def _mend_all(self) -> None:
        if not self._reason(self._root, "#"):
            return
        # First without references: a reference is not at fault for a faulty target.
        for self._has_references in (False, True):
            self._mend(self._root, "#")

    def _mend(self, part: dict[str, Any], at: str) -> None:
        """Removes the faults of a part, in place."""
        if self._has_references and not self._reason(part, at):
            return
        for inner, inner_at in _inner(part, at):
            self._mend(inner, inner_at)
        while reason := self._reason(part, at):
            keyword = self._faulty(part, at)
            if keyword is None:  # no single one
                self._faults.append(SchemaFault(at, next(iter(part), ""), reason))
                part.clear()
                return
            self._faults.append(SchemaFault(at, keyword, reason))
            del part[keyword]

    def _faulty(self, part: dict[str, Any], at: str) -> str | None:
        """Returns the keyword without which a part compiles."""
        whole = dict(part)
        for keyword in sorted(whole, key=lambda one: _KEPT_LONGEST.get(one, 0)):
            part.pop(keyword)
            reason = self._reason(part, at)
            part.clear()
            part.update(whole)
            if not reason:
                return keyword
        return None

    def _reason(self, part: Mapping[str, Any], at: str) -> str:
        """Returns why a part does not compile; "" where it does."""
        if time.thread_time() - self._begun_s > MAX_CPU_SECONDS:
            return "the schema has too many faults"
        if self._has_references and self._is_circular(part):
            return "the reference leads back to itself"
        text = json.dumps(part if self._has_references else _without_references(part))
        if '"$ref"' in text and self._has_references:
            text = json.dumps({"$ref": f"{_ROOT}{at[1:]}", "$defs": {"root": self._root}})
        reason = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(text))
        reason = reason.partition("while processing")[0].replace("/$defs/root", "")
        return " ".join(reason.split())[:MAX_REASON_CHARS]

    def _is_circular(self, part: Mapping[str, Any]) -> bool:
        """Returns whether references lead from a part to itself, by nothing else."""
        seen: list[object] = []
        found: Any = part
        while isinstance(found, dict) and isinstance(found.get("$ref"), str):
            if any(found is one for one in seen):
                return True
            seen.append(found)
            steps = found["$ref"].removeprefix(_ROOT).split("/")[1:]
            found = self._root
            for step in steps:
                name = step.replace("~1", "/").replace("~0", "~")
                found = found.get(name) if isinstance(found, dict) else None
        return False


def _inner(part: Mapping[str, Any], at: str) -> Iterator[tuple[dict[str, Any], str]]:
    for keyword in _NAMED:
        named = part.get(keyword)
        if isinstance(named, dict):
            for name, each in named.items():
                if isinstance(each, dict):
                    yield each, f"{at}/{keyword}/{name.replace('~', '~0').replace('/', '~1')}"
    for keyword in _LISTED:
        listed = part.get(keyword)
        if isinstance(listed, list):
            for index, each in enumerate(listed):
                if isinstance(each, dict):
                    yield each, f"{at}/{keyword}/{index}"
    for keyword in _SINGLE:
        single = part.get(keyword)
        if isinstance(single, dict):
            yield single, f"{at}/{keyword}"


def _moved(value: Any, before: str, after: str, keyword: str = "") -> Any:
    """Returns a copy whose references start with `after` instead of `before`."""
    if keyword == "$ref" and isinstance(value, str) and value.startswith(before):
        return f"{after}{value.removeprefix(before)}"
    if isinstance(value, Mapping):
        return {name: _moved(each, before, after, name) for name, each in value.items()}
    if isinstance(value, list):
        return [_moved(each, before, after) for each in value]
    return value


def _without_references(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {name: _without_references(each) for name, each in value.items()}
        if isinstance(kept.get("$ref"), str):
            del kept["$ref"]
        return kept
    return [_without_references(each) for each in value] if isinstance(value, list) else value
