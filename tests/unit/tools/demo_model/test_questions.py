"""The question file: its small grammar, and what must hold of the file that ships."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.main import get_command

from penstock.cli.application import application
from tools.demo_model.questions import InvalidQuestions, expand, load_facts, parse_facts

REPOSITORY = Path(__file__).resolve().parents[4]
ONE = """
# a comment
## cancel
how: cancel [a|my] job; stop it
held: end my job
say: Send DELETE.
"""


def test_alternatives_expand_in_order_and_an_empty_one_leaves_no_gap() -> None:
    assert expand("what is [a|the] job [now|]") == [
        "what is a job now",
        "what is a job",
        "what is the job now",
        "what is the job",
    ]


def test_brackets_without_a_bar_are_plain_text() -> None:
    assert expand("what is [DONE]") == ["what is [DONE]"]


def test_a_pattern_that_explodes_is_refused() -> None:
    with pytest.raises(InvalidQuestions, match="expansions"):
        expand("[a|b]" * 12)


def test_a_block_becomes_one_fact_with_framed_questions() -> None:
    (fact,) = parse_facts(ONE)
    assert (fact.name, fact.answer, fact.held) == ("cancel", "Send DELETE.", ("end my job",))
    assert {"how do i cancel my job", "how can i cancel a job", "stop it"} <= set(fact.trained)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("## a\nask: b\n", "needs an answer"),
        ("## a\nsay: b\n", "needs an answer"),
        ("## a\nnonsense\n", "not 'key: value'"),
        ("## a\nwho: b\n", "unknown key"),
        (ONE + ONE, "twice"),
        (ONE + "## b\nask: stop it\nsay: no\n", "belongs to"),
        (ONE + "## b\nask: end my job\nsay: no\n", "is trained on"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused_with_a_sentence(
    text: str, complaint: str
) -> None:
    with pytest.raises(InvalidQuestions, match=complaint):
        parse_facts(text)


def test_the_file_that_ships_has_many_facts_with_many_questions_and_short_answers() -> None:
    facts = load_facts()
    assert len(facts) >= 200
    for fact in facts:
        assert len(fact.trained) >= 5, fact.name
        assert fact.held, fact.name
        assert fact.answer[-1] in ".?!", fact.name
        assert len(fact.answer) <= 320, fact.name
        assert len(re.findall(r"[.?!](?:\s|$)", fact.answer)) <= 4, fact.name


def test_no_two_facts_that_ship_give_the_same_answer() -> None:
    answers = [fact.answer for fact in load_facts()]
    assert len(set(answers)) == len(answers)


def test_answers_name_commands_targets_and_files_that_exist() -> None:
    """The settings in them are held by tests/arch/test_setting_names.py."""
    targets = set(re.findall(r"(?m)^([a-z-]+):", (REPOSITORY / "Makefile").read_text()))
    commands = set(get_command(application()).commands)  # type: ignore[attr-defined]
    found = 0
    for fact in load_facts():
        named = re.findall(r"(?:^|[ :;,])(make [a-z]+(?:-[a-z]+)*|penstock [a-z]+)\b", fact.answer)
        for program, word in map(str.split, named):
            if word in ("is", "me", "prints", "sure", "the"):  # no command
                continue
            known = targets if program == "make" else commands
            assert word in known, f"{fact.name}: {program} {word}"
        paths = re.findall(r"\b(?:docs|worker|deploy|api|shared)/[\w./-]*\w", fact.answer)
        for path in paths:
            assert (REPOSITORY / path).exists(), f"{fact.name}: {path}"
        found += len(named) + len(paths)
    assert found > 20
