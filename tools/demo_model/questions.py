"""Facts: what the demo model is taught, read from questions.txt and expanded to questions."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

QUESTIONS_PATH = Path(__file__).with_name("questions.txt")
MAX_EXPANSIONS = 400  # of one pattern: more is a mistake in the file

_ALTERNATIVES = re.compile(r"\[([^\[\]]*\|[^\[\]]*)\]")  # "[a|b]"; "[DONE]" is plain text

_FRAMES = {
    "ask": ("{x}",),
    "topic": (
        "what is {x}",
        "what is {x}",
        "what's {x}",
        "explain {x}",
        "tell me about {x}",
        "describe {x}",
        "define {x}",
        "what does {x} mean",
        "what do you mean by {x}",
        "what do you know about {x}",
        "how does {x} work",
        "can you explain {x}",
        "what is meant by {x}",
        "i do not understand {x}",
        "give me a short explanation of {x}",
        "{x}",
    ),
    "topics": (
        "what are {x}",
        "what are {x}",
        "explain {x}",
        "tell me about {x}",
        "describe {x}",
        "what do you know about {x}",
        "how do {x} work",
        "can you explain {x}",
        "{x}",
    ),
    "how": (
        "how do i {x}",
        "how do i {x}",
        "how can i {x}",
        "how to {x}",
        "how do you {x}",
        "how would i {x}",
        "can i {x}",
        "i want to {x}",
        "i need to {x}",
        "is it possible to {x}",
        "is there a way to {x}",
        "show me how to {x}",
        "what must i do to {x}",
        "what do i have to do to {x}",
        "{x}",
    ),
    "when": (
        "what happens when {x}",
        "what happens if {x}",
        "what if {x}",
        "what will happen if {x}",
        "what does penstock do when {x}",
        "what do you do if {x}",
        "what about when {x}",
        "suppose {x}",
        "{x}, what happens",
        "{x}",
    ),
    "why": ("why {x}", "why {x}", "tell me why {x}", "explain why {x}", "but why {x}"),
}


class InvalidQuestions(ValueError):
    """The question file breaks its own rules; the message names the fact or the line."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One answer and the questions that lead to it, in lower case without final punctuation.

    `trained` are trained on, `held` are kept for evaluation; the two never share a question.
    """

    name: str
    answer: str
    trained: tuple[str, ...]
    held: tuple[str, ...]


def expand(pattern: str) -> list[str]:
    """Returns all texts of a pattern, in order. Raises InvalidQuestions if there are too many."""
    pieces = _ALTERNATIVES.split(pattern)
    choices = [piece.split("|") if index % 2 else [piece] for index, piece in enumerate(pieces)]
    count = 1
    for choice in choices:
        count *= len(choice)
    if count > MAX_EXPANSIONS:
        raise InvalidQuestions(f"{count} expansions of {pattern!r}")
    return [" ".join("".join(combo).split()) for combo in itertools.product(*choices)]


def _parse_block(name: str, lines: Iterable[str]) -> Fact:
    trained: dict[str, None] = {}
    held: list[str] = []
    answer = ""
    for line in lines:
        key, colon, value = line.partition(":")
        value = value.strip()
        if not colon or not value:
            raise InvalidQuestions(f"{name}: not 'key: value': {line!r}")
        if key == "say":
            answer = value
        elif key == "held":
            held += [part.strip() for part in value.split(";")]
        elif key in _FRAMES:
            for part in value.split(";"):
                for text in expand(part.strip()):
                    trained |= dict.fromkeys(frame.format(x=text) for frame in _FRAMES[key])
        else:
            raise InvalidQuestions(f"{name}: unknown key {key!r}")
    if not answer or not trained:
        raise InvalidQuestions(f"{name}: needs an answer and at least one question")
    return Fact(name, answer, tuple(trained), tuple(held))


def parse_facts(text: str) -> list[Fact]:
    """Facts of a question file, in order. Raises InvalidQuestions."""
    facts: list[Fact] = []
    name, lines = "", list[str]()
    for raw in [*text.splitlines(), "##"]:  # the last one closes the last block
        line = raw.strip()
        if line.startswith("##"):
            if name:
                facts.append(_parse_block(name, lines))
            name, lines = line[2:].strip(), []
        elif line and not line.startswith("#"):
            lines.append(line)
    _check(facts)
    return facts


def _check(facts: list[Fact]) -> None:
    """Checks that names and questions are unique, and that no held question is trained."""
    names = [fact.name for fact in facts]
    owner: dict[str, str] = {}
    for fact in facts:
        if names.count(fact.name) > 1:
            raise InvalidQuestions(f"{fact.name}: twice in the file")
        for question in fact.trained:
            other = owner.setdefault(question, fact.name)
            if other != fact.name:
                raise InvalidQuestions(f"{question!r} belongs to {other} and to {fact.name}")
    for fact in facts:
        for question in fact.held:
            if question in owner:
                raise InvalidQuestions(f"{fact.name}: held {question!r} is trained on")


def load_facts(path: Path = QUESTIONS_PATH) -> list[Fact]:
    """Facts of the file that ships. Raises InvalidQuestions, OSError."""
    return parse_facts(path.read_text(encoding="utf-8"))
