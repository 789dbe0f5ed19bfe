"""JSON schemas of clients, rewritten so that a grammar can enforce them.

What a keyword requires is enforced, or the schema is refused by the keyword's name and place. Only
what restricts no value (`title`, `examples`, vendors' `x-...`) is left out.
Bounds keep the work of compiling small, for any author of the schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any, TypeGuard

from shared.messages import InvalidParameter
from shared.text.compilable_schema import without_faults
from shared.text.look_ahead import without_look_ahead
from shared.text.row_count import MAX_ROW_ITEMS, RowCount

MAX_DEPTH = 50  # of schemas within schemas
MAX_VALUE_DEPTH = 10  # of a value in const or enum
MAX_SUBSCHEMAS = 10_000
MAX_PROPERTIES = 1_000  # of one object
MAX_KEY_PATTERNS = 32  # of one object's patternProperties: each is compared with each
MAX_ALL_KEY_PATTERNS = 256  # of all objects together
MAX_JOINED_PATTERNS = 16  # different ones, where a text may have to match several of them
MAX_VALUES = 10_000  # of one enum
MAX_TEXT_CHARS = 8_192  # of one string in const or enum, of a property's name or a pattern
MAX_MULTIPLE = 10_000  # the digits of multipleOf, its decimal point left out
MAX_EXACT = 2**53  # numbers become doubles on their way into a grammar
MAX_LISTED = 10  # keywords that an error names
MAX_SHOWN = 80  # characters of the schema that an error repeats

# White space is free where a person might put some, but bounded: a confused model would otherwise
# continue with it to the last token.
WHITESPACE = r"(\r?\n[ \t]{0,64}|[ \t])"

_NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_SCHEMAS = frozenset(
    {"items", "additionalItems", "additionalProperties", "prefixItems"}
    | {"allOf", "anyOf", "oneOf"}
)
_IN_PLACE = frozenset({"allOf", "anyOf", "oneOf", "$ref"})  # speak of the same value
_BESIDE = frozenset({"$defs", "definitions", "$schema", "$id", "id", "$anchor"})  # do not
_VALUES = frozenset(
    {"const", "enum", "pattern", "required", "minimum", "maximum"}
    | {"exclusiveMinimum", "exclusiveMaximum"}
)
_ENFORCED = (
    _NAMED_SCHEMAS
    | _SCHEMAS
    | _VALUES
    | {"$ref", "$schema", "$id", "id", "$anchor", "type", "format", "multipleOf"}
    | {"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"}
)
_ANNOTATIONS = frozenset(
    {"title", "description", "default", "example", "examples", "deprecated", "$comment"}
    | {"readOnly", "writeOnly", "contentMediaType", "contentEncoding", "contentSchema"}
    | {"discriminator", "externalDocs", "xml", "markdownDescription", "$vocabulary"}
    | {"enumNames", "enumDescriptions", "markdownEnumDescriptions", "deprecationMessage"}
    | {"errorMessage", "propertyOrdering", "optional", "name", "label", "order"}
)
# Values of a keyword that allow every value, or the only one that another keyword allows.
_TRUE: tuple[object, ...] = (True, {})
_WITHOUT_EFFECT: Mapping[str, tuple[object, ...]] = {
    "uniqueItems": (False,),
    "nullable": (False,),
    "not": (False,),
    "propertyNames": (*_TRUE, {"type": "string"}, {"type": ["string"]}),
    "unevaluatedProperties": _TRUE,
    "unevaluatedItems": _TRUE,
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "minContains": (0,),
}


def grammar_schema(schema: object, param: str, *, lenient: bool = False) -> dict[str, Any]:
    """Returns the schema as llguidance's compiler takes it, its treatment of white space included.

    Raises InvalidParameter(param) that names the unsupported keyword and its place; `lenient`
    drops it instead. The compiler checks the rest.
    """
    if schema is True:
        schema = {}
    if schema is False:
        raise InvalidParameter(param, "the schema is false, which no value satisfies")
    if not isinstance(schema, Mapping):
        raise InvalidParameter(param, "the schema must be an object")
    walked = _Walk(param, lenient).root(schema)
    items, at = RowCount(walked).largest()
    if items > MAX_ROW_ITEMS:
        where = "the schema" if at == "#" else f"the schema at {_shown(at)}"
        raise InvalidParameter(
            param,
            f"{where} has too many optional properties and alternatives at one place: "
            f"{items}, and at most {MAX_ROW_ITEMS} are supported",
        )
    return {**walked, "x-guidance": {"whitespace_pattern": WHITESPACE}}


def enforceable_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the part of any schema that can be enforced: faulty parts are dropped, the innermost
    first."""
    try:
        walked = _Walk("", True, drops=True).root(schema)
    except InvalidParameter:
        return {}
    walked = without_faults(walked)
    return {} if RowCount(walked).largest()[0] > MAX_ROW_ITEMS else walked


