"""The grammars of many families' calls: what follows one is read as calls that are right."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from api.generation.grammar_writer import ReasoningRule
from api.generation.grammars import answer_grammar, tool_grammar
from api.generation.tools import ToolUse
from api.output_parsers.events import Text, ToolArguments, ToolCall
from api.output_parsers.parser import Thinking
from shared.messages import Grammar, GrammarKind
from shared.text.tool_formats import ReasoningFormat, ToolFormat, reasoning_format_of
from tests.support.grammar_model import TOOLS, Model, checked_calls, tool_use
from tests.support.tool_models import make_family_checkpoint
from tests.support.tool_templates import FAMILIES
from tests.support.written_calls import WRITTEN, Calls

NOW: Calls = [("now", "{}")]
WEATHER = ("get_weather", '{"city": "Oslo", "days": 2}')
SEEDS = 8  # random outputs of each grammar


class Spoken:
    """A model of a family, and what it writes."""

    def __init__(self, family: str, model: Model) -> None:
        self.model = model
        self.written = WRITTEN[family]
        self.reasoning = reasoning_format_of(model.card.reasoning_format)

    def said(self, text: str) -> str:
        """An answer, as the model writes one."""
        if self.model.form is ToolFormat.OPENAI:
            return f"<|channel|>final<|message|>{text}"
        return text

    def grammar(self, use: ToolUse, thinking: Thinking = Thinking.NO) -> Grammar:
        rule = ReasoningRule(thinking)
        if self.reasoning is not None:
            rule = ReasoningRule(thinking, None, self.reasoning)
        return tool_grammar(use, self.model.form, rule, self.model.token_id)

    def accepts(self, use: ToolUse, text: str, thinking: Thinking = Thinking.NO) -> bool:
        return self.model.accepts(self.grammar(use, thinking), text)


@pytest.fixture(scope="module", params=FAMILIES)
def spoken(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Spoken:
    family = request.param

    def make(path: object) -> object:
        return make_family_checkpoint(path, family)  # type: ignore[arg-type]

    return Spoken(family, Model(make, tmp_path_factory.mktemp(family) / "model"))  # type: ignore[arg-type]


@pytest.mark.parametrize("parallel", [True, False])
def test_random_outputs_that_must_call_are_right_calls(spoken: Spoken, parallel: bool) -> None:
    use = tool_use(TOOLS, "required", parallel)
    grammar, num_ended = spoken.grammar(use), 0
    for seed in range(SEEDS):
        text, ended = spoken.model.sample(grammar, seed)
        if not ended:
            continue
        num_ended += 1
        events = spoken.model.read(text, use, Thinking.NO)
        assert not any(isinstance(event, Text) for event in events), text
        calls = checked_calls(events)
        assert calls, text
        assert parallel or len(calls) == 1
    assert num_ended


def test_calls_with_any_arguments_are_kept_to_the_names_of_the_tools(spoken: Spoken) -> None:
    others = [{"type": "function", "function": {"name": f"get_{n}"}} for n in ("w", "weather_at")]
    use = replace(tool_use([*TOOLS, *others], "required", False), any_arguments=True)
    for name in ("get_weather", "get_w", "get_weather_at", "now"):
        assert spoken.accepts(use, spoken.written([(name, '{"who": "Ada", "at": [1, 2]}')])), name
        assert spoken.accepts(use, spoken.written([(name, "{}")])), name
    for name in ("get_", "get_we", "nowhere"):
        assert not spoken.accepts(use, spoken.written([(name, "{}")])), name


def test_calls_in_the_style_of_the_family_are_accepted(spoken: Spoken) -> None:
    use, once = (tool_use(TOOLS, "required", parallel) for parallel in (True, False))
    one, two = spoken.written([WEATHER]), spoken.written([WEATHER, *NOW])
    assert spoken.accepts(use, one)
    assert spoken.accepts(once, one)
    assert not spoken.accepts(once, two)
    if spoken.model.accepts(spoken.grammar(use), two):
        events = spoken.model.read(two, use, Thinking.NO)
        assert checked_calls(events) == ["get_weather", "now"]
    else:
        assert spoken.model.form in ONE_CALL


ONE_CALL = frozenset({ToolFormat.OPENAI})  # formats with one call to a turn


def test_calls_that_are_wrong_are_not_accepted_among_text(spoken: Spoken) -> None:
    use = tool_use(TOOLS, "auto", True)
    strict = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}, *TOOLS[1:]]
    assert tool_use(strict, "auto", True).is_enforced
    right = spoken.written(NOW)
    assert spoken.accepts(use, right)
    assert spoken.accepts(use, "")
    assert spoken.accepts(use, spoken.said("Just text."))
    for name, arguments in (("rm", "{}"), ("get_weather", '{"city": "Oslo", "days": 99}')):
        wrong = spoken.written([(name, arguments)])
        assert not spoken.accepts(use, wrong), wrong
    named = {"type": "function", "function": {"name": "put"}}
    assert not spoken.accepts(tool_use(TOOLS, named, True), right)


TAG = "</parameter>"  # of some families; in a text it would end it
PATTERN = rf"[b-d<\n]{{2,5}}|a(?:{TAG})?x*"
SAY = {
    "type": "object",
    "properties": {"input": {"type": "string", "pattern": f"^(?:{PATTERN})$"}},
    "required": ["input"],
    "additionalProperties": False,
}


def test_a_text_of_a_strict_tool_matches_its_pattern_as_a_whole(spoken: Spoken) -> None:
    function = {"name": "say", "parameters": SAY, "strict": True}
    use = tool_use([{"type": "function", "function": function}], "required", False)
    grammar = spoken.grammar(use)
    for text, fits in (("b<\nc", True), ("bbbbbb", False), ("axx", True), ("axb", False)):
        call = spoken.written([("say", json.dumps({"input": text}))])
        assert spoken.model.accepts(grammar, call) is fits, call
    num_ended = 0
    for seed in range(SEEDS):
        written, ended = spoken.model.sample(grammar, seed)
        events = spoken.model.read(written, use, Thinking.NO)
        arguments = "".join(event.text for event in events if isinstance(event, ToolArguments))
        num_ended += ended
        assert not ended or re.fullmatch(PATTERN, json.loads(arguments)["input"]), written
    assert num_ended


def test_reasoning_may_come_first(spoken: Spoken) -> None:
    if spoken.reasoning is None:
        return
    rule = ReasoningRule(Thinking.MAYBE, None, spoken.reasoning)
    use, call = tool_use(TOOLS, "required", True), spoken.written(NOW)
    behind = "<|start|>assistant" if spoken.model.form is ToolFormat.OPENAI else "\n"
    thought = f"{rule.opening}\nI see, hm.\n{rule.closing}{behind}"
    assert spoken.accepts(use, thought + call, Thinking.MAYBE)
    assert spoken.accepts(use, call, Thinking.MAYBE)
    assert spoken.accepts(use, thought.removeprefix(rule.opening) + call, Thinking.OPEN)
    assert not spoken.accepts(use, call, Thinking.OPEN)
    assert not spoken.accepts(use, thought + call, Thinking.NO)
    events = spoken.model.read(thought + call, use, Thinking.MAYBE)
    assert [event.name for event in events if isinstance(event, ToolCall)] == ["now"]


def test_markers_reach_the_parser_though_they_are_special(spoken: Spoken) -> None:
    """The text that the parser is given is that of the tokens, without special ones."""
    text = spoken.written([WEATHER])
    tokenizer = spoken.model.text.tokenizer
    assert tokenizer.decode(tokenizer.encode(text)) == text
    use = tool_use(TOOLS, "auto", True)
    events = spoken.model.read(tokenizer.decode(tokenizer.encode(text)), use, Thinking.NO)
    assert json.loads(WEATHER[1]) == {"city": "Oslo", "days": 2}
    assert checked_calls(events) == ["get_weather"]


def test_what_kind_of_arguments_they_are_is_apart_from_the_tools_name(spoken: Spoken) -> None:
    if spoken.model.form is not ToolFormat.OPENAI:
        return
    use = tool_use(TOOLS, "required", True)
    header = "<|channel|>commentary to=functions.now"
    for kind, fits in (
        (" <|constrain|>json", True),
        ("<|constrain|>json", True),
        (" json", True),
        ("json", False),
    ):
        assert spoken.accepts(use, f"{header}{kind}<|message|>{{}}") is fits
    behind = " to=functions.now<|channel|>commentary json<|message|>{}"
    assert spoken.accepts(use, behind)


def test_a_structured_answer_follows_its_marker(spoken: Spoken) -> None:
    if spoken.model.form is not ToolFormat.OPENAI:
        return
    rule = ReasoningRule(Thinking.MAYBE, None, ReasoningFormat.OPENAI)
    number = Grammar(GrammarKind.REGEX, "[0-9]+")
    alone = answer_grammar(number, rule, spoken.model.token_id)
    use = tool_use(TOOLS, "auto", True)
    beside = tool_grammar(use, ToolFormat.OPENAI, rule, spoken.model.token_id, number)
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    for grammar in (alone, beside):
        for before in ("", thought, thought * 2):
            for kind in ("", " <|constrain|>json"):
                answer = f"{before}<|channel|>final{kind}<|message|>42"
                assert spoken.model.accepts(grammar, answer)
                events = spoken.model.read(answer, use, Thinking.MAYBE)
                assert "".join(e.text for e in events if isinstance(e, Text)) == "42"
        assert not spoken.model.accepts(grammar, "42")
        assert not spoken.model.accepts(grammar, "<|channel|>final<|message|>x")
    assert spoken.model.accepts(beside, spoken.written(NOW))
