"""From a request to a prompt, a grammar and a reading: no service needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from api.dialects.chat.protocol import ChatRequest
from api.dialects.chat.request import chat_input
from api.dialects.responses.protocol import ResponseRequest
from api.dialects.responses.request import response_prompt
from api.generation.formatter import Timing
from api.generation.messages import template_messages
from api.generation.models import ServedModel
from api.generation.prompt import TOOL_SCHEMAS, PreparedPrompt, prepare_prompt
from api.generation.tools import MAX_TOOLS
from api.generation.validation import parse_request
from api.output_parsers.events import PlainParser, ToolCall
from api.output_parsers.parser import Thinking, thinking_after
from shared.messages import MAX_GRAMMAR_CHARS, GrammarKind, InvalidParameter
from shared.text.text_model import load_text
from shared.text.tool_formats import ReasoningFormat
from tests.support.checkpoints import card_of, make_checkpoint
from tests.support.tool_models import make_hermes_checkpoint, make_llama3_checkpoint

USER = {"role": "user", "content": "hi"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "description": "F."}}
OTHER: dict[str, Any] = {"type": "function", "function": {"name": "g"}}
NAMED = {"type": "function", "function": {"name": "g"}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def served(path: Path) -> ServedModel:
    card, blobs = card_of(path, structured_output=True)
    return ServedModel(card, load_text(card, blobs))


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return served(make_hermes_checkpoint(tmp_path_factory.mktemp("hermes")))


@pytest.fixture(scope="module")
def llama3(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return served(make_llama3_checkpoint(tmp_path_factory.mktemp("llama3")))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return served(make_checkpoint(tmp_path_factory.mktemp("plain")))


def chat(**members: Any) -> ChatRequest:
    return parse_request({"model": "m", "messages": [USER], **members}, ChatRequest)


def prepared(model: ServedModel, *, call_id_seed: str = "", **members: Any) -> PreparedPrompt:
    return prepare_prompt(model, chat_input(chat(**members), call_id_seed))


def read_messages(*messages: Any) -> list[dict[str, Any]]:
    return template_messages(chat(messages=list(messages)).messages)


def prompt_of(model: ServedModel, **members: Any) -> str:
    plan = prepared(model, **members)
    return model.text.tokenizer.decode(plan.token_ids, skip_special_tokens=False)


def test_the_prompt_ends_where_the_text_that_is_continued_does(
    hermes: ServedModel, llama3: ServedModel, plain: ServedModel
) -> None:
    for model in (hermes, llama3, plain):
        for content in ("So it", "So it ", "qzxjjxzq?", [{"type": "text", "text": "So it"}]):
            begun = {"role": "assistant", "content": content}
            text = content if isinstance(content, str) else "So it"
            prompt = prompt_of(model, messages=[USER, begun], continue_final_message=True)
            assert prompt.endswith(text)
            assert prompt.count("qzxjjxzq") == text.count("qzxjjxzq")
            assert USER["content"] in prompt


@pytest.mark.parametrize(
    "last",
    [
        USER,
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "ok", "tool_call_id": "c"},
    ],
)
def test_only_an_assistants_text_is_continued(hermes: ServedModel, last: dict[str, Any]) -> None:
    call = {"role": "assistant", "tool_calls": [CALL]}
    error = refused(hermes, messages=[USER, call, last], continue_final_message=True)
    assert error.param == "messages"


def test_a_continued_text_may_be_within_its_reasoning(hermes: ServedModel) -> None:
    for text, is_open in (("<think>\nI", True), ("<think>\nI\n</think>\n\nSo", False)):
        begun = {"role": "assistant", "content": text}
        plan = prepared(
            hermes,
            messages=[USER, begun],
            add_generation_prompt=False,
            continue_final_message=True,
            thinking_token_budget=9,
        )
        assert plan.new_parser.config.thinking is (Thinking.OPEN if is_open else Thinking.NO)
        assert (plan.grammar is not None) is is_open


def refused(model: ServedModel, **members: Any) -> InvalidParameter:
    with pytest.raises(InvalidParameter) as caught:
        prepared(model, **members)
    return caught.value


def test_tools_are_shown_to_the_template_in_one_form(hermes: ServedModel) -> None:
    requested = {**TOOL, "function": {**TOOL["function"], "strict": True, "parameters": None}}
    prompt = prompt_of(hermes, tools=[requested])
    assert (
        '{"type": "function", "function": {"name": "f", "description": "F.", '
        '"parameters": {"type": "object", "properties": {}}}}\n'
    ) in prompt
    assert prompt == prompt_of(hermes, tools=[TOOL])
    assert prompt_of(hermes, tools=[TOOL], tool_choice="none") == prompt_of(hermes)


@pytest.mark.parametrize(
    ("members", "is_enforced"),
    [
        ({}, False),
        ({"tools": [TOOL]}, False),
        ({"tools": [TOOL], "tool_choice": "auto"}, False),
        ({"tools": [TOOL], "tool_choice": "none", "parallel_tool_calls": False}, False),
        ({"tools": [TOOL], "parallel_tool_calls": False}, True),
        ({"tools": [TOOL], "tool_choice": "required"}, True),
        ({"tools": [TOOL, OTHER], "tool_choice": NAMED}, True),
        ({"tools": [{**TOOL, "function": {**TOOL["function"], "strict": True}}]}, True),
    ],
)
def test_a_grammar_is_used_where_something_has_to_hold(
    hermes: ServedModel, llama3: ServedModel, members: Mapping[str, Any], is_enforced: bool
) -> None:
    for model in (hermes, llama3):
        plan = prepared(model, **members)
        assert (plan.grammar is not None) is is_enforced


CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}


def test_a_structured_answer_is_a_grammar_of_the_turn(
    hermes: ServedModel, plain: ServedModel
) -> None:
    alone = prepared(plain, response_format=FORMAT).grammar
    assert alone is not None
    assert alone.kind is GrammarKind.JSON_SCHEMA
    guided = prepared(plain, guided_json=CITY).grammar
    assert guided == alone
    assert prepared(plain, response_format={"type": "text"}).grammar is None
    for members in ({}, {"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": "required"}):
        grammar = prepared(hermes, response_format=FORMAT, **members).grammar
        assert grammar is not None
        assert grammar.kind is GrammarKind.LARK  # around reasoning and calls
        assert ("tool_0" in grammar.text) is bool(members)
        assert ('"city"' in grammar.text) is (members.get("tool_choice") != "required")


def test_what_no_grammar_can_be_made_of_is_named(hermes: ServedModel, plain: ServedModel) -> None:
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/nothing"}}}
    for model in (hermes, plain):
        error = refused(model, response_format=bad)
        assert error.param == "response_format.json_schema.schema"
        error = refused(model, response_format=FORMAT, guided_regex="a")
        assert error.param == "guided_regex"
    strict = {"name": "f", "strict": True, "parameters": {"properties": {"a": {"$ref": "#/no"}}}}
    error = refused(hermes, tools=[{"type": "function", "function": strict}])
    assert error.param == "tools.0.function.parameters"
    without = replace(plain, card=replace(plain.card, structured_output=False))
    error = refused(without, response_format=FORMAT)
    assert error.code == "structured_output_not_supported"
    without = replace(hermes, card=replace(hermes.card, structured_output=False))
    assert refused(without, tools=[TOOL], tool_choice="required").param == "tools"


def test_allowed_tools_are_all_shown_and_only_they_are_called(hermes: ServedModel) -> None:
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
    plan = prepared(hermes, tools=[TOOL, OTHER], tool_choice=allowed)
    assert prompt_of(hermes, tools=[TOOL, OTHER], tool_choice=allowed) == prompt_of(
        hermes, tools=[TOOL, OTHER]
    )
    assert plan.grammar is not None
    parser = plan.new_parser()
    output = '<tool_call>{"name": "%s", "arguments": {}}</tool_call>'
    events = [*parser.push(output % "f" + output % "g"), *parser.finish()]
    assert [event.name for event in events if isinstance(event, ToolCall)] == ["g"]


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools"),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": [NAMED]}},
            "tool_choice.allowed_tools.mode",
        ),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
            "tool_choice.allowed_tools.tools",
        ),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [5]}},
            "tool_choice.allowed_tools.tools.0",
        ),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "auto",
                    "tools": [{"type": "function", "function": {"name": "rm"}}],
                },
            },
            "tool_choice.allowed_tools.tools.0.function.name",
        ),
        ({"type": "function"}, "tool_choice.function"),
        ({"type": "function", "function": {"name": "f", "x": 1}}, "tool_choice.function.x"),
        ({"type": "function", "function": {"name": "f"}, "x": 1}, "tool_choice.x"),
        (5, "tool_choice"),
    ],
)
def test_a_choice_that_makes_no_sense_is_refused_by_name(choice: Any, param: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        chat_input(chat(tools=[TOOL, OTHER], tool_choice=choice))
    assert caught.value.param == param


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_grammars_of_custom_tools_that_are_too_large_together_are_named(
    hermes: ServedModel, choice: str
) -> None:
    definition = "[a-c]" + "x" * 7_000
    form = {"type": "grammar", "syntax": "regex", "definition": definition}

    def unkept(count: int) -> list[str]:
        tools = [{"type": "custom", "name": f"t{index}", "format": form} for index in range(count)]
        body = {"model": "m", "input": "x", "tools": tools, "tool_choice": choice}
        request = parse_request(body, ResponseRequest)
        _, offered, plan = response_prompt(hermes, request, [], {}, "", must_fit=False)
        has_patterns = plan.grammar is not None and "xxxx" in plan.grammar.text
        assert has_patterns is not bool(offered.unkept)
        return list(offered.unkept)

    assert not unkept(2)
    assert len(unkept(MAX_GRAMMAR_CHARS // len(definition) + 1)) > 2


def test_a_strict_schema_that_cannot_be_enforced_is_refused(hermes: ServedModel) -> None:
    function = {"name": "f", "strict": True, "parameters": {"type": "object", "not": {}}}
    error = refused(hermes, tools=[{"type": "function", "function": function}])
    assert error.param == "tools.0.function.parameters"


def test_a_model_without_tools_refuses_them_and_their_traces(plain: ServedModel) -> None:
    error = refused(plain, tools=[TOOL])
    assert (error.param, error.code) == ("tools", "tools_not_supported")
    past = [USER, {"role": "assistant", "tool_calls": [CALL]}]
    assert refused(plain, messages=past).param == "messages.1.tool_calls"
    assert isinstance(prepared(plain).new_parser(), PlainParser)
    prompt_of(plain, tools=[TOOL], tool_choice="none")


def test_the_same_seed_gives_the_same_ids_to_each_choices_calls(hermes: ServedModel) -> None:
    def ids(seed: str) -> list[str]:
        plan = prepared(hermes, tools=[TOOL], call_id_seed=seed)
        output = '<tool_call>{"name": "f", "arguments": {}}</tool_call>' * 2
        events = [event for _ in range(2) for event in plan.new_parser().push(output)]
        return [event.call_id for event in events if isinstance(event, ToolCall)]

    assert ids("job") == ids("job")
    assert len({*ids("job"), *ids("other"), *ids(""), *ids("")}) == 16


def test_the_end_of_the_prompt_says_where_the_reasoning_stands() -> None:
    think = ReasoningFormat.THINK
    assert thinking_after("...assistant\n", think) is Thinking.MAYBE
    assert thinking_after("...assistant\n<think>\n", think) is Thinking.OPEN
    assert thinking_after("<think>\n\n</think>\n\n", think) is Thinking.NO
    assert thinking_after("<think>", None) is Thinking.NO


def test_messages_of_assistants_and_tools_keep_what_templates_need() -> None:
    calls = [{**CALL, "index": 0}, {**CALL, "id": "d"}]
    spoken = {"role": "assistant", "content": None, "tool_calls": calls, "reasoning": "hm"}
    sdk = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "parsed": None}
    result = {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "1"}]}
    _, assistant, tool = read_messages(USER, {**spoken, **sdk}, result)
    assert assistant == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [CALL, {**CALL, "id": "d"}],
    }
    assert list(assistant)[:2] == ["role", "content"]
    assert tool == {
        "role": "tool",
        "content": [{"type": "text", "text": "1"}],
        "tool_call_id": "c",
        "name": "f",
    }
    (refusal,) = read_messages({"role": "assistant", "content": None, "refusal": "no"})
    assert refusal["content"] == "no"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"tool_calls": {}}, "tool_calls"),
        ({"tool_calls": [CALL] * 129}, "tool_calls"),
        ({"tool_calls": [5]}, "tool_calls.0"),
        ({"tool_calls": [CALL, CALL]}, "tool_calls.1.id"),
        ({"tool_calls": [{**CALL, "type": "custom"}]}, "tool_calls.0.type"),
        ({"tool_calls": [{**CALL, "x": 1}]}, "tool_calls.0.x"),
        ({"tool_calls": [{"id": "c"}]}, "tool_calls.0.function"),
        ({"tool_calls": [{"id": "c", "function": 5}]}, "tool_calls.0.function"),
        ({"tool_calls": [{"id": "c", "function": {}}]}, "tool_calls.0.function.name"),
        (
            {"tool_calls": [{"id": "c", "function": {"name": "f"}}]},
            "tool_calls.0.function.arguments",
        ),
        ({"content": "x", "reasoning_content": 5}, "reasoning_content"),
        ({"content": "x", "function_call": {"name": "f"}}, "function_call"),
        ({"content": "x", "annotations": [1]}, "annotations"),
        ({"content": [{"type": "refusal"}]}, "content.0.refusal"),
        ({}, "content"),
    ],
)
def test_a_broken_message_of_an_assistant_is_refused_by_name(
    message: Mapping[str, Any], param: str
) -> None:
    with pytest.raises(InvalidParameter) as caught:
        read_messages({"role": "assistant", **message})
    assert caught.value.param == f"messages.0.{param}"


def test_times_are_reported_as_far_as_they_are_known() -> None:
    timing = Timing(submitted_s=10.0)
    timing.first_token_s, timing.last_token_s = 10.5, 11.5
    unheard = timing.metrics(11)
    assert unheard == {
        "time_to_first_token_ms": None,
        "generation_time_ms": 1000.0,
        "queue_time_ms": None,
        "mean_itl_ms": 100.0,
        "tokens_per_second": None,
    }
    timing.started_s = 10.25
    heard = timing.metrics(11)
    assert heard["queue_time_ms"] == 250.0
    assert heard["time_to_first_token_ms"] == 250.0
    assert heard["tokens_per_second"] == round(11 / 1.25, 1)
    assert timing.metrics(1)["mean_itl_ms"] is None
    assert Timing().metrics(0)["generation_time_ms"] is None


def many_tools(**function: Any) -> list[dict[str, Any]]:
    schema = {"type": "object", "properties": {"id": {"type": "integer"}}}
    return [
        {"type": "function", "function": {"name": f"t_{n}", "parameters": schema, **function}}
        for n in range(MAX_TOOLS)
    ]


@pytest.mark.parametrize("family", ["hermes", "llama3"])
def test_a_call_of_one_of_a_thousand_tools_can_be_required(
    request: pytest.FixtureRequest, family: str
) -> None:
    model: ServedModel = request.getfixturevalue(family)
    model = ServedModel(replace(model.card, max_model_len=10**6), model.text)
    few = prepared(model, tools=[TOOL, OTHER], tool_choice="required")
    assert few.ignored == ()
    many = prepared(model, tools=many_tools(), tool_choice="required")
    assert many.ignored == (TOOL_SCHEMAS,)
    assert many.grammar is not None
    assert all(name in many.grammar.text for name in ("TOOL_NAME", "t_"))
    assert prepared(model, tools=many_tools(), tool_choice="auto").ignored == ()


def test_schemas_of_strict_tools_are_enforced_or_the_request_is_refused(
    hermes: ServedModel,
) -> None:
    hermes = ServedModel(replace(hermes.card, max_model_len=10**6), hermes.text)
    with pytest.raises(InvalidParameter, match="too large"):
        prepared(hermes, tools=many_tools(strict=True), tool_choice="required")
