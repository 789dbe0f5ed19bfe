"""Plain text: docstrings, documents and answers, cut into pieces that fit."""

from __future__ import annotations

from pathlib import Path

from tools.demo_model.prose import chunks, docstrings, documents, paragraphs, unfamiliar_words
from tools.demo_model.questions import load_facts


def test_the_standard_library_gives_plenty_of_distinct_docstrings() -> None:
    texts = list(docstrings())
    assert len(texts) > 1000
    assert len(set(texts)) == len(texts)


def test_documents_are_the_readme_and_docs_of_a_checkout_and_nothing_elsewhere(
    tmp_path: Path,
) -> None:
    assert list(documents(tmp_path)) == []
    (tmp_path / "docs" / "adr").mkdir(parents=True)
    (tmp_path / "README.md").write_text("one", encoding="utf-8")
    (tmp_path / "docs" / "adr" / "0001.md").write_text("two", encoding="utf-8")
    assert sorted(documents(tmp_path)) == ["one", "two"]


def test_paragraphs_hold_every_answer_once() -> None:
    facts = load_facts()
    whole = " ".join(paragraphs(facts))
    assert all(fact.answer in whole for fact in facts)


def test_unfamiliar_words_are_in_no_question_and_no_answer() -> None:
    words = unfamiliar_words(load_facts(), ["the queue met a giraffe near redis"])
    assert words == ["giraffe", "near"] or words == ["giraffe"]


def test_chunks_keep_paragraphs_whole() -> None:
    text = "aaaa\n\nbbbb\n\ncccc"
    assert list(chunks(text, 12)) == ["aaaa\n\nbbbb", "cccc"]
