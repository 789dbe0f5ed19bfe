from __future__ import annotations

import json
import re
import threading

import pytest

from shared.messages import InvalidParameter
from shared.text.base import TextInvalid
from shared.text.kept_ids import LEAST_CHARS, KeptIds
from shared.text.tokenizer import FastTokenizer, TokenizerConfig
from tests.support.table import table
from tests.unit.shared.text.vocabularies import ALL, SENTENCES, saved


def test_special_tokens_of_the_post_processor_are_added_only_on_request() -> None:
    tokenizer = FastTokenizer.from_bytes(saved("llama"))
    with_start = tokenizer.encode("The fox")
    assert with_start[0] == tokenizer.token_id("<s>")
    assert with_start[1:] == tokenizer.encode("The fox", add_special_tokens=False)


def test_special_tokens_in_text_become_their_ids_and_are_skipped_in_decoding() -> None:
    tokenizer = FastTokenizer.from_bytes(saved("byte_level"))
    ids = tokenizer.encode("<|im_start|>hi<tool_call><|im_end|>")
    assert ids[0] == tokenizer.token_id("<|im_start|>")
    assert tokenizer.decode(ids) == "hi<tool_call>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>hi<tool_call><|im_end|>"


@pytest.mark.parametrize("kind", ["byte_level", "bytes_only", "gemma"])
def test_token_bytes_put_together_are_the_text(kind: str) -> None:
    tokenizer = FastTokenizer.from_bytes(saved(kind))
    for text in SENTENCES:
        ids = tokenizer.encode(text)
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_one_token_as_text_keeps_its_space_and_marks_broken_bytes() -> None:
    llama, raw = (
        FastTokenizer.from_bytes(saved("llama")),
        FastTokenizer.from_bytes(saved("bytes_only")),
    )
    assert (
        "".join(map(llama.token_text, llama.encode("The fox", add_special_tokens=False)))
        == " The fox"
    )
    assert llama.token_text(llama.token_id("<s>") or 0) == "<s>"
    assert llama.token_text(llama.token_id("<0xF0>") or 0) == "\ufffd"
    assert llama.token_bytes(llama.token_id("<0xF0>") or 0) == b"\xf0"
    assert raw.token_text(raw.encode("é")[0]) == "\ufffd"


@table("token_id", [-1, 10**6, 2**32, 2**40])
@table("kind", ALL)
def test_ids_outside_the_vocabulary_are_no_text(kind: str, token_id: int) -> None:
    tokenizer = FastTokenizer.from_bytes(saved(kind))
    assert tokenizer.token_bytes(token_id) == b""
    assert tokenizer.token_text(token_id) == ""
    assert tokenizer.decode([token_id]) == ""


def test_vocab_size_is_above_every_id() -> None:
    for kind in ALL:
        tokenizer = FastTokenizer.from_bytes(saved(kind))
        ids = [tokenizer.token_id("two words"), tokenizer.token_id("<tool_call>")]
        assert tokenizer.vocab_size == max(token_id or 0 for token_id in ids) + 1


def test_truncation_and_padding_of_the_file_do_not_apply() -> None:
    state = json.loads(saved("byte_level"))
    state["truncation"] = {
        "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0
    }  # fmt: skip
    state["padding"] = {
        "strategy": {"Fixed": 100}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "x",
    }  # fmt: skip
    tokenizer = FastTokenizer.from_bytes(json.dumps(state).encode())
    assert tokenizer.decode(tokenizer.encode(SENTENCES[0])) == SENTENCES[0]


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(InvalidParameter, match=r"lone surrogate U\+D83D at 1"):
        FastTokenizer.from_bytes(saved("byte_level")).encode("a\ud83d")


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b"\xff\xfe", b'{"model": {"type": "BPE"}}'])
def test_what_is_no_tokenizer_is_refused(data: bytes) -> None:
    with pytest.raises(TextInvalid, match=r"tokenizer\.json cannot be used"):
        FastTokenizer.from_bytes(data)


