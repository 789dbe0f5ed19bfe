from __future__ import annotations

import copy
import datetime
import threading
from typing import Any

import pytest

from shared.messages import InvalidParameter
from shared.text.base import TextInvalid
from shared.text.chat_template import JinjaChatTemplate
from tests.support.table import table

USER = {"role": "user", "content": "hi"}
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m['content'] + '|' }}{% endfor %}"
EITHER = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endif %}|{% endfor %}"
)
PARTS = (
    "{% for m in messages %}{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endfor %}"
)


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def render(source: str, messages: Any = (USER,), **kwargs: Any) -> str:
    return JinjaChatTemplate(source, {}).render(messages, **kwargs)


@pytest.mark.parametrize(
    ("source", "content", "wanted"),
    [
        (PLAIN, "a", "[user]a|"),
        (PLAIN, parts("a", "b"), "[user]a\nb|"),
        (PLAIN, [], "[user]|"),
        ("{{ messages[0].content | upper }}", parts("a"), "A"),
        ("{{ messages }}", "a", "[{'role': 'user', 'content': 'a'}]"),
        ("{{ messages[0].content }}", parts("a"), "a"),
        ("{{ messages[0].content | tojson }}", parts("a"), '"a"'),
        (EITHER, "a", "a|"),
        (EITHER, parts("a", "b"), "<a><b>|"),
        (PARTS, "ab", "<ab>"),
        (PARTS, parts("a", "b"), "<a><b>"),
    ],
)
def test_content_takes_the_form_that_the_template_takes(
    source: str, content: Any, wanted: str
) -> None:
    assert render(source, [{"role": "user", "content": content}]) == wanted


def test_the_form_of_content_is_found_for_each_role() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ m.content | trim }}{% else %}"
        + EITHER.removeprefix("{% for m in messages %}").removesuffix("|{% endfor %}")
        + "{% endif %}|{% endfor %}"
    )
    messages = [
        {"role": "system", "content": parts("a", "b")},
        {"role": "user", "content": parts("c", "d")},
        {"role": "developer", "content": parts("e", "f")},
    ]
    assert render(source, messages) == "a\nb|<c><d>|e\nf|"


@table(
    "content",
    [
        5,
        {"text": "a"},
        ["a"],
        [{"type": "image_url", "image_url": {"url": "x"}}],
        [{"type": "text"}],
        [{"type": "text", "text": 5}],
        [{"type": ["text"], "text": "a"}],
        [{}],
    ],
)
@table("source", [PLAIN, EITHER, PARTS])
def test_content_that_is_no_text_is_refused(source: str, content: Any) -> None:
    with pytest.raises(InvalidParameter) as refused:
        render(source, [{"role": "user", "content": content}])
    assert refused.value.param == "messages"


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text"])
def test_text_parts_go_by_several_names(kind: str) -> None:
    assert render(EITHER, [{"role": "user", "content": [{"type": kind, "text": "a"}]}]) == "<a>|"


def test_a_refusal_part_is_text() -> None:
    content = [{"type": "refusal", "refusal": "no"}]
    assert render(PLAIN, [USER, {"role": "assistant", "content": content}]).endswith("no|")


def calls(arguments: Any) -> list[dict[str, Any]]:
    function = {"name": "f", "arguments": arguments}
    call = {"id": "c", "type": "function", "function": function}
    return [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]


OBJECTS = "{{ messages[-1].tool_calls[0].function.arguments | tojson if messages[-1].tool_calls }}"
TEXTS = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{{ 'call ' + c.function.arguments }}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "arguments", "wanted"),
    [
        (OBJECTS, {"a": "é"}, '{"a": "é"}'),
        (OBJECTS, '{"a": "é"}', '{"a": "é"}'),
        (OBJECTS, "", "{}"),
        (OBJECTS, "{broken", '"{broken"'),
        (OBJECTS, "[1]", '"[1]"'),
        (OBJECTS, "[" * 100_000, '"' + "[" * 100_000 + '"'),
        (TEXTS, {"a": "é"}, 'call {"a": "é"}'),
        (TEXTS, '{"a": "é"}', 'call {"a": "é"}'),
        (TEXTS, "{broken", "call {broken"),
    ],
    ids=str,
)
def test_tool_call_arguments_take_the_form_that_the_template_takes(
    source: str, arguments: Any, wanted: str
) -> None:
    assert render(source, calls(arguments)) == wanted


@pytest.mark.parametrize("tool_calls", [5, "x", [5], {"a": 1}])
def test_tool_calls_that_are_none_are_refused(tool_calls: Any) -> None:
    with pytest.raises(InvalidParameter) as refused:
        render(PLAIN, [{"role": "assistant", "content": "", "tool_calls": tool_calls}])
    assert refused.value.param == "messages"


def test_the_callers_messages_are_not_touched() -> None:
    messages = [*calls('{"a": 1}'), {"role": "user", "content": parts("a"), "name": None}]
    before = copy.deepcopy(messages)
    render(EITHER, messages, tools=[{"type": "function"}])
    assert messages == before


@pytest.mark.parametrize(
    "messages",
    [[], ["hi"], [None], [{}], [{"content": "a"}], [{"role": 5, "content": "a"}], [USER] * 10_001],
    ids=lambda value: str(value)[:30],
)
def test_what_is_no_conversation_is_refused(messages: Any) -> None:
    with pytest.raises(InvalidParameter) as refused:
        render("x", messages)
    assert refused.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].nothing.more }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 / 0 }}",
        "{{ messages[9]['role'] }}",
        "{{ {}.x.y }}",
        "{{ messages | tojson(indent=[]) }}",
    ],
)
def test_whatever_a_template_raises_is_an_error_of_messages(source: str) -> None:
    with pytest.raises(InvalidParameter, match="refused by the chat template") as refused:
        render(source)
    assert refused.value.param == "messages"


