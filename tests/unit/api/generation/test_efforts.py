"""An effort becomes the template's nearest word, on or off, or is named as ignored."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from api.dialects.chat.protocol import ChatRequest
from api.dialects.chat.request import chat_input
from api.dialects.messages.protocol import MessageRequest
from api.dialects.messages.request import PARAM_NAMES as MESSAGE_NAMES
from api.dialects.messages.request import message_prompt
from api.dialects.responses.protocol import ResponseRequest
from api.dialects.responses.request import chat_input as response_input
from api.generation.efforts import EFFORTS
from api.generation.ignored_parameters import IgnoredMembers, report_ignored, request_ignored
from api.generation.models import ServedModel
from api.generation.prompt import PreparedPrompt, prepare_prompt
from api.generation.validation import parse_request
from shared.messages import InvalidParameter
from shared.text.text_model import load_text
from tests.support.checkpoints import card_of, make_checkpoint

USER = {"role": "user", "content": "hi"}
PLAIN = "{{ messages[0].content }}"
PRINTS = PLAIN + " effort {{ reasoning_effort | default('medium') }}"
STRICT = (
    PLAIN + "{% if reasoning_effort is defined and reasoning_effort not in ['none', 'high'] %}"
    "{{ raise_exception('none or high') }}{% endif %} effort {{ reasoning_effort }}"
)
BRANCHES = (
    PLAIN + " {% set effort = reasoning_effort | default('') %}{% if effort == 'low' %}effort low"
    "{% elif effort == 'high' %}effort high{% elif effort == 'deep' %}effort deep{% endif %}"
)
ONE_BRANCH = PLAIN + " effort {% if reasoning_effort == 'none' %}none{% else %}some{% endif %}"
SWITCH = PLAIN + " effort {% if enable_thinking is defined and not enable_thinking %}off{% else %}"
SWITCH += "on{% endif %}"


@pytest.fixture
def model(tmp_path_factory: pytest.TempPathFactory, template: str) -> ServedModel:
    path = make_checkpoint(tmp_path_factory.mktemp("model"), chat_template=template)
    card, blobs = card_of(path, structured_output=True)
    return ServedModel(card, load_text(card, blobs))


def prepared(model: ServedModel, **members: Any) -> PreparedPrompt:
    chat = parse_request({"model": "m", "messages": [USER], **members}, ChatRequest)
    return prepare_prompt(model, chat_input(chat))


def shown(model: ServedModel, prompt: PreparedPrompt) -> str:
    return model.text.tokenizer.decode(prompt.token_ids).rpartition("effort ")[2]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (PRINTS, EFFORTS),
        (STRICT, ("none", "none", "high", "high", "high", "high", "high")),
        (BRANCHES, ("low", "low", "low", "high", "high", "high", "high")),
        (ONE_BRANCH, ("none", *["some"] * 6)),
        (SWITCH, ("off", *["on"] * 6)),
    ],
)
def test_a_template_gets_the_nearest_effort_that_it_supports(
    model: ServedModel, words: tuple[str, ...]
) -> None:
    for effort, word in zip(EFFORTS, words, strict=True):
        prompt = prepared(model, reasoning_effort=effort)
        is_replaced = word in EFFORTS and word != effort
        assert (shown(model, prompt), bool(prompt.ignored)) == (word, is_replaced)
        assert set(prompt.ignored) <= {"reasoning_effort"}


@pytest.mark.parametrize("template", [BRANCHES + SWITCH.removeprefix(PLAIN)])
def test_none_is_not_ignored_where_it_turns_thinking_off(model: ServedModel) -> None:
    for effort, is_replaced in (("none", False), ("minimal", True), ("low", False)):
        prompt = prepared(model, reasoning_effort=effort)
        assert shown(model, prompt) == ("off" if effort == "none" else "on")
        assert bool(prompt.ignored) == is_replaced, effort


@pytest.mark.parametrize(
    ("template", "reasons", "is_ignored"),
    [
        (PLAIN, False, False),
        (PLAIN, True, True),
        (SWITCH, True, False),
    ],
)
def test_thinking_that_cannot_be_disabled_is_named(
    model: ServedModel, template: str, reasons: bool, is_ignored: bool
) -> None:
    card = replace(model.card, reasoning_format="think" if reasons else None)
    model = ServedModel(card, model.text)
    body: dict[str, Any] = {"model": "m", "max_tokens": 5, "messages": [USER]}
    plain = message_prompt(model, parse_request(body, MessageRequest), "")
    disabled = {**body, "thinking": {"type": "disabled"}}
    prompt = message_prompt(model, parse_request(disabled, MessageRequest), "")
    names = [MESSAGE_NAMES[name] for name in prompt.ignored]
    assert names == (["thinking"] if is_ignored else [])
    assert (prompt.token_ids == plain.token_ids) == (template == PLAIN)


@pytest.mark.parametrize(
    ("template", "effort"),
    [
        *((PLAIN, effort) for effort in (*EFFORTS, "ultra", "")),
        *itertools.product((PRINTS, STRICT, SWITCH), ("ultra", "", "x" * 100_000, "{{ 7 }}")),
    ],
)
def test_an_effort_that_the_template_has_no_use_for_is_ignored(
    model: ServedModel, effort: str
) -> None:
    prompt = prepared(model, reasoning_effort=effort)
    assert prompt.token_ids == prepared(model).token_ids
    assert prompt.ignored == ("reasoning_effort",)


@pytest.mark.parametrize("template", [BRANCHES])
def test_an_effort_that_only_the_template_knows_is_used(model: ServedModel) -> None:
    prompt = prepared(model, reasoning_effort="deep")
    assert (shown(model, prompt), prompt.ignored) == ("deep", ())


@pytest.mark.parametrize("template", [SWITCH])
def test_a_variable_of_the_request_takes_precedence(model: ServedModel) -> None:
    kwargs = {"enable_thinking": False}
    prompt = prepared(model, reasoning_effort="high", chat_template_kwargs=kwargs)
    assert shown(model, prompt) == "off"


@pytest.mark.parametrize("template", [PLAIN])
def test_each_dialect_names_its_own_parameter(model: ServedModel) -> None:
    body: dict[str, Any] = {"model": "m", "max_tokens": 5, "messages": [USER]}
    message = parse_request({**body, "output_config": {"effort": "high"}}, MessageRequest)
    assert message_prompt(model, message, "").ignored == ("reasoning_effort",)
    body = {"model": "m", "input": "hi", "reasoning": {"effort": "high"}}
    response = response_input(parse_request(body, ResponseRequest), [], "job")
    assert response.reasoning_effort == "high"
    for refuse in (False, True):
        ignored = IgnoredMembers(refuse=refuse)
        token = request_ignored.set(ignored)
        if refuse:
            with pytest.raises(InvalidParameter) as refused:
                report_ignored(["reasoning_effort"], {"reasoning_effort": "reasoning.effort"})
            assert refused.value.param == "reasoning.effort"
            assert refused.value.code == "unsupported_parameter"
        else:
            report_ignored(["reasoning_effort"], {"reasoning_effort": "reasoning.effort"})
            assert ignored.text == "reasoning.effort"
        request_ignored.reset(token)
