"""Rephrasing: the many ways in which people type the same question."""

from __future__ import annotations

import random
import re

_NAMES = {
    "penstock": "Penstock",
    "redis": "Redis",
    "valkey": "Valkey",
    "gpu": "GPU",
    "cpu": "CPU",
    "kv": "KV",
    "api": "API",
    "http": "HTTP",
    "sse": "SSE",
    "ttft": "TTFT",
    "python": "Python",
    "openai": "OpenAI",
    "docker": "Docker",
    "i": "I",
    "llm": "LLM",
}
_OPENINGS = (
    "please, ",
    "please ",
    "hi, ",
    "hello, ",
    "hey, ",
    "hello! ",
    "hi! ",
    "so, ",
    "so ",
    "ok, ",
    "ok ",
    "and ",
    "well, ",
    "can you tell me ",
    "could you tell me ",
    "please tell me ",
    "tell me, ",
    "tell me ",
    "i want to know ",
    "i would like to know ",
    "do you know ",
    "a question: ",
    "quick question: ",
    "i have a question: ",
    "i wonder ",
    "one more question: ",
    "now ",
    "thanks. ",
    "great, ",
    "then ",
    "but ",
)
_ENDINGS = (
    " please",
    ", please",
    " in penstock",
    " here",
    " exactly",
    ", can you explain",
    " in short",
    " now",
    ", thanks",
    " then",
    " again",
    " in a few words",
    " actually",
)
_SMALL_WORDS = frozenset({"a", "an", "the", "is", "do", "does", "it", "of", "to", "my", "i", "are"})
_MARKS = ("?", "?", "?", "?", "?", "", "", "", "", ".", "!", "??", " ?", "?!", "...")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_WORD = re.compile(r"[A-Za-z]+")


def misspell(text: str, rng: random.Random) -> str:
    """Returns the text with a slip of the finger in one word of four letters or more.

    Paths and keys stay whole.
    """
    words = text.split(" ")
    long = [i for i, word in enumerate(words) if len(word) >= 4 and word.isalpha()]
    if not long:
        return text
    index = rng.choice(long)
    word = words[index]
    at = rng.randrange(1, len(word) - 1)
    match rng.randrange(4):
        case 0:
            word = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
        case 1:
            word = word[:at] + word[at + 1 :]
        case 2:
            word = word[:at] + word[at] + word[at:]
        case _:
            word = word[:at] + rng.choice(_LETTERS) + word[at + 1 :]
    words[index] = word
    return " ".join(words)


def _drop_a_word(text: str, rng: random.Random) -> str:
    words = text.split(" ")
    small = [i for i, word in enumerate(words) if word in _SMALL_WORDS]
    if len(words) >= 4 and small:
        del words[rng.choice(small)]
    return " ".join(words)


def _set_case(text: str, rng: random.Random) -> str:
    chance = rng.random()
    if chance < 0.35:
        return text
    if chance < 0.39:
        return text.upper()
    if chance < 0.43:
        return text.title()
    named = _WORD.sub(lambda match: _NAMES.get(match.group(), match.group()), text)
    return named[:1].upper() + named[1:]


def rephrase(question: str, rng: random.Random) -> str:
    """Returns the question with another opening, ending, case, punctuation, or a slip in it."""
    text = question
    if rng.random() < 0.15:
        text = _drop_a_word(text, rng)
    if rng.random() < 0.25:
        text = rng.choice(_OPENINGS) + text
    if rng.random() < 0.10:
        text += rng.choice(_ENDINGS)
    if rng.random() < 0.25:
        text = misspell(text, rng)
        if rng.random() < 0.25:
            text = misspell(text, rng)
    return _set_case(text, rng) + rng.choice(_MARKS)