@pytest.mark.parametrize("tools", [[5], ["x"], [None]])
def test_tools_that_are_no_objects_are_refused(tools: Any) -> None:
    with pytest.raises(InvalidParameter) as refused:
        render(PLAIN, tools=tools)
    assert refused.value.param == "tools"


def test_arguments_that_nest_too_deeply_are_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"a": deep}
    for source in (OBJECTS, TEXTS):
        with pytest.raises(InvalidParameter):
            render(source, calls(deep))


def test_the_reason_of_a_refusal_is_short() -> None:
    with pytest.raises(InvalidParameter) as refused:
        render(
            "{{ raise_exception(messages[0].content) }}", [{"role": "user", "content": "x" * 9999}]
        )
    assert len(refused.value.message) < 600


def test_the_templates_own_words_reach_the_caller() -> None:
    with pytest.raises(InvalidParameter, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{% for %}",
        "{{ messages",
        "{% generation %}",
        "{% include 5 5 %}",
        "{{ '' | what }}",
        "{{ 10 ** 5000 }}",
    ],
)
def test_a_template_that_does_not_compile_is_refused_at_once(source: str) -> None:
    with pytest.raises(TextInvalid, match="does not compile"):
        JinjaChatTemplate(source, {})


def test_a_default_template_is_needed() -> None:
    with pytest.raises(TextInvalid, match="'default'"):
        JinjaChatTemplate({"tool_use": "x"}, {})


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro f(n) %}{{ f(n - 1) + f(n - 1) if n }}{% endmacro %}{{ f(60) }}",
        "{{ 'a' * 999999999 }}",
        "{{ [1] * 999999999 }}",
        "{{ range(999999999) | list }}",
        "{% set n = namespace(s='a') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}"
        "{% endfor %}",
        "{% set n = namespace(s='a') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}"
        "{% endfor %}",
        "{% for i in range(9999) %}{{ 'a' * 9999 }}{% endfor %}",
        "{% for i in [1, [2, [3]]] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    ],
)
def test_work_without_end_is_refused(source: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        render(source)
    assert refused.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['sys'] }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ namespace(__class__='x') }}",
        "{% set n = namespace() %}{% set n._private = 1 %}",
        "{{ dict.__class__.__mro__ }}",
        "{{ ('{0.__class__}').format('x') }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ messages[0].clear() }}",
        "{{ _penstock_step.__self__ }}",
        "{% import 'os' as os %}",
        "{% include '/etc/passwd' %}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_a_template_reaches_no_python(source: str) -> None:
    try:
        text = render(source)
    except InvalidParameter:
        return
    assert text in ("", "None")  # an undefined value renders as nothing


def test_the_output_is_bounded() -> None:
    template = JinjaChatTemplate(PLAIN, {}, max_chars=100)
    assert len(template.render([{"role": "user", "content": "a" * 90}])) == 97
    with pytest.raises(InvalidParameter, match="too long"):
        template.render([{"role": "user", "content": "a" * 100}])


def test_text_that_is_no_unicode_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="surrogate"):
        render(PLAIN, [{"role": "user", "content": "\ud800"}])


@pytest.mark.parametrize(
    "name", ["messages", "tools", "add_generation_prompt", "_x", "_penstock_step"]
)
def test_variables_that_are_not_the_callers_cannot_be_set(name: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        render(PLAIN, extra={name: 1})
    assert refused.value.param == "chat_template_kwargs"


def test_extra_variables_reach_the_template() -> None:
    source = "{{ enable_thinking }} {{ documents[0].title if documents is not none }}"
    assert render(source, extra={"enable_thinking": False}) == "False "
    assert render(source, extra={"documents": [{"title": "T"}]}) == " T"


def test_special_tokens_are_variables_and_unset_ones_are_nothing() -> None:
    template = JinjaChatTemplate("{{ bos_token }}{{ eos_token }}{{ bos_token is defined }}", {})
    assert template.render([USER]) == "False"
    template = JinjaChatTemplate("{{ bos_token }}x{{ eos_token }}", {"bos_token": "<s>"})
    assert template.render([USER]) == "<s>x"


def test_the_date_is_todays() -> None:
    template = JinjaChatTemplate(
        "{{ strftime_now('%d %b %Y') }}", {}, now=lambda: datetime.datetime(2026, 2, 3)
    )
    assert template.render([USER]) == "03 Feb 2026"


def test_what_is_set_inside_a_generation_tag_stays_there() -> None:
    source = "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}"
    assert render(source) == "21"


def test_large_numbers_may_be_added() -> None:
    assert render("{{ 4000000000 + 4000000000 }} {{ 90000 * 90000 }}") == "8000000000 8100000000"


def test_threads_share_one_template() -> None:
    template = JinjaChatTemplate(
        "{% set n = namespace(t='') %}{% for m in messages %}{% set n.t = n.t ~ m.content %}"
        "{% endfor %}{{ n.t }}",
        {},
    )
    wrong: list[str] = []

    def work(letter: str) -> None:
        for _ in range(50):
            text = template.render([{"role": "user", "content": letter}] * 20)
            if text != letter * 20:
                wrong.append(text)

    threads = [threading.Thread(target=work, args=(letter,)) for letter in "abcdefgh"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
