"""One conversation, two renderers: transformers' apply_chat_template is the reference."""

from __future__ import annotations

import copy
import functools
import json
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from shared.messages import InvalidParameter
from shared.text.chat_template import JinjaChatTemplate
from tests.contract.shared.text.templates import TEMPLATES
from tests.support.table import table

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}

SYSTEM = {"role": "system", "content": "Be brief, answer in ‘plain’ words."}
USER = {"role": "user", "content": "  Wie heißt 東京? 👩‍👩‍👧 <b>&amp;</b> \"q\"\n\n'x'\t "}
ANSWER = {"role": "assistant", "content": "Tōkyō.\n\n- so\n"}
MORE = {"role": "user", "content": "And e\u0301?"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather «now» for a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "the city"},
                    "unit": {"type": "string", "enum": ["c", "f"], "description": "°C or °F"},
                },
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "terms": {
                        "type": "array",
                        "items": {"type": "integer"},
                        "description": " terms ",
                    }
                },
                "required": ["terms"],
            },
        },
    },
]


def call(call_id: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


ASKING = {"role": "assistant", "content": "", "tool_calls": [call("abcdef123", city="Zürich")]}
ASKING_NULL = {**ASKING, "content": None}
ASKING_TWICE = {
    "role": "assistant",
    "content": "Two.",
    "tool_calls": [call("aaaaaaaaa", city="A"), call("bbbbbbbbb", city="B", unit="f")],
}
RESULT = {
    "role": "tool",
    "tool_call_id": "abcdef123",
    "name": "get_weather",
    "content": '{"degrees": 21, "sky": "heiter"}',
}
THOUGHT = {"role": "assistant", "content": "<think>\nhm\n\nhm\n</think>\n\nYes."}
REASONED = {"role": "assistant", "reasoning_content": "\nhm\n", "content": "Yes."}

CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "one turn": ([USER], None),
    "system": ([SYSTEM, USER], None),
    "three turns": ([USER, ANSWER, MORE], None),
    "many turns": ([SYSTEM, USER, ANSWER, MORE, ANSWER, USER], None),
    "ends with the assistant": ([SYSTEM, USER, ANSWER], None),
    "empty content": ([{"role": "user", "content": ""}], None),
    "roles that do not alternate": ([USER, MORE, ANSWER], None),
    "only a system message": ([SYSTEM], None),
    "tools": ([USER], TOOLS),
    "tools and system": ([SYSTEM, USER, ANSWER, MORE], TOOLS),
    "no tools in the list": ([USER], []),
    "a call": ([SYSTEM, USER, ASKING], TOOLS),
    "a call and its result": ([USER, ASKING, RESULT], TOOLS),
    "a call without content": ([USER, ASKING_NULL, RESULT, ANSWER, MORE], TOOLS),
    "two calls": (
        [
            USER,
            ASKING_TWICE,
            {**RESULT, "tool_call_id": "aaaaaaaaa"},
            {**RESULT, "tool_call_id": "bbbbbbbbb"},
        ],
        TOOLS,
    ),
    "thoughts in the text": ([USER, THOUGHT, MORE, THOUGHT], None),
    "thoughts apart": ([USER, REASONED, MORE, REASONED], None),
    "thoughts by another name": (
        [USER, {"role": "assistant", "thinking": "t", "content": "c"}],
        None,
    ),
}
EXTRAS: list[dict[str, Any]] = [
    {},
    {"enable_thinking": False},
    {"enable_thinking": True, "documents": [{"title": "T", "text": "body «»"}]},
    {"date_string": "01 Feb 2025", "custom": "set", "eos_token": "<other>"},
]

# Templates of formats that want arguments as JSON text: transformers leaves that to the caller.
WANT_TEXT = {"deepseek_r1"}


@functools.cache
def reference() -> PreTrainedTokenizerFast:
    vocabulary = {token: index for index, token in enumerate(SPECIAL_TOKENS.values())}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL_TOKENS)


