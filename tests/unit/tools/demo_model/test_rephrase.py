"""Rephrasing: other words around a question, the same question inside."""

from __future__ import annotations

import random

from tools.demo_model.rephrase import misspell, rephrase


def test_the_same_seed_gives_the_same_wording() -> None:
    question = "what happens when a worker dies"
    first = [rephrase(question, random.Random(seed)) for seed in range(50)]
    assert first == [rephrase(question, random.Random(seed)) for seed in range(50)]
    assert len(set(first)) > 20


def test_a_slip_touches_one_long_word_and_never_a_path() -> None:
    question = "what does /v1/models do here"
    for seed in range(100):
        text = misspell(question, random.Random(seed))
        assert "/v1/models" in text
        pairs = zip(text.split(), question.split(), strict=True)
        assert sum(word != old for word, old in pairs) <= 1


def test_short_words_alone_have_no_slips() -> None:
    assert misspell("go on", random.Random(1)) == "go on"
