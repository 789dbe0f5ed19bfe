"""RowCount: how many ways on a grammar of a JSON schema follows at once, counted in advance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MAX_ROW_ITEMS = 6_000  # at one place of a schema: fourteen hundred optional properties
_OF_A_PROPERTY = 4
_MAX_DEPTH = 100  # of schemas in one another by references; each $defs is counted apart as well

_ONE_OF_THEM = ("anyOf", "oneOf", "allOf")  # all of them are followed at once
_INSIDE = ("items", "additionalItems", "additionalProperties")


class RowCount:
    """Counts, without compiling, how many ways on the compiler follows at one place of a schema.

    llguidance follows all of them at once, in a row of items: four for each property that may come
    next, one for each alternative. Its bound on a row would end a generation, so a schema above
    MAX_ROW_ITEMS is refused before. Each of its schemas is counted once.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._counted: dict[int, int] = {}
        self._largest = (0, "#")
        self._depth = 0

    def largest(self) -> tuple[int, str]:
        """Returns the items in the largest row, and the JSON pointer of the schema where it is."""
        self._items(self._root, "#")
        return self._largest

    def _items(self, schema: Any, at: str) -> int:
        if not isinstance(schema, Mapping):
            return 1
        known = self._counted.get(id(schema))
        if known is not None:
            return known
        if self._depth == _MAX_DEPTH:
            return 1
        self._counted[id(schema)] = 1  # a schema within itself is the same row once more
        self._depth += 1
        items = max(self._own(schema, at) + self._joined(schema, at), self._inside(schema, at))
        self._depth -= 1
        self._counted[id(schema)] = items
        if items > self._largest[0]:
            self._largest = (items, at)
        return items

    def _own(self, schema: Mapping[str, Any], at: str) -> int:
        """Properties and values that may come at one place."""
        properties, required = schema.get("properties"), schema.get("required")
        num = 0
        if isinstance(properties, Mapping):
            needed = set(map(str, required)) if isinstance(required, list) else set()
            num += 1 + _OF_A_PROPERTY * len(properties.keys() - needed)
        patterns = schema.get("patternProperties")
        if isinstance(patterns, Mapping):
            num += _OF_A_PROPERTY * len(patterns)
        values = schema.get("enum")
        if isinstance(values, list):
            num += sum(isinstance(value, list | Mapping) for value in values)
        return num

    def _joined(self, schema: Mapping[str, Any], at: str) -> int:
        """Schemas of the same value."""
        num = 0
        for keyword in _ONE_OF_THEM:
            schemas = schema.get(keyword)
            if isinstance(schemas, Sequence) and not isinstance(schemas, str):
                each = (self._items(one, f"{at}/{keyword}/{i}") for i, one in enumerate(schemas))
                num += 1 + sum(each)
        reference = schema.get("$ref")
        if isinstance(reference, str):
            num += self._items(self._referred(reference), reference)
        return num

    def _inside(self, schema: Mapping[str, Any], at: str) -> int:
        """Returns the largest row of the values within this one."""
        num = 1
        for keyword in ("properties", "patternProperties", "$defs", "definitions"):
            named = schema.get(keyword)
            if isinstance(named, Mapping):
                for name, one in named.items():
                    items = self._items(one, f"{at}/{keyword}/{name}")
                    num = num if keyword in ("$defs", "definitions") else max(num, items)
        for keyword in _INSIDE:
            num = max(num, self._items(schema.get(keyword), f"{at}/{keyword}"))
        listed = schema.get("prefixItems", schema.get("items"))
        if isinstance(listed, list):
            num = max(num, *(self._items(one, f"{at}/{i}") for i, one in enumerate(listed)), 1)
        return num

    def _referred(self, reference: str) -> Any:
        """Returns the target of a reference within the schema; None for any other."""
        found: Any = self._root
        if reference == "#":
            return found
        for step in reference.removeprefix("#/").split("/"):
            name = step.replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, Mapping) else None
        return found
