"""A model's text in a process beside this one: the same answers as from this one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from shared.messages import Grammar, GrammarKind, InvalidParameter
from shared.text import served_text
from shared.text.base import RenderingUnavailable, TextInvalid
from shared.text.checkpoint_text import card_from_checkpoint
from shared.text.model_card import ModelCard, TextModel
from shared.text.remote_text import RemoteGrammars, RemoteTokenizer, TextProcess
from shared.text.served_text import load_served_text
from shared.text.text_model import load_text
from tests.support.checkpoints import make_checkpoint

TEXTS = ["", "hello", " Wie heißt 東京? 👩‍👩‍👧 <|im_end|>\n\nnaïve e\u0301", "x" * 5000, "\0\x7f"]


@dataclass
class Both:
    """One model's text, here and in a process."""

    card: ModelCard
    blobs: dict[str, bytes]
    here: TextModel
    process: TextProcess
    tokenizer: RemoteTokenizer


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path)
    card, blobs = card_of(path)
    process = TextProcess(card, blobs)
    yield Both(card, blobs, load_text(card, blobs), process, RemoteTokenizer(process))
    process.close()


def card_of(path: Path) -> tuple[ModelCard, dict[str, bytes]]:
    return card_from_checkpoint(
        path, name="m", max_model_len=64, kv_capacity_tokens=64, dtype="", num_parameters=1
    )


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_texts_are_encoded_and_decoded_alike(both: Both, text: str) -> None:
    here, there = both.here.tokenizer, both.tokenizer
    for add_special_tokens in (True, False):
        token_ids = there.encode(text, add_special_tokens=add_special_tokens)
        assert token_ids == here.encode(text, add_special_tokens=add_special_tokens)
        for skip in (True, False):
            wanted = here.decode(token_ids, skip_special_tokens=skip)
            assert there.decode(token_ids, skip_special_tokens=skip) == wanted
            streamed = there.detokenizer(skip_special_tokens=skip)
            assert "".join(streamed.push((one,)) for one in token_ids) + streamed.flush() == wanted
    assert there.least_tokens(text) == here.least_tokens(text)


def test_every_token_has_the_same_bytes_and_name(both: Both) -> None:
    here, there = both.here.tokenizer, both.tokenizer
    assert there.vocab_size == here.vocab_size
    for token_id in (*range(here.vocab_size + 2), -1, 2**40):
        assert there.token_bytes(token_id) == here.token_bytes(token_id), token_id
        assert there.token_text(token_id) == here.token_text(token_id)
    for name in ("<|im_end|>", "a", "not in any vocabulary"):
        assert there.token_id(name) == here.token_id(name)


def test_a_lone_surrogate_is_refused_alike(both: Both) -> None:
    with pytest.raises(InvalidParameter) as here:
        both.here.tokenizer.encode("a\ud800")
    with pytest.raises(InvalidParameter) as there:
        both.tokenizer.encode("a\ud800")
    assert str(there.value) == str(here.value)


@pytest.mark.parametrize(
    "schema", ['{"type": "object"}', '{"type": "string", "pattern": "(?!x)a"}']
)
def test_grammars_are_checked_alike(both: Both, schema: str) -> None:
    grammar = Grammar(GrammarKind.JSON_SCHEMA, schema)
    errors = []
    for grammars in (both.here.grammars, RemoteGrammars(both.process)):
        try:
            grammars.check(grammar, "response_format")
        except InvalidParameter as error:
            errors.append((error.param, error.message))
        else:
            errors.append(("", ""))
    assert errors[0] == errors[1]


def test_threads_are_served_at_once(both: Both) -> None:
    texts = [f"number {index} " * 50 for index in range(64)]
    with ThreadPoolExecutor(16) as threads:
        found = list(threads.map(both.tokenizer.encode, texts))
    assert found == [both.here.tokenizer.encode(text) for text in texts]


def test_a_process_that_was_killed_is_started_again(both: Both) -> None:
    before = both.process.pid
    os.kill(before, signal.SIGKILL)
    assert both.tokenizer.encode("hello") == both.here.tokenizer.encode("hello")
    assert both.process.pid != before


def test_the_process_ends_with_its_model(both: Both) -> None:
    process = TextProcess(both.card, both.blobs)
    tokenizer, pid = RemoteTokenizer(process), process.pid
    del process
    assert tokenizer.encode("a")
    del tokenizer
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_files_that_cannot_be_used_are_refused_with_the_same_sentence(both: Both) -> None:
    digest = both.card.tokenizer_digest
    for blobs in ({**both.blobs, digest: b"{}"}, {}):
        with pytest.raises(TextInvalid) as there:
            TextProcess(both.card, blobs)
        assert "text file" in str(there.value)
    strange = replace(both.card, facts_digest=digest)
    with pytest.raises(TextInvalid) as there:
        TextProcess(strange, both.blobs)
    with pytest.raises(TextInvalid) as here:
        load_text(strange, both.blobs)
    assert str(there.value) == str(here.value)


def test_large_vocabularies_are_loaded_in_a_process(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_served_text(both.card, both.blobs).is_local
    monkeypatch.setattr(served_text, "MAX_LOCAL_BYTES", 100)
    text = load_served_text(both.card, both.blobs)
    assert not text.is_local
    assert text.tokenizer.encode("hello") == both.here.tokenizer.encode("hello")
    assert text.chat_template is not None
    text.close()
    with pytest.raises(RenderingUnavailable):
        text.tokenizer.encode("hello")
