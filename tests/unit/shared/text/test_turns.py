"""Conversations whose order of roles a chat template does not take."""

from __future__ import annotations

import json
from typing import Any

import jinja2
import pytest

from api.request_errors import invalid_parameter
from shared.messages import InvalidParameter
from shared.text.chat_template import JinjaChatTemplate
from tests.support.turn_templates import QWEN35, TURN_TEMPLATES

BOS = {"bos_token": "<s>"}
CALL_ID = "abcdefghi"
WITHOUT_TOOLS = {"gemma2", "gemma3", "deepseek-r1"}


def messages_of(roles: str) -> list[dict[str, Any]]:
    """One letter a message; its text is the letter and its number."""
    made: list[dict[str, Any]] = []
    for index, letter in enumerate(roles):
        text = f"{letter}-{index}."
        if letter == "C":
            function = {"name": "look", "arguments": '{"at": "x"}'}
            call = {"id": CALL_ID, "type": "function", "function": function}
            made.append({"role": "assistant", "content": text, "tool_calls": [call]})
        elif letter == "R":
            made.append({"role": "tool", "tool_call_id": CALL_ID, "name": "look", "content": text})
        else:
            role = {"S": "system", "U": "user", "A": "assistant"}[letter]
            made.append({"role": role, "content": text})
    return made


def texts_of(roles: str) -> list[str]:
    return [f"{letter}-{index}." for index, letter in enumerate(roles)]


@pytest.fixture(scope="module")
def templates() -> dict[str, JinjaChatTemplate]:
    return {name: JinjaChatTemplate(source, BOS) for name, source in TURN_TEMPLATES.items()}


