"""The corpus: what is learned, what may look at what, and that a seed fixes it all."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer

from tools.demo_model.checkpoint import load_tokenizer
from tools.demo_model.corpus import Corpus, Document, pack, render_chat
from tools.demo_model.questions import parse_facts

FACTS = parse_facts(
    "## a\nask: first\nsay: One.\n\n## b\nask: second\nsay: Two.\n\n"
    "## unknown\nask: third\nsay: I do not know.\n"
)
WORDS = ["banana", "harbour", "lantern", "meadow", "violin"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer()


def corpus(tokenizer: Tokenizer, seed: int) -> Corpus:
    return Corpus(tokenizer, FACTS, ["Some prose.\n\nMore prose."], WORDS, seed)


def test_only_the_assistants_text_and_its_end_are_learned(tokenizer: Tokenizer) -> None:
    chat = [("system", "Be kind."), ("user", "first?"), ("assistant", "One.")]
    document = render_chat(tokenizer, chat)
    learned = [
        token_id
        for token_id, weight in zip(document.token_ids, document.weights, strict=True)
        if weight
    ]
    assert tokenizer.decode(learned, skip_special_tokens=False) == "One.<|im_end|>"


def test_packed_documents_restart_at_zero_and_do_not_see_one_another() -> None:
    rows = [[Document([5, 6, 7], [0.0, 1.0, 1.0]), Document([8, 9, 10], [1.0, 1.0, 1.0])]]
    batch = pack(rows, 5)
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1]]
    assert batch.labels.tolist() == [[6, 7, -100, 9, 10]]
    assert batch.mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 1, 1],
    ]


def test_a_seed_fixes_every_batch(tokenizer: Tokenizer) -> None:
    one, same, other = (corpus(tokenizer, seed) for seed in (1, 1, 2))
    for _ in range(3):
        a, b, c = (each.batch(2, 64) for each in (one, same, other))
        assert torch.equal(a.token_ids, b.token_ids)
        assert torch.equal(a.weights, b.weights)
        assert not torch.equal(a.token_ids, c.token_ids)


def test_a_long_chat_fills_its_row_alone(tokenizer: Tokenizer) -> None:
    batch = corpus(tokenizer, 3).batch(1, 512, one_document=True)
    assert batch.positions[0].tolist() == list(range(512))
    assert bool((batch.labels >= 0).any())


def test_of_a_chat_with_tools_the_answer_alone_is_learned(tokenizer: Tokenizer) -> None:
    drawn = corpus(tokenizer, 4)
    with_calls = 0
    for _ in range(40):
        document = drawn.agent_conversation()
        text = tokenizer.decode(document.token_ids, skip_special_tokens=False)
        with_calls += "</tool_call><|im_end|>" in text
        assert '"type": "function"' in text
        pairs = zip(document.token_ids, document.weights, strict=True)
        learned = tokenizer.decode([i for i, weight in pairs if weight], skip_special_tokens=False)
        assert learned in [f"{fact.answer}<|im_end|>" for fact in FACTS]
    assert 10 < with_calls < 40