@functools.cache
def template(name: str) -> JinjaChatTemplate:
    return JinjaChatTemplate(TEMPLATES[name], SPECIAL_TOKENS)


def with_arguments_as_text(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    messages = copy.deepcopy(messages)
    for message in messages:
        for item in message.get("tool_calls", ()):
            arguments = item["function"]["arguments"]
            item["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
    return messages


def expected(name: str, conversation: str, extra: dict[str, Any], *, prompt: bool) -> str | None:
    """None where transformers refuses."""
    messages, tools = CONVERSATIONS[conversation]
    if name in WANT_TEXT:
        messages = with_arguments_as_text(messages)
    try:
        text = reference().apply_chat_template(
            copy.deepcopy(messages),
            tools=tools,
            chat_template=TEMPLATES[name],
            add_generation_prompt=prompt,
            tokenize=False,
            **extra,
        )
    except Exception:  # whatever a template raises
        return None
    assert isinstance(text, str)
    return text


def rendered(
    name: str,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    extra: dict[str, Any],
    *,
    prompt: bool,
) -> str | None:
    """None where ours refuses."""
    try:
        return template(name).render(
            messages, tools=tools, add_generation_prompt=prompt, extra=extra
        )
    except InvalidParameter:
        return None


@pytest.mark.parametrize("name", TEMPLATES)
@table("conversation", CONVERSATIONS)
def test_rendering_equals_transformers(name: str, conversation: str) -> None:
    messages, tools = CONVERSATIONS[conversation]
    given = [messages, with_arguments_as_text(messages)]
    for extra in EXTRAS:
        for prompt in (False, True):
            wanted = expected(name, conversation, extra, prompt=prompt)
            for form in given:
                before = copy.deepcopy(form)
                text = rendered(name, form, tools, extra, prompt=prompt)
                assert form == before
                if not is_moved(wanted, messages):
                    assert text == wanted


def is_moved(wanted: str | None, messages: list[dict[str, Any]]) -> bool:
    """Returns whether transformers refuses the order of roles or leaves a message out, where ours
    moves messages: tests/unit/shared/text/test_turns.py."""
    roles = [message["role"] for message in messages]
    if "system" not in roles and roles[:2] != ["user", "user"]:
        return False
    texts = [message["content"].strip() for message in messages if message["role"] != "tool"]
    return wanted is None or any(text not in wanted for text in texts)


@table("name", TEMPLATES)
def test_every_template_renders_most_conversations(name: str) -> None:
    texts = [expected(name, conversation, {}, prompt=True) for conversation in CONVERSATIONS]
    assert sum(text is not None for text in texts) >= 3


def test_there_are_at_least_twenty_templates() -> None:
    assert len(TEMPLATES) >= 20


@pytest.mark.parametrize("name", ["gemma3_parts"])
def test_content_parts_reach_a_template_that_takes_them(name: str) -> None:
    parts = [{"type": "text", "text": " one "}, {"type": "text", "text": " two "}]
    messages = [{"role": "user", "content": parts}]
    assert template(name).render(messages) == reference().apply_chat_template(
        messages, chat_template=TEMPLATES[name], add_generation_prompt=True, tokenize=False
    )


def test_named_templates_are_chosen_as_transformers_chooses() -> None:
    sources = {"default": TEMPLATES["chatml"], "tool_use": TEMPLATES["hermes_tools"]}
    tokenizer = copy.deepcopy(reference())
    tokenizer.chat_template = sources
    ours = JinjaChatTemplate(sources, SPECIAL_TOKENS)
    for tools in (None, TOOLS, []):
        wanted = tokenizer.apply_chat_template(
            [USER], tools=tools, add_generation_prompt=True, tokenize=False
        )
        assert ours.render([USER], tools=tools) == wanted
        for name in sources:
            wanted = tokenizer.apply_chat_template(
                [USER],
                tools=tools,
                chat_template=name,
                add_generation_prompt=True,
                tokenize=False,
            )
            assert ours.render([USER], tools=tools, name=name) == wanted