def as_published(source: str, messages: list[dict[str, Any]]) -> str | None:
    """Returns what plain jinja2 renders; None where the template refuses."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = raise_exception
    environment.filters["tojson"] = json.dumps
    try:
        return environment.from_string(source).render(
            messages=messages, add_generation_prompt=True, **BOS
        )
    except jinja2.TemplateError:
        return None


ORDERS = [
    *("U", "SU", "SUAU", "SSU", "SSSUAU", "SUS", "US", "USAU", "SUSAU", "SUASU", "SUAUS", "SUAS"),
    *("UU", "SUUU", "SUAAU", "SUAUU", "AU", "SAU", "SSUUSAASU", "SUSSU"),
]
TOOL_ORDERS = [
    *("UCRAU", "SUCRU", "UCRS", "SUCRSAU", "UCRUAU", "UACRAU", "UACRACRAU", "SUCSRAU", "UCURAU"),
    *("USCRAUSCR", "SUCRRU"),
]


@pytest.mark.parametrize("name", TURN_TEMPLATES)
@pytest.mark.parametrize("roles", [*ORDERS, *TOOL_ORDERS])
def test_every_order_of_roles_is_rendered_whole(
    templates: dict[str, JinjaChatTemplate], name: str, roles: str
) -> None:
    if "C" in roles and name in WITHOUT_TOOLS:
        pytest.skip("the template has no tools")
    text = templates[name].render(messages_of(roles))
    shown = [part for part in texts_of(roles) if not (part.startswith("C") and part not in text)]
    places = [text.find(part) for part in shown]
    assert -1 not in places, text
    if "CSR" not in roles and "CUR" not in roles and name != "deepseek-r1":
        assert places == sorted(places), text


@pytest.mark.parametrize("name", TURN_TEMPLATES)
@pytest.mark.parametrize("roles", ["U", "SU", "SUAU", "SUAUAU"])
def test_a_plain_conversation_stays_as_it_is(
    templates: dict[str, JinjaChatTemplate], name: str, roles: str
) -> None:
    wanted = as_published(TURN_TEMPLATES[name], messages_of(roles))
    if wanted is not None:
        assert templates[name].render(messages_of(roles)) == wanted


@pytest.mark.parametrize("name", ["qwen3", "llama3"])
@pytest.mark.parametrize("roles", [*ORDERS, "SUCRU", "UCRS"])
def test_a_template_that_takes_every_order_gets_the_messages_unchanged(
    templates: dict[str, JinjaChatTemplate], name: str, roles: str
) -> None:
    messages = messages_of(roles)
    for message in messages:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = {"at": "x"}
    wanted = as_published(TURN_TEMPLATES[name], messages)
    assert templates[name].render(messages_of(roles)) == wanted


@pytest.mark.parametrize(
    ("name", "roles", "wanted"),
    [
        ("qwen3.5", "SSU", "SU"),
        ("qwen3.5", "US", "U"),
        ("qwen3.5", "SUAS", "SUAU"),
        ("qwen3.5", "SUASU", "SUAU"),
        ("qwen3.5", "UU", "UU"),
        ("qwen3.5", "UCRS", "UCRU"),
        ("ministral", "UCRS", "UCR"),
        ("mistral", "UU", "U"),
        ("mistral", "SUSAU", "SUAU"),
        ("gemma2", "SU", "U"),
        ("gemma2", "SSUAU", "UAU"),
        ("gemma3", "SSUAAU", "SUAU"),
        ("gpt-oss", "SUAS", "SUAU"),
        ("apertus", "SUSAU", "SUAU"),
    ],
)
def test_where_a_message_goes(
    templates: dict[str, JinjaChatTemplate], name: str, roles: str, wanted: str
) -> None:
    """`wanted`: the conversation that renders alike, but for texts that were joined."""
    text = templates[name].render(messages_of(roles))
    for index in range(len(roles)):
        for letter in "SUARC":
            text = text.replace(f"{letter}-{index}.", "x")
    alike = messages_of(wanted)
    for message in alike:
        message["content"] = "x"
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = {"at": "x"}
    published = as_published(TURN_TEMPLATES[name], alike)
    assert published is not None
    assert _collapsed(text) == _collapsed(published)


def _collapsed(text: str) -> str:
    while "x\n\nx" in text:
        text = text.replace("x\n\nx", "x")
    return text


@pytest.mark.parametrize("name", TURN_TEMPLATES)
@pytest.mark.parametrize(
    "roles", ["SSUAU", "USAU", "SUSAUSAU", "UUAUUAU", "SUASUAU", "UCRUACRSAU", "USCRACRUAU"]
)
def test_earlier_turns_keep_their_text_when_a_turn_is_appended(
    templates: dict[str, JinjaChatTemplate], name: str, roles: str
) -> None:
    if name == "deepseek-r1" or ("C" in roles and name in WITHOUT_TOOLS):
        pytest.skip("the template itself moves text, or has no tools")
    whole = templates[name].render(messages_of(roles), add_generation_prompt=False)
    for end in range(1, len(roles)):
        if roles[end] not in "AC" or roles[end - 1] in "AC":
            continue
        before = templates[name].render(messages_of(roles)[:end], add_generation_prompt=False)
        # Apertus ends a turn that has not ended.
        assert whole.startswith(before.removesuffix("<|assistant_end|>"))


def test_content_in_parts_is_joined() -> None:
    template = JinjaChatTemplate(QWEN35, BOS)
    parts = [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]
    messages = [
        {"role": "system", "content": "a"},
        {"role": "system", "content": parts},
        {"role": "user", "content": "d"},
    ]
    assert "<|im_start|>system\na\n\nbc<|im_end|>" in template.render(messages)


def test_a_conversation_without_a_user_gets_an_empty_turn(
    templates: dict[str, JinjaChatTemplate],
) -> None:
    for name in ("qwen3.5", "gemma2", "mistral"):
        assert "S-0." in templates[name].render(messages_of("S"))
        assert "A-1." in templates[name].render(messages_of("SA"))


def test_a_reason_that_is_a_sentence_is_left_as_one() -> None:
    template = JinjaChatTemplate("{{ raise_exception('System message comes first.') }}", {})
    with pytest.raises(InvalidParameter) as refused:
        template.render([{"role": "user", "content": "x"}])
    assert invalid_parameter(refused.value).message.endswith("comes first.")
    assert not invalid_parameter(refused.value).message.endswith("..")
