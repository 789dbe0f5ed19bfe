"""Writes the tables of parameters into docs/API.md from the OpenAPI document. `make docs` runs it;
`--check` only compares."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from generated_page import write_or_check

from api.generation.ignored_parameters import UNUSED_MEMBERS
from api.main import create_app
from api.reference.describe import GROUPS, WITHOUT_EFFECT
from api.settings import ApiSettings

PAGE = Path(__file__).with_name("API.md")
PLACE = re.compile(r"(<!-- make docs: ([\w /]+) -->\n).*?(<!-- end -->)", re.DOTALL)
BODIES = {
    "chat": "ChatRequest",
    "completions": "CompletionRequest",
    "embeddings": "EmbeddingRequest",
    "responses": "ResponseRequest",
    "messages": "MessageRequest",
    "generate": "GenerateRequest",
    "batches": "BatchRequest",
}
QUERIES = {"text": "/v1/jobs/{name}/text", "deployment": "/v1/deployment/stream"}
HEAD = "| parameter | values | default | meaning |\n| --- | --- | --- | --- |\n"
# Sections of the page with more about a parameter of chat.
MORE = {
    "max_tokens": "limits-of-one-response",
    "temperature": "sampling-defaults",
    "tools": "tools",
    "response_format": "structured-output",
    "reasoning_effort": "efforts",
    "thinking_token_budget": "reasoning",
    "logprobs": "log-probabilities",
    "return_metrics": "metrics",
    "chat_template": "chat-templates",
    "queue_timeout": "deadlines",
    "stream_interval": "stream-format",
    "durability": "durable-acceptance",
}
BOUNDS = (
    ("minimum", "maximum", ""),
    ("minLength", "maxLength", " characters"),
    ("minItems", "maxItems", " entries"),
    ("minProperties", "maxProperties", " members"),
)

Schema = Mapping[str, Any]


class Tables:
    """The tables of one document."""

    def __init__(self, document: Schema) -> None:
        self._paths: Mapping[str, Schema] = document["paths"]
        self._schemas: Mapping[str, Schema] = document["components"]["schemas"]

    def body(self, name: str) -> str:
        """Returns the parameters of a body: those that chat has as well are one line."""
        schema, chat = self._schemas[BODIES[name]], self._schemas[BODIES["chat"]]["properties"]
        others = {} if name == "chat" else chat
        rows, same = [], []
        for parameter in (one for group in schema[GROUPS] for one in group["parameters"]):
            described = schema["properties"][parameter]
            if WITHOUT_EFFECT in described:  # they have a table of their own
                continue
            if parameter in others and self._is_same(described, others[parameter]):
                same.append(f"`{parameter}`")
            else:
                is_required = parameter in schema.get("required", ())
                more = MORE.get(parameter) if name == "chat" else None
                rows.append(self._row(parameter, described, is_required, more))
        text = HEAD + "".join(rows)
        if same:
            text += f"\nAs in [chat](#parameters): {' '.join(same)}.\n"
        return text

    def query(self, path: str) -> str:
        """Returns the parameters of the query of a GET."""
        found = self._paths[path]["get"]["parameters"]
        rows = [
            self._row(one["name"], {**one["schema"], "description": one["description"]})
            for one in found
            if one["in"] == "query"
        ]
        return HEAD + "".join(rows)

    def _is_same(self, one: Schema, other: Schema) -> bool:
        return self._row("", one) == self._row("", other)

    def _row(
        self, name: str, schema: Schema, is_required: bool = False, more: str | None = None
    ) -> str:
        default = "required" if is_required else _default(schema)
        meaning = _cell(schema["description"]) + (f" [More](#{more})" if more else "")
        return f"| `{name}` | {self._values(schema)} | {default} | {meaning} |\n"

    def _values(self, schema: Schema) -> str:
        """Returns types, values and bounds of a schema, but null."""
        return ", or ".join(dict.fromkeys(self._branches(schema)))

    def _branches(self, schema: Schema) -> Iterator[str]:
        if "$ref" in schema:
            schema = self._schemas[schema["$ref"].rpartition("/")[2]]
        alternatives = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
        for alternative in alternatives:
            yield from self._branches(alternative)
        if alternatives or schema.get("type") == "null":
            return
        if values := schema.get("enum"):
            yield ", ".join(f"`{json.dumps(value)}`" for value in values)
            return
        kind = schema.get("type", "any")
        bounds = [
            _between(schema.get(least), schema.get(most)) + unit
            for least, most, unit in BOUNDS
            if least in schema or most in schema
        ]
        yield " ".join([kind, *bounds])


def _between(least: object, most: object) -> str:
    if least is None:
        return f"≤ {most}"
    return f"≥ {least}" if most is None else f"{least} to {most}"


def _default(schema: Schema) -> str:
    value = schema.get("default")
    return "" if value in (None, "", [], {}) else f"`{json.dumps(value)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _unused() -> str:
    """Returns the values without effect: a table of reported values, and a list of defaults."""
    rows: dict[tuple[str, ...], list[str]] = {}
    defaults: dict[str, list[str]] = {}
    for row in UNUSED_MEMBERS:
        dialects, values = ", ".join(row.dialects), row.values.text.replace("``", "empty")
        if row.is_reported:
            rows.setdefault((values, dialects, row.why), []).append(f"`{row.path}`")
        else:
            defaults.setdefault(dialects, []).append(f"`{row.path}` {values}")
    text = "| parameter | values | dialects | why |\n| --- | --- | --- | --- |\n"
    for (values, dialects, why), paths in rows.items():
        text += f"| {' '.join(paths)} | {values} | {dialects} | {why} |\n"
    text += "\nDefaults, neither reported nor refused:\n\n"
    return text + "".join(f"- {where}: {'; '.join(what)}\n" for where, what in defaults.items())


def render() -> str:
    tables = Tables(create_app(ApiSettings(redis_url="redis://127.0.0.1:1")).openapi())

    def filled(place: re.Match[str]) -> str:
        name = place[2]
        if name == "without effect":
            table = _unused()
        elif name in QUERIES:
            table = tables.query(QUERIES[name])
        else:
            table = tables.body(name)
        return place[1] + table + place[3]

    page, found = PLACE.subn(filled, PAGE.read_text())
    assert found == len(BODIES) + len(QUERIES) + 1, "each table has one place on the page"
    return page


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, render()))
