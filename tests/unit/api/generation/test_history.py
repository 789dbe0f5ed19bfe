"""Turns that clients send back: earlier calls as each family's template writes them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from api.dialects.chat.protocol import ChatRequest
from api.dialects.chat.request import chat_input
from api.generation.models import ServedModel
from api.generation.prompt import prepare_prompt
from api.generation.validation import parse_request
from shared.messages import InvalidParameter
from shared.text.text_model import load_text
from tests.contract.shared.text import templates
from tests.support.checkpoints import card_of, make_checkpoint
from tests.support.tool_models import make_family_checkpoint
from tests.support.tool_templates import FAMILIES
from tests.support.written_calls import WRITTEN

TOOL = {"type": "function", "function": {"name": "get_weather", "description": "W."}}
ARGUMENTS = '{"city": "Oslo", "days": 2}'


def served(path: Path) -> ServedModel:
    card, blobs = card_of(path, structured_output=True)
    return ServedModel(card, load_text(card, blobs))


def prompt_of(model: ServedModel, messages: list[dict[str, Any]], **members: Any) -> str:
    body = {"model": "m", "messages": messages, "tools": [TOOL], **members}
    plan = prepare_prompt(model, chat_input(parse_request(body, ChatRequest)))
    return model.text.tokenizer.decode(plan.token_ids, skip_special_tokens=False)


def conversation(*ids: str) -> list[dict[str, Any]]:
    """A question, and a call with its result for each id."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Weather?"}]
    for call_id in ids:
        function = {"name": "get_weather", "arguments": ARGUMENTS}
        call = {"id": call_id, "type": "function", "function": function}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call_id, "content": "Fine."})
    return messages


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_of_any_model_is_written_as_the_family_writes_it(
    family: str, tmp_path: Path
) -> None:
    model = served(make_family_checkpoint(tmp_path, family))
    for call_id in ("call_0123456789abcdef01234567", "toolu_1", "x" * 60, "é"):
        prompt = prompt_of(model, conversation(call_id))
        if family == "mistral-list":
            assert re.search(
                r'\[TOOL_CALLS\] \[\{"name": "get_weather", "arguments": \{"city": "Oslo", '
                r'"days": 2\}, "id": "[a-z0-9]{9}"\}\]',
                prompt,
            )
        elif family == "gpt-oss":
            header = "assistant to=functions.get_weather<|channel|>commentary json<|message|>"
            assert f"<|start|>{header}{ARGUMENTS}<|call|>" in prompt
        elif family == "phi4-mini":  # its template leaves the marker out
            assert f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}' in prompt
        else:
            assert WRITTEN[family]([("get_weather", ARGUMENTS)]) in prompt
        assert "Fine." in prompt


def test_mistrals_ids_are_short_and_as_different_as_they_were(tmp_path: Path) -> None:
    model = served(make_family_checkpoint(tmp_path, "mistral-list"))
    prompt = prompt_of(model, conversation("call_1", "call_2", "Ab3456789"))
    ids = re.findall(r'"id": "([^"]*)"', prompt)
    assert len(set(ids)) == 3
    assert ids[2] == "Ab3456789"
    assert re.findall(r"\[CALL\]([a-zA-Z0-9]{9})", prompt) == ids
    assert prompt == prompt_of(model, conversation("call_1", "call_2", "Ab3456789"))


def test_kimis_ids_are_counted_through_the_conversation(tmp_path: Path) -> None:
    model = served(make_family_checkpoint(tmp_path, "kimi-k2"))
    prompt = prompt_of(model, conversation("a", "b"))
    assert "functions.get_weather:0<|tool_call_argument_begin|>" in prompt
    assert "functions.get_weather:1<|tool_call_argument_begin|>" in prompt
    assert "## Return of functions.get_weather:1\n" in prompt


def test_a_turn_with_several_calls_is_several_messages_of_harmonys(tmp_path: Path) -> None:
    """The template has the first call of a message only, and no text beside reasoning."""
    model = served(make_family_checkpoint(tmp_path, "gpt-oss"))
    calls = [
        {"id": call_id, "function": {"name": name, "arguments": "{}"}}
        for call_id, name in (("a", "get_weather"), ("b", "now"))
    ]
    turn = {"role": "assistant", "content": "So.", "reasoning": "Hm.", "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": each, "content": f"of {each}"} for each in "ba"]
    prompt = prompt_of(model, [*conversation(), turn, *results], reasoning_effort="high")
    assert "Reasoning: high" in prompt
    assert prompt.count("<|channel|>analysis<|message|>Hm.\nSo.<|end|>") == 1
    order = ["to=functions.get_weather", '"of a"', "to=functions.now", '"of b"']
    assert sorted(order, key=prompt.index) == order
    assert prompt.endswith("<|start|>assistant")


def test_llamas_templates_are_given_one_call_in_a_message(tmp_path: Path) -> None:
    model = served(make_checkpoint(tmp_path, chat_template=templates.LLAMA31_TOOLS))
    calls = [
        {"id": each, "function": {"name": "get_weather", "arguments": f'{{"city": "{each}"}}'}}
        for each in ("Oslo", "Rome")
    ]
    turn = {"role": "assistant", "content": None, "tool_calls": calls}
    results = [
        {"role": "tool", "tool_call_id": each, "content": f"of {each}"} for each in ("Oslo", "Rome")
    ]
    prompt = prompt_of(model, [*conversation(), turn, *results])
    order = ['{"city": "Oslo"}', "of Oslo", '{"city": "Rome"}', "of Rome"]
    assert sorted(order, key=prompt.index) == order


def test_calls_in_a_format_that_is_not_known_are_text_and_cannot_be_required(
    tmp_path: Path,
) -> None:
    model = served(make_checkpoint(tmp_path, chat_template=templates.COMMAND_R_TOOLS))
    user = [{"role": "user", "content": "hi"}]
    assert "get_weather" in prompt_of(model, user, parallel_tool_calls=False)
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        with pytest.raises(InvalidParameter) as caught:
            prompt_of(model, user, tool_choice=choice)
        assert (caught.value.param, caught.value.code) == ("tool_choice", "tools_not_supported")
