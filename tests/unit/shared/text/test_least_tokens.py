"""The lower bound of a text's tokens: it never refuses a text that would fit."""

from __future__ import annotations

import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers

from shared.text.tokenizer import NFC_SHRINKS, FastTokenizer
from tests.unit.shared.text.vocabularies import ALL, saved

TOKENIZERS = {kind: FastTokenizer.from_bytes(saved(kind)) for kind in ALL}


def composed() -> FastTokenizer:
    backend = Tokenizer.from_buffer(saved("byte_level"))
    backend.normalizer = normalizers.NFC()
    return FastTokenizer(backend)


TOKENIZERS["composed"] = composed()


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(text=st.text(max_size=200) | st.text("ab \n\u0301\u1100\u1161\u11a8\u212a", max_size=200))
def test_a_text_has_at_least_so_many_tokens(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("kind", ["byte_level", "composed"])
def test_the_bound_grows_with_the_text(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    longest = tokenizer._longest_token() * NFC_SHRINKS
    assert tokenizer.least_tokens("a" * longest * 100) >= 100


def test_composed_characters_shorten_a_text_by_a_known_factor() -> None:
    for code in range(sys.maxunicode + 1):
        if 0xD800 <= code < 0xE000:
            continue
        for form in (chr(code), unicodedata.normalize("NFD", chr(code))):
            made = unicodedata.normalize("NFC", form)
            assert len(form.encode()) <= NFC_SHRINKS * len(made.encode())
