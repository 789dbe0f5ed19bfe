"""Loads the text side of a model for a frontend: large vocabularies in a helper process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shared.text.chat_template import RenderingProcesses
from shared.text.model_card import ModelCard, TextModel
from shared.text.remote_text import RemoteGrammars, RemoteTokenizer, TextProcess
from shared.text.special_text import SpecialTexts
from shared.text.text_model import load_template, load_text

# The size of a tokenizer.json that the library parses, with the interpreter's lock held, in 15 ms.
MAX_LOCAL_BYTES = 512 * 1024


def load_served_text(
    card: ModelCard,
    blobs: Mapping[str, bytes],
    processes: RenderingProcesses | None = None,
    *,
    special_tokens_in_messages: bool = False,
) -> TextModel:
    """Raises as `load_text` does. A vocabulary whose tokens depend on one another is loaded here,
    whatever its size: detokenizing it takes the library.

    `special_tokens_in_messages`: their texts are special tokens in a message, too.
    """
    text = _loaded(card, blobs, processes)
    return replace(text, special_texts=None) if special_tokens_in_messages else text


def _loaded(
    card: ModelCard, blobs: Mapping[str, bytes], processes: RenderingProcesses | None
) -> TextModel:
    if len(blobs.get(card.tokenizer_digest, b"")) <= MAX_LOCAL_BYTES:
        return load_text(card, blobs, processes)
    process = TextProcess(card, blobs)
    if process.tables is None:
        process.close()
        return load_text(card, blobs, processes)
    tokenizer = RemoteTokenizer(process)
    template = load_template(card, blobs, processes)
    return TextModel(
        tokenizer,
        template,
        RemoteGrammars(process),
        is_local=False,
        special_texts=SpecialTexts(tokenizer.special_texts, card.markers),
        close=process.close,
    )
