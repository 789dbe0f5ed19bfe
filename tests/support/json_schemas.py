"""Random JSON schemas of the kinds that people use, with as much in them as a test can afford.

Each is satisfiable and has short values, so that a model that picks tokens at random gets to the
end of one. All that is drawn comes from the generator that is handed in.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

_NAMES = ("id", "name", "kind", "tags", "price", "a b", "größe", 'quo"te', "$ref", "items", "x/y")
_WORDS = (
    "red",
    "green",
    "blue",
    "",
    "näher",
    'say "no"',
    "back\\slash",
    "<|im_end|>",
    "two\nlines",
)
_PATTERNS = (
    "^[a-z]{1,4}$",
    "^\\d{3}-\\d{2}$",
    "^(on|off)$",
    "[aeiou]",
    "^[A-Z][a-z]*$",
    "^\\w+@\\w+\\.de$",
    "^#[0-9a-f]{6}$",
)
FORMATS = (
    "date",
    "time",
    "date-time",
    "duration",
    "ipv4",
    "ipv6",
    "uuid",
    "hostname",
    "email",
    "uri",
)
_ANNOTATIONS: Schema = {
    "title": "A title",
    "description": "what it is for",
    "examples": [1, "two"],
    "deprecated": True,
    "$comment": "harmless",
    "x-order": 3,
}


def random_schema(rng: random.Random) -> Schema:
    """A schema whose root is an object more often than not."""
    return _Maker(rng).root()


class _Maker:
    """Draws one schema; its definitions are collected on the way."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._defs: Schema = {}

    def root(self) -> Schema:
        make = self._rng.choice([self.object, self.object, self.object, self.array, self.any_kind])
        schema = make(0)
        if self._defs:
            schema["$defs"] = self._defs
        return schema

    def any_kind(self, depth: int) -> Schema:
        makers: list[Callable[[int], Schema]] = [
            self.string,
            self.number,
            self.integer,
            self.enum,
            self.const,
            self.boolean,
            self.nullable,
        ]
        if depth < 3:
            makers += [self.object, self.array, self.any_of, self.ref, self.map, self.all_of]
        schema = self._rng.choice(makers)(depth)
        if self._rng.random() < 0.15:
            key = self._rng.choice(list(_ANNOTATIONS))
            schema = {key: _ANNOTATIONS[key], **schema}
        return schema

    def string(self, depth: int) -> Schema:
        rng = self._rng
        schema: Schema = {"type": "string"}
        kind = rng.random()
        if kind < 0.3:
            schema["pattern"] = rng.choice(_PATTERNS)
            schema["maxLength"] = 12
        elif kind < 0.6:
            schema["format"] = rng.choice(FORMATS)
        else:
            schema["minLength"] = rng.randint(0, 3)
            schema["maxLength"] = schema["minLength"] + rng.randint(0, 8)
        return schema

    def number(self, depth: int) -> Schema:
        rng = self._rng
        low = rng.choice([-1000, -2.5, 0, 0.125, 7])
        schema: Schema = {"type": "number"}
        schema[rng.choice(["minimum", "exclusiveMinimum"])] = low
        schema[rng.choice(["maximum", "exclusiveMaximum"])] = low + rng.choice([1, 12, 50.75, 1e6])
        return schema

    def integer(self, depth: int) -> Schema:
        rng = self._rng
        schema: Schema = {"type": "integer"}
        low = rng.randint(-120, 120)
        if rng.random() < 0.7:
            schema[rng.choice(["minimum", "exclusiveMinimum"])] = low
        if rng.random() < 0.7:
            schema[rng.choice(["maximum", "exclusiveMaximum"])] = low + rng.choice([20, 400, 10**6])
        if rng.random() < 0.3:
            schema["multipleOf"] = rng.choice([2, 5, 7, 10])
        if rng.random() < 0.2:
            schema["format"] = "int32"
        return schema

    def boolean(self, depth: int) -> Schema:
        return {"type": self._rng.choice(["boolean", "boolean", "null"])}

    def enum(self, depth: int) -> Schema:
        values = [*_WORDS, 0, 1, -17, 2.5, True, None, [1, "x"], {"k": False}]
        return {"enum": self._rng.sample(values, self._rng.randint(1, 5))}

    def const(self, depth: int) -> Schema:
        return {"const": self._rng.choice([*_WORDS, 12, -0.25, None, False, {"a": [1, 2]}])}

    def nullable(self, depth: int) -> Schema:
        return {"type": ["string", "null", "integer"], "maxLength": 5, "minimum": 3, "maximum": 90}

    def any_of(self, depth: int) -> Schema:
        count = self._rng.randint(1, 3)
        return {"anyOf": [self.any_kind(depth + 1) for _ in range(count)]}

    def all_of(self, depth: int) -> Schema:
        named = {"type": "object", "properties": {"id": {"type": "integer", "minimum": 0}}}
        bounded = {"properties": {"id": {"maximum": 50}, "ok": {"type": "boolean"}}}
        return {"allOf": [{**named, "required": ["id"]}, bounded], "maxProperties": 2} | {
            "properties": {"id": True, "ok": True},
            "additionalProperties": False,
        }

    def ref(self, depth: int) -> Schema:
        if self._rng.random() < 0.3:
            self._defs["tree"] = {
                "type": "object",
                "properties": {
                    "leaf": {"type": "boolean"},
                    "kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1},
                },
                "required": ["leaf"],
                "additionalProperties": False,
            }
            return {"$ref": "#/$defs/tree"}
        definition = self.any_kind(depth + 1)
        name = f"d{len(self._defs)}"
        self._defs[name] = definition
        return {"$ref": f"#/$defs/{name}"}

    def array(self, depth: int) -> Schema:
        rng = self._rng
        schema: Schema = {"type": "array"}
        if rng.random() < 0.25:
            schema["prefixItems"] = [self.any_kind(depth + 1) for _ in range(rng.randint(1, 2))]
            schema["items"] = False
            return schema
        schema["items"] = self.any_kind(depth + 1)
        schema["minItems"] = rng.randint(0, 2)
        schema["maxItems"] = schema["minItems"] + rng.randint(0, 2)
        if rng.random() < 0.2:
            schema["uniqueItems"] = False
        return schema

    def map(self, depth: int) -> Schema:
        """Names that the schema does not list."""
        rng = self._rng
        values = self.any_kind(depth + 1)
        schema: Schema = {"type": "object", "maxProperties": rng.randint(1, 2)}
        if rng.random() < 0.5:
            schema["patternProperties"] = {"^[a-z]{1,3}$": values}
            schema["additionalProperties"] = False
        else:
            schema["additionalProperties"] = values
        return schema

    def object(self, depth: int) -> Schema:
        rng = self._rng
        names = rng.sample(_NAMES, rng.randint(0, 4))
        schema: Schema = {
            "type": "object",
            "properties": {name: self.any_kind(depth + 1) for name in names},
        }
        required = [name for name in names if rng.random() < 0.6]
        if required or rng.random() < 0.5:
            schema["required"] = required
        extra = rng.random()
        if extra < 0.7:
            schema["additionalProperties"] = False
        elif extra < 0.85:
            schema["additionalProperties"] = {"type": "boolean"}
        return schema
