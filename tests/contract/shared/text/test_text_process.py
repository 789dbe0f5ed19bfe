"""A model's text in a process beside this one: the same answers as from this one."""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from shared.cpu_time import work_cpu_s
from shared.messages import Grammar, GrammarKind, InvalidParameter
from shared.text import remote_text, served_text
from shared.text.base import RenderingUnavailable, TextInvalid
from shared.text.checkpoint_text import card_from_checkpoint
from shared.text.model_card import ModelCard, TextModel
from shared.text.remote_text import RemoteGrammars, RemoteTokenizer, TextProcess
from shared.text.served_text import load_served_text
from shared.text.text_model import load_text
from tests.support.checkpoints import make_checkpoint
from tests.support.polling import wait_until

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


def elsewhere_s() -> float:
    """Processor time that was spent on behalf of this thread so far."""
    return work_cpu_s() - time.thread_time()


def test_the_processor_time_of_an_encoding_is_its_callers(both: Both) -> None:
    text = "number one and number two, " * 10_000
    begun_s = time.thread_time()
    both.here.tokenizer.encode(text)
    here_s = time.thread_time() - begun_s
    before_s = elsewhere_s()
    both.tokenizer.encode(text)
    assert elsewhere_s() - before_s > here_s / 10


@pytest.mark.parametrize("is_remote", [False, True])
def test_the_processor_time_of_a_grammar_is_its_first_callers_also_where_it_is_refused(
    both: Both, *, is_remote: bool
) -> None:
    grammars = RemoteGrammars(both.process) if is_remote else both.here.grammars
    grammars.check(Grammar(GrammarKind.REGEX, "[a-z]+"), "p")  # the vocabulary's tree is there
    times_s = []
    pattern = f"([a-z]{{1,90}} ){{1,{40 + is_remote}}}"
    for grammar in (pattern, pattern, f"{pattern}("):
        before_s = elsewhere_s()
        with suppress(InvalidParameter):
            grammars.check(Grammar(GrammarKind.REGEX, grammar), "p")
        times_s.append(elsewhere_s() - before_s)
    first_s, again_s, refused_s = times_s
    assert again_s < first_s / 4
    assert refused_s > 0


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


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def tools_schema(number: int) -> Grammar:
    """One of its kind: the calls of 64 tools."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": f"tool_{number}_{tool}"},
                "arguments": {
                    "type": "object",
                    "properties": {"text": {"type": "string", "maxLength": tool + 10}},
                },
            },
            "required": ["name", "arguments"],
        }
        for tool in range(64)
    ]
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"anyOf": calls}))


def test_many_grammars_and_large_texts_leave_its_memory_as_it_was(both: Both) -> None:
    process = TextProcess(both.card, both.blobs)
    tokenizer, grammars = RemoteTokenizer(process), RemoteGrammars(process)
    pid, number = process.pid, iter(range(10**6))

    def check(count: int) -> None:
        with ThreadPoolExecutor(2) as threads:
            for _ in threads.map(
                lambda i: grammars.check(tools_schema(i), "p"), (next(number) for _ in range(count))
            ):
                pass

    check(8)
    first = rss_bytes(pid)
    check(150)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(tokenizer.encode, ["gate and wheel " * 50_000] * 6))

    def is_given_back() -> bool:
        tokenizer.encode("gate")  # what is freed after a call is given back after the next one
        # Grammars that are kept for later requests are a part of it.
        return rss_bytes(pid) <= 3 * first  # without giving back: seven times as much

    wait_until(is_given_back, "its memory is given back")
    assert process.pid == pid, "by the same process"
    process.close()


def test_calls_at_work_end_in_the_process_that_is_replaced_for_its_memory(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_text, "MIN_LIFE_S", 0.0)
    process = TextProcess(both.card, both.blobs)
    old = process._current
    assert old is not None
    os.kill(old.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as threads:
        at_work = threads.submit(RemoteTokenizer(process).encode, "hello")
        wait_until(lambda: old.num_calls == 1, "the call is at work")
        process._judge(old, old.max_rss_bytes + 1)
        wait_until(lambda: process.pid != old.pid, "another process takes its place")
        assert RemoteTokenizer(process).encode("gate") == both.here.tokenizer.encode("gate")
        assert not at_work.done()
        assert is_running(old.pid)
        os.kill(old.pid, signal.SIGCONT)
        assert at_work.result(60) == both.here.tokenizer.encode("hello")
    assert not is_running(old.pid)
    process.close()


def test_a_process_above_its_bound_is_replaced_once_it_is_old_enough(
    both: Both, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(remote_text, "LEAST_MAX_RSS_BYTES", 1)
    monkeypatch.setattr(remote_text, "MAX_GROWTH", 0.5)
    process = TextProcess(both.card, both.blobs)
    tokenizer, first = RemoteTokenizer(process), process.pid
    tokenizer.encode("hello")
    assert "replaced" not in caplog.text, "it is young"
    assert process._current is not None
    process._current.replaceable_s = 0.0
    tokenizer.encode("hello")
    wait_until(lambda: process.pid != first, "another process takes its place")
    wait_until(lambda: not is_running(first), "the first one ends")
    assert tokenizer.encode("hello") == both.here.tokenizer.encode("hello")
    assert caplog.text.count("is replaced") == 1
    process.close()


def test_closing_ends_a_process_that_loads(both: Both) -> None:
    process = TextProcess(both.card, both.blobs)
    old = process._current
    assert old is not None
    old.replaceable_s = 0.0
    process._judge(old, old.max_rss_bytes + 1)
    wait_until(lambda: len(process._all) == 2, "another process loads")
    pids = [running.pid for running in process._all]
    process.close()
    wait_until(lambda: not any(map(is_running, pids)), "both end")
    with pytest.raises(RenderingUnavailable):
        RemoteTokenizer(process).encode("hello")


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
