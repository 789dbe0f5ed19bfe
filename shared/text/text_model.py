"""Loads the text side of a model from its card and blobs, as a frontend or a worker got them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from shared.text.base import TextInvalid
from shared.text.chat_template import JinjaChatTemplate, RenderingProcesses
from shared.text.grammar_compiler import GrammarCompiler
from shared.text.model_card import (
    MAX_TOKENIZER_BYTES,
    ModelCard,
    TextModel,
    digest_of,
    missing_file,
)
from shared.text.special_text import SpecialTexts
from shared.text.tokenizer import FastTokenizer, TokenizerConfig

_Kind = TypeVar("_Kind")


def load_card_tokenizer(card: ModelCard, blobs: Mapping[str, bytes]) -> FastTokenizer:
    """Raises TextInvalid when a blob is missing, does not match its digest, or cannot be used."""
    return FastTokenizer.from_bytes(
        _verified(blobs, card.tokenizer_digest),
        _decoded(_verified(blobs, card.facts_digest), TokenizerConfig),
        card.markers,
    )


def load_text(
    card: ModelCard, blobs: Mapping[str, bytes], processes: RenderingProcesses | None = None
) -> TextModel:
    """Raises TextInvalid as `load_card_tokenizer` does, and RenderingUnavailable. `processes`
    render the chat template."""
    tokenizer = load_card_tokenizer(card, blobs)
    grammars = GrammarCompiler(tokenizer, card.vocab_size, card.eos_token_ids)
    special_texts = SpecialTexts(tokenizer.special_texts, card.markers)
    template = load_template(card, blobs, processes)
    return TextModel(tokenizer, template, grammars, special_texts=special_texts)


def load_template(
    card: ModelCard, blobs: Mapping[str, bytes], processes: RenderingProcesses | None = None
) -> JinjaChatTemplate | None:
    """Returns the chat template; None if the model has none. Raises as `load_text` does."""
    if card.template_digest is None:
        return None
    source = _decoded(_verified(blobs, card.template_digest), dict[str, str])
    return JinjaChatTemplate(source, card.special_tokens, processes=processes)


def _verified(blobs: Mapping[str, bytes], digest: str) -> bytes:
    blob = blobs.get(digest)
    if blob is None:
        raise TextInvalid(missing_file(digest))
    if len(blob) > MAX_TOKENIZER_BYTES:
        raise TextInvalid(f"the model's text file {digest[:12]} has {len(blob)} bytes: too large")
    if digest_of(blob) != digest:
        raise TextInvalid(f"the model's text file {digest[:12]} is damaged: its digest differs")
    return blob


def _decoded(blob: bytes, kind: type[_Kind]) -> _Kind:
    try:
        return msgspec.json.decode(blob, type=kind)
    except msgspec.MsgspecError as error:
        raise TextInvalid(f"a text file of the model cannot be read: {error}") from error
