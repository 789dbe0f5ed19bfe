"""Structured answers of the real SmolLM2, whose vocabulary lacks tokens for eight bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest

from tests.support.real_model import real_checkpoint
from tests.support.redis_server import new_namespace
from tests.support.service_processes import MODEL, service_processes

pytestmark = pytest.mark.packages
SEEDS = range(4)
MAX_TOKENS = 48
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "price": {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", "maxLength": 8},
        "kind": {"enum": ["fruit", "\U00040000", "tool"]},
        "tags": {"type": "object", "propertyNames": {"type": "string"}, "maxProperties": 1},
    },
    "required": ["name", "price", "kind"],
    "additionalProperties": False,
}
# The model's own has no place for tools.
TEMPLATE = """\
{% if tools %}<|im_start|>system
Call one of {{ tools | tojson }} as <tool_call>
{"name": ..., "arguments": ...}
</tool_call><|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TOOL = {
    "type": "function",
    "function": {"name": "put", "parameters": {**SCHEMA, "not": {"required": ["x"]}}},
}


@pytest.fixture(scope="module")
def base_url(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory, namespace = tmp_path_factory.mktemp("real_model"), new_namespace()
    template = directory / "tools.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
    settings = {
        "RUNNER": "model",
        "DEVICE": "cpu",
        "MAX_MODEL_LEN": "1024",
        "CHAT_TEMPLATE": str(template),
        "TOOL_FORMAT": "hermes",
    }
    with service_processes(
        redis_url, namespace, real_checkpoint(), directory, **settings
    ) as frontend:
        yield frontend.base_url


def choice(base_url: str, seed: int, **members: Any) -> dict[str, Any]:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Describe something in a shop as JSON."}],
        "max_tokens": MAX_TOKENS,
        "temperature": 1.0,
        "seed": seed,
        **members,
    }
    answered = httpx.post(f"{base_url}/v1/chat/completions", json=body, timeout=110)
    assert answered.status_code == 200, answered.text
    found: dict[str, Any] = answered.json()["choices"][0]
    return found


def format_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}}


@pytest.mark.parametrize(
    ("members", "schema"),
    [
        ({"response_format": format_of(SCHEMA)}, SCHEMA),
        ({"response_format": {"type": "json_object"}}, {"type": "object"}),
    ],
)
def test_json_is_whole_and_valid_or_cut_by_its_limit(
    base_url: str, members: dict[str, Any], schema: dict[str, Any]
) -> None:
    for seed in SEEDS:
        answer = choice(base_url, seed, **members)
        if answer["finish_reason"] == "stop":
            jsonschema.validate(json.loads(answer["message"]["content"]), schema)
        else:
            assert answer["finish_reason"] == "length"


def test_texts_match_their_expression_or_are_one_of_the_choices(base_url: str) -> None:
    for seed in SEEDS:
        answer = choice(base_url, seed, guided_regex=r"[^\x00-\x20]{2,6} (\x04|[0-9]{3})")
        assert re.fullmatch(r"[^\x00-\x20]{2,6} [0-9]{3}", answer["message"]["content"])
        answer = choice(base_url, seed, guided_choice=["yes", "no", "ye\x04"])
        assert answer["message"]["content"] in ("yes", "no")


def test_a_forced_call_has_valid_arguments_or_is_cut(base_url: str) -> None:
    for seed in SEEDS:
        answer = choice(base_url, seed, tools=[TOOL], tool_choice="required", max_tokens=96)
        if answer["finish_reason"] == "tool_calls":
            for call in answer["message"]["tool_calls"]:
                jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
        else:
            assert answer["finish_reason"] == "length"


def test_what_needs_a_missing_byte_is_refused_by_the_characters_name(base_url: str) -> None:
    body = {"model": MODEL, "prompt": "a", "guided_choice": ["\x04"]}
    refused = httpx.post(f"{base_url}/v1/completions", json=body, timeout=60)
    assert refused.status_code == 400
    assert "U+0004" in refused.json()["error"]["message"]
    (model,) = httpx.get(f"{base_url}/v1/models", timeout=60).json()["data"]
    assert model["structured_output"] is True