def test_facts_make_tokens_special_and_add_missing_ones() -> None:
    plain = FastTokenizer.from_bytes(saved("byte_level"))
    call = plain.token_id("<tool_call>")
    assert call is not None
    config = TokenizerConfig(
        special_tokens={"eos_token": "Ġ"},
        added_tokens={
            call: {"content": "<tool_call>", "special": True, "normalized": False},
            plain.vocab_size: {"content": "<new>", "special": False},
        },
    )
    tokenizer = FastTokenizer.from_bytes(saved("byte_level"), config)
    assert tokenizer.token_id("<new>") == plain.vocab_size
    assert tokenizer.vocab_size == plain.vocab_size + 1
    assert tokenizer.decode([call, plain.vocab_size]) == "<new>"
    space = tokenizer.token_id("Ġ")
    assert space is not None
    assert tokenizer.decode([space]) == ""


def test_facts_that_would_renumber_a_token_are_refused() -> None:
    config = TokenizerConfig(added_tokens={99999: {"content": "<new>", "special": True}})
    with pytest.raises(TextInvalid, match="'<new>' the id 99999"):
        FastTokenizer.from_bytes(saved("byte_level"), config)


def test_a_special_token_outside_the_vocabulary_gets_no_id() -> None:
    config = TokenizerConfig(special_tokens={"pad_token": "<nowhere>"})
    tokenizer = FastTokenizer.from_bytes(saved("byte_level"), config)
    assert tokenizer.token_id("<nowhere>") is None


def test_threads_share_one_tokenizer() -> None:
    tokenizer = FastTokenizer.from_bytes(saved("llama"))
    failures: list[str] = []

    def work() -> None:
        for text in SENTENCES * 10:
            ids = tokenizer.encode(text, add_special_tokens=False)
            if tokenizer.decode(ids) != text:
                failures.append(text)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@table("kind", ALL)
def test_ids_that_are_kept_are_those_of_the_whole_text(kind: str) -> None:
    tokenizer = FastTokenizer.from_bytes(saved(kind))
    long = " ".join(SENTENCES * 99)
    specials = [*tokenizer.special_texts, ""]
    for first, second in zip(specials, reversed(specials), strict=True):
        for text in (f"{first}{long}{second} {long}{first}", f"e\u0301{first}\n\u0301{long}", ""):
            whole = tokenizer.encode(text, add_special_tokens=False)
            for tenant in ("one", "one", "other"):
                ids = tokenizer.encode(text, add_special_tokens=False, tenant=tenant)
                assert ids == whole, (first, second)


def test_a_long_text_between_special_tokens_is_encoded_once_for_each_tenant() -> None:
    """A conversation comes again with its tools, and one turn more."""
    encoded: list[str] = []

    def encode(text: str) -> list[int]:
        encoded.append(text)
        return list(text.encode())

    kept = KeptIds(re.compile("<s>|</s>"), max_bytes=5 * LEAST_CHARS * 4)
    tools, turn = "a" * LEAST_CHARS, "b" * (LEAST_CHARS - 1)
    text = f"<s>{tools}</s><s>{turn}</s>"
    for more in ("", "<s>c</s>"):
        assert kept.encoded(text + more, "one", encode) == list((text + more).encode())
    assert encoded == ["<s>", tools, f"</s><s>{turn}</s>", "<s>", f"</s><s>{turn}</s><s>c</s>"]

    kept.encoded(text, "other", encode)
    assert encoded[5:] == ["<s>", tools, f"</s><s>{turn}</s>"]

    encoded.clear()
    for letter in "defga":  # the least recently used is dropped where there is no room
        kept.encoded(letter * LEAST_CHARS, "one", encode)
    assert [text[0] for text in encoded] == ["d", "e", "f", "g", "a"]
    kept.encoded("a" * 6 * LEAST_CHARS, "one", encode)
    kept.encoded("g" * LEAST_CHARS, "one", encode)
    assert encoded[5:] == ["a" * 6 * LEAST_CHARS], "what has no room drops no other"