class _Walk:
    """One pass over one schema, which counts bounded quantities."""

    def __init__(self, param: str, lenient: bool, *, drops: bool = False) -> None:
        """`drops`: parts with other faults are dropped too, the innermost one."""
        self._param = param
        self._lenient = lenient
        self._drops = drops
        self._num_schemas = 0
        self._num_key_patterns = 0
        self._patterns: set[str] = set()
        self._joins_at: str | None = None  # where a value has to satisfy two schemas at once

    def root(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        walked = self.schema(schema, "#", 0)
        # What a text has to match at once is compiled into one automaton, which grows with each
        # by a factor.
        if self._joins_at is not None and len(self._patterns) > MAX_JOINED_PATTERNS:
            raise self._error(
                self._joins_at,
                f"joins schemas, and there are more than {MAX_JOINED_PATTERNS} different patterns "
                "and formats: too much to enforce",
            )
        return walked

    def schema(self, schema: Mapping[str, Any], at: str, depth: int) -> dict[str, Any]:
        """Returns the schema checked and narrowed. `at` is its JSON pointer, for errors."""
        self._num_schemas += 1
        if self._num_schemas > MAX_SUBSCHEMAS:
            raise self._error("#", f"has more than {MAX_SUBSCHEMAS} schemas in it")
        if depth > MAX_DEPTH:
            raise self._error(at, f"is nested more than {MAX_DEPTH} deep")
        walked = {}
        schema = _with_null(schema)
        unknown = [
            keyword
            for keyword in schema
            if keyword not in _ENFORCED and not _restricts_nothing(keyword, schema)
        ]
        if unknown:
            self._refuse(at, f"uses {_listed(unknown)}, which is not supported")
        for keyword, value in schema.items():
            if keyword not in _ENFORCED:
                continue
            try:
                walked[keyword] = self._member(keyword, value, f"{at}/{keyword}", depth)
            except InvalidParameter:
                if not self._drops:
                    raise
        self._replace_look_aheads(walked)
        self._narrow_format(walked, at)
        self._check_num_properties(walked, at)
        self._check_interval(walked, at)
        self._count_patterns(walked, at)
        return walked

    def _member(self, keyword: str, value: Any, at: str, depth: int) -> Any:
        if keyword in _NAMED_SCHEMAS and isinstance(value, Mapping):
            most = MAX_KEY_PATTERNS if keyword == "patternProperties" else MAX_PROPERTIES
            if len(value) > most:
                raise self._error(at, f"has more than {most} members")
            for name in value:
                self._check_value(name, at)
            return {name: self._inner(each, f"{at}/{name}", depth) for name, each in value.items()}
        if keyword in _SCHEMAS:
            if isinstance(value, list):
                return [self._inner(each, f"{at}/{i}", depth) for i, each in enumerate(value)]
            return self._inner(value, at, depth)
        if keyword == "multipleOf":
            self._check_multiple(value, at)
        elif keyword in _VALUES:
            self._check_value(value, at)
        return value

    def _inner(self, value: Any, at: str, depth: int) -> Any:
        if isinstance(value, Mapping):
            try:
                return self.schema(value, at, depth + 1)
            except InvalidParameter:
                if not self._drops:
                    raise
                return {}
        if isinstance(value, bool):
            return value
        if self._drops:
            return {}
        raise self._error(at, "must be a schema: an object or a boolean")

    def _replace_look_aheads(self, schema: dict[str, Any]) -> None:
        pattern = schema.get("pattern")
        parts = without_look_ahead(pattern) if isinstance(pattern, str) else None
        if parts is not None:
            others = schema.get("allOf")
            joined = others if isinstance(others, list) else []
            schema["pattern"] = parts[0]
            schema["allOf"] = [*joined, *({"pattern": part} for part in parts[1:])]

    def _narrow_format(self, schema: dict[str, Any], at: str) -> None:
        """Replaces the format by keywords that enforce exactly its promise."""
        name = schema.pop("format", None)
        kinds = schema.get("type", "string")
        if name is None or (kinds != "string" and not _is_among("string", kinds)):
            return  # a number's format: it defines its storage
        if not isinstance(name, str) or name not in FORMATS:
            return  # an annotation
        if name in PATTERNS and "pattern" not in schema:
            schema["pattern"] = PATTERNS[name]
        elif name in PATTERNS:
            others = schema.get("allOf")
            pattern = {"pattern": PATTERNS[name]}
            schema["allOf"] = [*others, pattern] if isinstance(others, list) else [pattern]
        else:
            schema["format"] = name
            given = schema.get("maxLength")
            most = MAX_LENGTHS.get(name)
            if most is not None and not (isinstance(given, int) and given < most):
                schema["maxLength"] = most

    def _check_num_properties(self, schema: dict[str, Any], at: str) -> None:
        """Drops or refuses minProperties: a grammar cannot detect that two keys are equal."""
        least, required = schema.get("minProperties"), schema.get("required")
        if not isinstance(least, int) or least < 2:
            return
        del schema["minProperties"]
        if not isinstance(required, list) or len(set(map(str, required))) < least:
            self._refuse(at, "uses 'minProperties' above 1 for properties that are not required")

    def _count_patterns(self, schema: Mapping[str, Any], at: str) -> None:
        named = schema.get("patternProperties")
        keys = tuple(named) if isinstance(named, Mapping) else ()
        self._num_key_patterns += len(keys)
        if self._num_key_patterns > MAX_ALL_KEY_PATTERNS:
            raise self._error("#", f"has more than {MAX_ALL_KEY_PATTERNS} patternProperties in all")
        texts = (schema.get("pattern"), schema.get("format"), *keys)
        self._patterns.update(text for text in texts if isinstance(text, str))
        inner = _IN_PLACE & schema.keys()
        if "allOf" in inner or (inner and len(schema.keys() - _BESIDE) > 1):
            self._joins_at = at

    def _check_interval(self, schema: Mapping[str, Any], at: str) -> None:
        """Refuses open intervals into which llguidance 1.9.1 lets their whole end, where the other
        end is a fraction next to it: 0 into (0, 0.5)."""
        kinds = schema.get("type", "number")
        if kinds != "number" and not _is_among("number", kinds):
            return
        lows = _ends(schema, "minimum", "exclusiveMinimum")
        highs = _ends(schema, "maximum", "exclusiveMaximum")
        if not lows or not highs:
            return
        low, low_is_open = max(lows)
        high, high_is_closed = min((end, not is_open) for end, is_open in highs)
        from_whole = low_is_open and low % 1 == 0 and high < low + 1
        to_whole = not high_is_closed and high % 1 == 0 and low > high - 1
        if from_whole or to_whole:
            self._refuse(at, "uses a whole number as the open end of an interval shorter than 1")

    def _check_value(self, value: Any, at: str, depth: int = 0) -> None:
        """Checks a value that stands in the schema for itself, or is a part of one."""
        if depth > MAX_VALUE_DEPTH:
            raise self._error(at, f"has a value that is nested more than {MAX_VALUE_DEPTH} deep")
        if isinstance(value, str):
            if len(value) > MAX_TEXT_CHARS:
                raise self._error(at, f"has a text of more than {MAX_TEXT_CHARS} characters")
        elif isinstance(value, int):
            if not -MAX_EXACT <= value <= MAX_EXACT:
                raise self._error(at, "has a number beyond 2**53, which cannot be kept exactly")
        elif isinstance(value, list | Mapping):
            if len(value) > MAX_VALUES:
                raise self._error(at, f"has more than {MAX_VALUES} values")
            for each in value:
                self._check_value(each, at, depth + 1)
                if isinstance(value, Mapping):
                    self._check_value(value[each], at, depth + 1)

    def _check_multiple(self, value: Any, at: str) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._error(at, "must be a number")
        digits = "".join(map(str, Decimal(str(value)).normalize().as_tuple().digits))
        if int(digits) > MAX_MULTIPLE:
            raise self._error(at, f"must be at most {MAX_MULTIPLE}, its decimal point left out")

    def _refuse(self, at: str, why: str) -> None:
        """Raises, unless lenient: leaving it out lets through outputs that the schema forbids."""
        if not self._lenient:
            raise self._error(at, why)

    def _error(self, at: str, why: str) -> InvalidParameter:
        where = "the schema" if at == "#" else f"the schema at {_shown(at)}"
        return InvalidParameter(self._param, f"{where} {why}")


def _with_null(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a schema with OpenAPI's `nullable: true` as a type and a value."""
    kinds = schema.get("type")
    if schema.get("nullable") is not True or not isinstance(kinds, str | list):
        return schema
    changed = {name: value for name, value in schema.items() if name != "nullable"}
    listed = [kinds] if isinstance(kinds, str) else kinds
    changed["type"] = listed if "null" in listed else [*listed, "null"]
    values = schema.get("enum")
    if isinstance(values, list) and None not in values:
        changed["enum"] = [*values, None]
    return changed


def _listed(keywords: list[str]) -> str:
    shown = ", ".join(repr(keyword[:MAX_SHOWN]) for keyword in keywords[:MAX_LISTED])
    left = len(keywords) - MAX_LISTED
    return f"{shown} and {left} more" if left > 0 else shown


def _restricts_nothing(keyword: str, schema: Mapping[str, Any]) -> bool:
    """Returns whether every value that the schema allows without a keyword is allowed with it."""
    value = schema[keyword]
    if keyword in _ANNOTATIONS or keyword.startswith("x-"):
        return True
    if keyword == "if":
        return all(schema.get(branch, True) in _TRUE for branch in ("then", "else"))
    if keyword in ("then", "else"):
        return "if" not in schema or value in _TRUE
    if keyword in ("minContains", "maxContains") and "contains" not in schema:
        return True
    if keyword == "contains" and schema.get("minContains") == 0 and "maxContains" not in schema:
        return True
    if keyword == "propertyNames" and isinstance(value, Mapping):
        value = {name: each for name, each in value.items() if name not in _ANNOTATIONS}
    values = _WITHOUT_EFFECT.get(keyword, ())
    return any(type(value) is type(one) and value == one for one in values)


def _ends(schema: Mapping[str, Any], closed: str, opened: str) -> list[tuple[float, bool]]:
    """Returns bounds on one side, each with whether it is open: a boolean in older drafts."""
    value, exclusive = schema.get(closed), schema.get(opened)
    ends = [(value, exclusive is True), (exclusive, True)]
    return [(end, is_open) for end, is_open in ends if _is_real(end)]


def _is_real(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_among(kind: str, kinds: object) -> bool:
    return isinstance(kinds, list) and kind in kinds


def _shown(at: str) -> str:
    return at if len(at) <= MAX_SHOWN else f"{at[: MAX_SHOWN // 2]}...{at[-MAX_SHOWN // 2 :]}"


# String formats, each narrowed to texts that every parser of it accepts. If the grammar compiler's
# own format is wider (it allows the 30th of February and leap seconds), a pattern or a length
# defined here replaces it. Times are RFC 3339's with capital T and Z, without
# leap seconds; years go from 0001 to 9999.

_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?"
    "(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)

# Those with a pattern defined here; the others are the compiler's.
PATTERNS: Mapping[str, str] = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
}
MAX_LENGTHS: Mapping[str, int] = {"hostname": 253, "email": 254}
FORMATS = frozenset({*PATTERNS, *MAX_LENGTHS, "duration", "ipv4", "ipv6", "uri", "uuid"})
