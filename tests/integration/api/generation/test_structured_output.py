"""Structured output through the whole service, from a model of random weights."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

from tests.integration.api.chat_service import ECHO_HERMES, ENFORCED, module_chat_service
from tests.support.lazy_import import lazy_import
from tests.support.redis_server import redis_url  # noqa: F401
from tests.support.service_fixtures import openai_client

jsonschema = lazy_import("jsonschema")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "born": {"type": "string", "format": "date"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "born", "tags"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
# The model begins with nothing that looks like reasoning, and has room for all the white space that
# the schemas leave it.
PARAMS: dict[str, Any] = {
    "model": ENFORCED,
    "messages": [{"role": "user", "content": "Who?"}],
    "max_tokens": 2000,
    "reasoning_effort": "none",
}


class Gate(BaseModel):
    """What the SDK makes a strict schema of."""

    number: int = Field(ge=1, le=9)
    state: Literal["open", "shut"]
    keeper: str | None = Field(max_length=4)


base_url = module_chat_service(ECHO_HERMES, ENFORCED)
client = openai_client


def is_person(text: str) -> bool:
    draft = jsonschema.Draft202012Validator
    validator = draft(PERSON, format_checker=draft.FORMAT_CHECKER)
    return bool(validator.is_valid(json.loads(text)))


@pytest.mark.promise(
    "Grammars: every complete output is valid against its schema (220 random schemas, formats "
    "checked)"
)
def test_an_answer_is_valid_by_the_schema_streamed_or_not(client: OpenAI) -> None:
    whole = client.chat.completions.create(**PARAMS, response_format=FORMAT, seed=1)
    assert whole.choices[0].finish_reason == "stop"
    text = whole.choices[0].message.content
    assert text is not None
    assert is_person(text)
    chunks = list(
        client.chat.completions.create(**PARAMS, response_format=FORMAT, seed=1, stream=True)
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text


def test_the_sdk_parses_into_a_class(client: OpenAI) -> None:
    parsed = client.chat.completions.parse(**PARAMS, response_format=Gate, seed=2)
    gate = parsed.choices[0].message.parsed
    assert isinstance(gate, Gate)
    with client.chat.completions.stream(**PARAMS, response_format=Gate, seed=2) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == gate


def test_several_choices_are_each_valid(client: OpenAI) -> None:
    answer = client.chat.completions.create(**PARAMS, response_format=FORMAT, n=4, seed=3)
    texts = {choice.message.content or "" for choice in answer.choices}
    assert len(texts) > 1
    assert all(map(is_person, texts))


def test_a_json_object_is_one(client: OpenAI) -> None:
    for seed in range(10):
        answer = client.chat.completions.create(
            **PARAMS, response_format={"type": "json_object"}, seed=seed
        )
        if answer.choices[0].finish_reason == "stop":
            assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)
            return
    raise AssertionError("no object came to its end")


@pytest.mark.parametrize(
    ("members", "pattern"),
    [
        ({"guided_regex": r"[a-f]{3}-\d{2}"}, r"[a-f]{3}-[0-9]{2}"),
        ({"guided_choice": ["open", "shut", "half-open"]}, "open|shut|half-open"),
        ({"guided_json": {"enum": [7, "x"]}}, r'7|"x"'),
        ({"guided_grammar": 'start: "gate " /[1-9]/ ("," " gate " /[1-9]/){1,2}'}, None),
        ({"guided_grammar": 'root ::= "a" ("b" | "c")+ "d"'}, "a[bc]+d"),
        ({"structured_outputs": {"choice": ["left"]}}, "left"),
    ],
)
def test_the_extensions_hold_in_both_dialects(
    client: OpenAI, members: dict[str, Any], pattern: str | None
) -> None:
    pattern = pattern or "gate [1-9](, gate [1-9]){1,2}"
    chat = client.chat.completions.create(**PARAMS, seed=4, extra_body=members)
    completion = client.completions.create(
        model=ENFORCED, prompt="A gate:", max_tokens=100, seed=4, extra_body=members
    )
    for text in (chat.choices[0].message.content, completion.choices[0].text):
        assert re.fullmatch(pattern, text or ""), text
    assert completion.choices[0].finish_reason == "stop"


def test_stop_strings_and_limits_cut_a_structured_answer(client: OpenAI) -> None:
    cut = client.chat.completions.create(
        **{**PARAMS, "max_tokens": 3}, response_format=FORMAT, seed=5
    )
    assert cut.choices[0].finish_reason == "length"
    stopped = client.chat.completions.create(
        **PARAMS, response_format=FORMAT, seed=5, stop='"born"'
    )
    assert stopped.choices[0].finish_reason == "stop"
    assert '"name"' in (stopped.choices[0].message.content or "")
    assert "born" not in (stopped.choices[0].message.content or "")


def test_log_probabilities_are_of_the_allowed_tokens(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        **PARAMS, logprobs=True, top_logprobs=5, seed=6, extra_body={"guided_choice": ["on", "off"]}
    )
    received = answer.choices[0].logprobs
    assert received is not None
    for entry in received.content or []:
        assert all(top.token and top.token in "on off" for top in entry.top_logprobs)


def test_responses_keep_to_their_text_format(client: OpenAI) -> None:
    params: dict[str, Any] = {
        "model": ENFORCED,
        "input": "Who?",
        "max_output_tokens": 2000,
        "temperature": 0,
        "reasoning": {"effort": "none"},
        "text_format": Gate,
    }
    whole = client.responses.parse(**params)
    with client.responses.stream(**params) as received:
        done = [event for event in received if event.type == "response.output_text.done"]
        final = received.get_final_response()
    stored = client.responses.retrieve(whole.id)
    assert isinstance(whole.output_parsed, Gate)
    assert whole.output_parsed == final.output_parsed == done[0].parsed
    assert stored.text is not None
    assert stored.text.format is not None
    assert stored.text.format.to_dict() == whole.text.format.to_dict()
    assert stored.text.format.type == "json_schema"
