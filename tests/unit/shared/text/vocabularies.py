"""Small tokenizers of every kind in the field, trained here on a few sentences."""

from __future__ import annotations

import functools
import json

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

SENTENCES = [
    "The quick brown fox jumps over the lazy dog, doesn't it? They've seen 1234 of them!",
    "Ein Vogel fliegt über die Straße; schöne Grüße aus Köln.",
    "東京は日本の首都です。서울은 대한민국의 수도이다. Ελλάδα и Москва.",
    "👩‍👩‍👧‍👦 and 🏳️‍🌈 and e\u0301 and q\u0308\u0323 and 👍🏽 🎉🎉",
    "def add(a, b):\n    return a + b\n\n\n\tprint( add(1,2) )  # three",
]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def _finished(backend: Tokenizer, specials: list[str]) -> Tokenizer:
    backend.add_special_tokens([AddedToken(text, special=True) for text in specials])
    backend.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    backend.add_tokens([AddedToken("two words", special=False, normalized=False)])
    return backend


def byte_level() -> Tokenizer:
    """GPT-2, Qwen, Llama 3: characters stand for bytes."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=sorted(alphabet), show_progress=False
    )
    backend.train_from_iterator(SENTENCES * 3, trainer)
    return _finished(backend, SPECIALS)


def bytes_only() -> Tokenizer:
    """Byte-level without a merge: every token is one byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({text: index for index, text in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return _finished(backend, SPECIALS)


def byte_level_of(*texts: str) -> Tokenizer:
    """Byte-level without an initial alphabet: it lacks the bytes that its texts do not have."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=[], show_progress=False)
    backend.train_from_iterator(texts, trainer)
    return _finished(backend, SPECIALS)


def _with_byte_tokens(backend: Tokenizer) -> Tokenizer:
    """SentencePiece's layout: control tokens, 256 byte tokens, then what was learned."""
    state = json.loads(backend.to_str())
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += [text for text in state["model"]["vocab"] if text not in names]
    state["model"]["vocab"] = {text: index for index, text in enumerate(names)}
    state["model"] |= {"byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>"}
    state["added_tokens"] = []
    return Tokenizer.from_str(json.dumps(state))


def _sentence_piece(*, strip: bool, prepend: bool) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    steps = [normalizers.Prepend("▁")] if prepend else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    after = [decoders.Strip(" ", 1, 0)] if strip else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    )
    trainer = trainers.BpeTrainer(vocab_size=200, show_progress=False, limit_alphabet=60)
    backend.train_from_iterator(SENTENCES[:2] * 3, trainer)
    return _finished(_with_byte_tokens(backend), ["<unk>", "<s>", "</s>"])


def llama() -> Tokenizer:
    """Llama 2, Mistral: a space is put in front and taken away again."""
    backend = _sentence_piece(strip=True, prepend=True)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return backend


def gemma() -> Tokenizer:
    """Gemma: byte fallback without any space of its own."""
    return _sentence_piece(strip=False, prepend=False)


def unigram() -> Tokenizer:
    """T5, XLM-R: Unigram with Metaspace."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=150, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
    )
    backend.train_from_iterator(SENTENCES, trainer)
    return _finished(backend, ["<unk>", "</s>"])


def metaspace_never() -> Tokenizer:
    """Metaspace that prepends nothing, so the first space is text."""
    backend = unigram()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.decoder = decoders.Metaspace(prepend_scheme="never")
    return backend


def word_piece() -> Tokenizer:
    """BERT: continuations are marked, spaces are implied."""
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=220, special_tokens=["[UNK]", "[SEP]"], show_progress=False
    )
    backend.train_from_iterator(SENTENCES, trainer)
    return _finished(backend, ["[UNK]", "[SEP]"])


def word_level() -> Tokenizer:
    """No decoder at all: words joined by spaces."""
    words = sorted({word for text in SENTENCES for word in text.split()})
    vocabulary = {word: index for index, word in enumerate(["<unk>", *words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _finished(backend, ["<unk>"])


def end_of_word() -> Tokenizer:
    """CLIP, GPT-1: a word's end is marked, a rule that needs the token after."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False
    )
    backend.train_from_iterator(SENTENCES, trainer)
    return _finished(backend, ["<unk>"])


EXACT = {  # the library's decode and ours agree on every sequence of ids
    "byte_level": byte_level,
    "bytes_only": bytes_only,
    "unigram": unigram,
    "metaspace_never": metaspace_never,
    "word_piece": word_piece,
    "word_level": word_level,
}
BYTE_FALLBACK = {"llama": llama, "gemma": gemma}
UNKNOWN = {"end_of_word": end_of_word}
ALL = EXACT | BYTE_FALLBACK | UNKNOWN


@functools.cache
def saved(kind: str) -> bytes:
    """The tokenizer.json of a kind."""
    text: str = ALL[kind]().to_str()
    return text.encode()
