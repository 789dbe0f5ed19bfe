"""What the grammars of a turn let a model say: nothing but calls that can be read and are right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from api.generation.call_grammars import CALL_GRAMMARS
from api.generation.grammar_writer import ReasoningRule
from api.generation.grammars import (
    answer_grammar,
    any_grammar,
    can_bound,
    tool_grammar,
)
from api.generation.tools import ToolUse
from api.output_parsers.events import Reasoning, Text, ToolArguments, ToolCall
from api.output_parsers.format_parser import family_of
from api.output_parsers.parser import Thinking
from shared.messages import Grammar, GrammarKind, InvalidParameter
from shared.text.tool_formats import ToolFormat
from tests.support.grammar_model import TOOLS, Model, checked_calls, tool_use
from tests.support.tool_models import (
    make_hermes_checkpoint,
    make_llama3_checkpoint,
    make_spelled_checkpoint,
)

MAKERS = {
    "hermes": make_hermes_checkpoint,
    "spelled": make_spelled_checkpoint,
    "llama3": make_llama3_checkpoint,
}


@pytest.fixture(scope="module", params=MAKERS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    name = request.param
    return Model(MAKERS[name], tmp_path_factory.mktemp(name) / "model")


def test_every_tool_format_has_a_grammar_and_a_parser() -> None:
    assert set(CALL_GRAMMARS) == set(ToolFormat) - {ToolFormat.TEXT}
    assert all(family_of(form).read for form in ToolFormat)


def grammar_for(model: Model, use: ToolUse, thinking: Thinking, **more: Any) -> Grammar:
    return tool_grammar(use, model.form, ReasoningRule(thinking), model.token_id, **more)


@pytest.mark.parametrize("thinking", Thinking)
@pytest.mark.parametrize("parallel", [True, False])
def test_every_output_that_must_call_does_and_rightly(
    model: Model, thinking: Thinking, parallel: bool
) -> None:
    use = tool_use(TOOLS, "required", parallel)
    grammar = grammar_for(model, use, thinking)
    num_ended = 0
    for seed in range(25):
        text, ended = model.sample(grammar, seed)
        events = model.read(text, use, thinking)
        if not ended:
            continue
        num_ended += 1
        assert not any(isinstance(event, Text) for event in events), text
        calls = checked_calls(events)
        assert calls
        assert parallel or len(calls) == 1
    if thinking is not Thinking.OPEN:  # a random model does not find out of its thoughts
        assert num_ended


def test_a_named_tool_is_the_one_that_is_called(model: Model) -> None:
    named = {"type": "function", "function": {"name": "put"}}
    use = tool_use(TOOLS, named, True)
    grammar = grammar_for(model, use, Thinking.NO)
    for seed in range(10):
        text, ended = model.sample(grammar, seed)
        if ended:
            assert checked_calls(model.read(text, use, Thinking.NO)) == ["put"]


@pytest.mark.promise(
    "Clients: a named function is called exactly once, a required one at least once, in every "
    "dialect"
)
@pytest.mark.parametrize("parallel", [True, False])
def test_a_named_tool_is_called_once_and_a_required_one_at_least_once(
    model: Model, parallel: bool
) -> None:
    named = {"type": "function", "function": {"name": "now"}}
    once, some = (
        grammar_for(model, tool_use(TOOLS, choice, parallel), Thinking.NO)
        for choice in (named, "required")
    )
    call = written(model, "now", "{}")
    assert model.accepts(once, call)
    assert not model.accepts(once, "")
    assert not model.accepts(once, f"{call}\n{call}")
    assert not model.accepts(once, f"{call}; {call}")
    assert model.accepts(some, call)
    assert not model.accepts(some, "")
    several = parallel and model.form is ToolFormat.HERMES
    assert model.accepts(some, f"{call}\n{call}") is several


@pytest.mark.parametrize("parallel", [True, False])
def test_a_call_that_has_begun_among_text_is_right(model: Model, parallel: bool) -> None:
    """No output calls what may not be called, or with arguments that the schema forbids."""
    use = tool_use(TOOLS, "auto", parallel)
    grammar = grammar_for(model, use, Thinking.MAYBE)
    call = written(model, "now", "{}")
    wrong = written(model, "get_weather", '{"city": "Oslo", "days": 99}')
    unknown = written(model, "rm", "{}")
    assert model.accepts(grammar, "Just text, no { call.")
    assert model.accepts(grammar, "")
    assert model.accepts(grammar, call)
    assert not model.accepts(grammar, wrong)
    assert not model.accepts(grammar, unknown)
    if model.form is ToolFormat.HERMES:
        assert model.accepts(grammar, f"I look.\n{call}\nDone <tool_ and </tool_call so.")
        assert model.accepts(grammar, f"<think>\nhm, {{ hm\n</think>\n\n{call}")
        assert model.accepts(grammar, f"{call}\n{call}") is parallel
        assert not model.accepts(grammar, f"I look. {wrong}")
    else:
        assert not model.accepts(grammar, '{"answer": 1}')
    for seed in range(10):
        text, ended = model.sample(grammar, seed)
        if ended:
            checked_calls(model.read(text, use, Thinking.MAYBE))


def written(model: Model, name: str, arguments: str) -> str:
    if model.form is ToolFormat.HERMES:
        return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    return f'{{"name": "{name}", "parameters": {arguments}}}'


def test_reasoning_comes_first_where_the_model_may_write_it(model: Model) -> None:
    use = tool_use(TOOLS, "required", True)
    call = written(model, "now", "{}")
    thought = "let me see, <b>\n</think>\n\n"
    for thinking, text, fits in (
        (Thinking.NO, call, True),
        (Thinking.NO, f"<think>{thought}{call}", False),
        (Thinking.MAYBE, call, True),
        (Thinking.MAYBE, f"<think>\n{thought}{call}", True),
        (Thinking.MAYBE, f"{thought}{call}", False),
        (Thinking.OPEN, f"{thought}{call}", True),
        (Thinking.OPEN, call, False),
        (Thinking.OPEN, f"{thought}text", False),
    ):
        assert model.accepts(grammar_for(model, use, thinking), text) is fits, (thinking, text)


@pytest.mark.parametrize(
    ("answer", "good", "bad"),
    [
        (Grammar(GrammarKind.JSON_SCHEMA, '{"type":"integer","maximum":99}'), "42", "x"),
        (Grammar(GrammarKind.REGEX, r"a\/b|c"), "a/b", "a"),
        (Grammar(GrammarKind.LARK, 'start: "x" tail\ntail: /a+/'), "xaa", "x"),
    ],
    ids=["schema", "regex", "lark"],
)
def test_a_response_format_combines_with_reasoning_and_calls(
    model: Model, answer: Grammar, good: str, bad: str
) -> None:
    assert answer_grammar(answer, ReasoningRule(Thinking.NO), model.token_id) is answer
    behind = answer_grammar(answer, ReasoningRule(Thinking.MAYBE), model.token_id)
    assert model.accepts(behind, good)
    assert model.accepts(behind, f"<think>so</think>\n\n{good}")
    assert not model.accepts(behind, bad)
    use = tool_use(TOOLS, "auto", True)
    beside = grammar_for(model, use, Thinking.MAYBE, answer=answer)
    call = written(model, "now", "{}")
    for text, fits in ((good, True), (call, True), (bad, False), (f"hm {call}", False)):
        assert model.accepts(beside, text) is fits, text
        assert model.accepts(beside, f"<think>so</think>\n{text}") is fits, text
    must = tool_use(TOOLS, "required", True)
    assert not model.accepts(grammar_for(model, must, Thinking.NO, answer=answer), good)


def test_the_style_is_the_one_that_models_write(model: Model) -> None:
    use = tool_use(TOOLS, "required", True)
    grammar = grammar_for(model, use, Thinking.NO)
    assert model.accepts(grammar, written(model, "get_weather", '{"city": "Ç", "days": 2}'))
    assert not model.accepts(grammar, written(model, "get_weather", '{"city":"Ç","days":2}'))


def test_what_cannot_be_enforced_of_a_schema_is_left_out_unless_the_tool_is_strict() -> None:
    parameters = {"type": "object", "properties": {"a": {"not": {"type": "null"}}}}

    def grammar(*, strict: bool) -> Grammar:
        function = {"name": "f", "strict": strict, "parameters": parameters}
        use = tool_use([{"type": "function", "function": function}], "required", True)
        return tool_grammar(
            use, ToolFormat.LLAMA3_JSON, ReasoningRule(Thinking.NO), lambda token: None
        )

    assert "null" not in grammar(strict=False).text
    with pytest.raises(InvalidParameter, match="'not'") as refused:
        grammar(strict=True)
    assert refused.value.param == "tools.0.function.parameters"


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("more", "is_open"),
    [
        ({}, False),
        ({"additionalProperties": False}, False),
        ({"additionalProperties": True}, True),
        ({"patternProperties": {"^b": {"type": "integer"}}}, True),
        ({"required": ["a", "b"]}, True),
        ({"minProperties": 2, "required": ["a", "b"]}, True),
        ({"allOf": [{"properties": {"b": {"type": "integer"}}, "required": ["b"]}]}, True),
    ],
)
def test_arguments_have_the_properties_that_the_tool_names(
    model: Model, more: dict[str, Any], is_open: bool, strict: bool
) -> None:
    """A schema that says nothing of others is not a wish for others, which no function takes."""
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}, **more}
    function = {"name": "f", "strict": strict, "parameters": parameters}
    use = tool_use([{"type": "function", "function": function}], "required", True)
    grammar = grammar_for(model, use, Thinking.NO)
    assert model.accepts(grammar, written(model, "f", '{"a": 1, "b": 2}')) is is_open
    if not is_open:
        assert model.accepts(grammar, written(model, "f", '{"a": 1}'))


def test_reasoning_events_come_before_the_calls(model: Model) -> None:
    if model.form is not ToolFormat.HERMES:
        return
    use = tool_use(TOOLS, "required", True)
    text = f"<think>hm</think>\n\n{written(model, 'now', '{}')}"
    events = model.read(text, use, Thinking.MAYBE)
    assert [type(event) for event in events] == [Reasoning, ToolCall, ToolArguments]


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(make_hermes_checkpoint, tmp_path_factory.mktemp("thinker") / "model")


@pytest.mark.parametrize("thinking", [Thinking.OPEN, Thinking.MAYBE])
def test_the_reasoning_ends_where_its_budget_does_and_anything_may_follow(
    thinker: Model, thinking: Thinking
) -> None:
    assert can_bound(thinker.token_id)
    grammar = any_grammar(ReasoningRule(thinking, budget=5), thinker.token_id)
    opened, closed = thinker.token_id("<think>"), thinker.token_id("</think>")
    assert opened is not None
    matcher = thinker.compiler.matcher(grammar)
    if thinking is Thinking.MAYBE:
        matcher.consume_token(opened)
    word = thinker.text.tokenizer.encode("a")[-1]
    for _ in range(5):
        allowed = np.flatnonzero(np.frombuffer(matcher.compute_logit_bias(), np.uint8))
        assert {word, closed} <= set(allowed.tolist())
        assert not set(thinker.card.eos_token_ids) & set(allowed.tolist())
        assert matcher.consume_token(word)
    forced = np.flatnonzero(np.frombuffer(matcher.compute_logit_bias(), np.uint8))
    assert forced.tolist() == [closed]
    assert matcher.consume_token(closed)
    everything = np.frombuffer(matcher.compute_logit_bias(), np.uint8)
    assert np.count_nonzero(everything) == thinker.card.vocab_size


def test_reasoning_may_close_before_its_budget_and_be_left_out(thinker: Model) -> None:
    grammar = any_grammar(ReasoningRule(Thinking.MAYBE, budget=50), thinker.token_id)
    assert thinker.accepts(grammar, "<think>\nI see.\n</think>\n\nYes <tool_call> or no.")
    assert thinker.accepts(grammar, "Yes.")
    assert not thinker.accepts(grammar, "Yes. <think>")
    assert not thinker.accepts(grammar, "\n<think>" + "a b c d " * 40 + "</think>Yes.")


def test_a_budget_holds_before_an_answer_and_before_calls(thinker: Model) -> None:
    bound = ReasoningRule(Thinking.OPEN, budget=3)
    answer = answer_grammar(Grammar(GrammarKind.REGEX, "yes|no"), bound, thinker.token_id)
    use = tool_use(TOOLS[1:2], "required", True)
    for grammar, text in (
        (answer, "yes"),
        (
            tool_grammar(use, thinker.form, bound, thinker.token_id),
            '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        ),
    ):
        assert thinker.accepts(grammar, f"a</think>{text}")
        assert not thinker.accepts(grammar, f"{'a b c d ' * 9}</think>{text}")
