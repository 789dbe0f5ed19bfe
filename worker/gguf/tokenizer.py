"""tokenizer.json and its neighbours out of a GGUF file's metadata.

Two kinds of vocabulary: byte-level BPE ("gpt2"), whose pre-tokenizer the file only names, and
SentencePiece's BPE ("llama"), whose merges follow from its scores.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from worker.model.config.gguf_header import GgufModel
from worker.model.errors import CheckpointError, UnsupportedModel

log = logging.getLogger(__name__)

_PREFIX = "tokenizer.ggml."
_MAX_TOKEN_CHARS = 1024  # of a token that merges are looked for
_ROLES = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad", "mask": "mask"}
_SPACE = "\u2581"


class TokenType(IntEnum):
    """What the file has of each token."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """How text is cut before merges: by each expression, and between its matches."""

    expressions: tuple[str, ...]
    ignores_merges: bool = False  # a piece that is a token is that token
    adds_bos: bool = False  # where the file does not have it
    composes: bool = False  # characters first: NFC


# The published tokenizers' expressions.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# llama.cpp's for files that name none, which are of its first year.
_DEFAULT = _PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))
_PRE_TOKENIZERS: Mapping[str, _PreTokenizer] = {
    "default": _DEFAULT,
    **dict.fromkeys(
        ("gpt-2", "phi-2", "mpt", "olmo", "jais", "roberta-bpe"),
        _PreTokenizer((_GPT2,)),
    ),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        _PreTokenizer((r"\p{N}", _GPT2)),
    ),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3"),
        _PreTokenizer((_LLAMA3,), ignores_merges=True, adds_bos=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _PreTokenizer((_LLAMA3,))),
    "qwen2": _PreTokenizer((_QWEN2,), composes=True),
    **dict.fromkeys(("stablelm2", "megrez", "deepseek-r1-qwen"), _PreTokenizer((_QWEN2,))),
    "tekken": _PreTokenizer((_TEKKEN,), ignores_merges=True, adds_bos=True),
}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens by id, and their types."""

    tokens: Sequence[str]
    types: Sequence[int]

    @classmethod
    def of(cls, model: GgufModel) -> Vocabulary:
        """Raises CheckpointError for lists that are missing, of other lengths or with a token that
        comes twice."""
        file = model.path.name
        tokens = model.metadata.get(f"{_PREFIX}tokens")
        if not isinstance(tokens, list) or not tokens:
            raise CheckpointError(
                f"{file} has no {_PREFIX}tokens: it is a file without a tokenizer"
            )
        tokens = [token or f"[EMPTY_{token_id}]" for token_id, token in enumerate(tokens)]
        types = model.metadata.get(f"{_PREFIX}token_type", [TokenType.NORMAL] * len(tokens))
        if len(types) != len(tokens):
            raise CheckpointError(f"{file}: {len(tokens)} tokens have {len(types)} types")
        if len(set(tokens)) < len(tokens):
            twice = Counter(tokens).most_common(1)[0][0]
            raise CheckpointError(f"{file}: token {twice!r:.60} comes twice in {_PREFIX}tokens")
        return cls(tokens, types)

    @property
    def ids(self) -> dict[str, int]:
        """Returns the ids by token."""
        return {token: token_id for token_id, token in enumerate(self.tokens)}


def tokenizer_of(model: GgufModel, vocabulary: Vocabulary) -> Tokenizer:
    """Returns the tokenizer. Raises UnsupportedModel for a kind of vocabulary, or a pre-tokenizer,
    that is not known; CheckpointError for lists that do not fit together."""
    kind = model.text(f"{_PREFIX}model")
    if kind == "gpt2":
        tokenizer, adds_bos = _byte_level(model, vocabulary)
    elif kind == "llama":
        tokenizer, adds_bos = _sentence_piece(model, vocabulary), True
    else:
        raise UnsupportedModel(
            f"{model.path.name}: {_PREFIX}model {kind!r} is not supported; 'gpt2' (byte-level BPE) "
            "and 'llama' (SentencePiece's BPE) are"
        )
    tokenizer.add_tokens(list(_added(vocabulary)))
    _put_around(tokenizer, model, vocabulary, adds_bos)
    return tokenizer


def tokenizer_config_of(model: GgufModel, vocabulary: Vocabulary) -> dict[str, str]:
    """Returns tokenizer_config.json: the tokens with a role, by their role."""
    found = {}
    for key, role in _ROLES.items():
        token_id = model.whole(f"{_PREFIX}{key}_token_id", len(vocabulary.tokens))
        if token_id < len(vocabulary.tokens):
            found[f"{role}_token"] = vocabulary.tokens[token_id]
    return found


def chat_templates_of(model: GgufModel) -> dict[str, str]:
    """Returns the chat templates by name; the main one is "default"."""
    found = {}
    for key in model.metadata:
        name = key.removeprefix("tokenizer.chat_template")
        if name != key and (source := model.text(key)):
            found[name.removeprefix(".") or "default"] = source
    return found


def _byte_level(model: GgufModel, vocabulary: Vocabulary) -> tuple[Tokenizer, bool]:
    """Returns the tokenizer, and whether BOS comes before a text where the file leaves it open."""
    file, name = model.path.name, model.text(f"{_PREFIX}pre")
    if name is None:
        log.warning(
            "%s names no pre-tokenizer (tokenizer.ggml.pre): llama.cpp's default is taken, and "
            "prompts may be cut into other tokens than the model was trained with",
            file,
        )
    rule = _DEFAULT if name is None else _PRE_TOKENIZERS.get(name)
    if rule is None:
        raise UnsupportedModel(
            f"{file}: {_PREFIX}pre {name!r} is not known; known are {', '.join(_PRE_TOKENIZERS)}. "
            "Serve the safetensors checkpoint that the file was made from"
        )
    merges = model.metadata.get(f"{_PREFIX}merges")
    if not isinstance(merges, list):
        raise CheckpointError(f"{file} has no {_PREFIX}merges")
    ids = vocabulary.ids
    pairs = [(left, right) for left, right in map(_pair, merges) if left in ids and right in ids]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=ids,
            merges=[pair for pair in pairs if "".join(pair) in ids],
            fuse_unk=False,
            byte_fallback=False,
            ignore_merges=rule.ignores_merges,
        )
    )
    if rule.composes:
        tokenizer.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(one), "isolated") for one in rule.expressions]
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, bytes_of])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, rule.adds_bos


def _pair(merge: str) -> tuple[str, str]:
    """Returns both sides of a merge, which a space separates; the left one may start with one."""
    at = merge.find(" ", 1)
    return (merge, "") if at < 0 else (merge[:at], merge[at + 1 :])


def _sentence_piece(model: GgufModel, vocabulary: Vocabulary) -> Tokenizer:
    file, tokens = model.path.name, vocabulary.tokens
    scores = model.metadata.get(f"{_PREFIX}scores")
    if scores is None or len(scores) != len(tokens):
        raise CheckpointError(f"{file}: {_PREFIX}scores does not have one score for each token")
    unknown = model.whole(f"{_PREFIX}unknown_token_id", 0)
    if unknown >= len(tokens):
        raise CheckpointError(f"{file}: {_PREFIX}unknown_token_id {unknown} is no token")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary.ids,
            merges=_merges_by_score(vocabulary, scores),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    has_prefix = model.flag(f"{_PREFIX}add_space_prefix", True)
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if has_prefix else spaces
    )
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(
        [*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps
    )
    return tokenizer


def _merges_by_score(vocabulary: Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """Returns the pairs that make up a token, those of the best score first."""
    ids = vocabulary.ids
    found = []
    for token_id, token in enumerate(vocabulary.tokens):
        if vocabulary.types[token_id] != TokenType.NORMAL or len(token) > _MAX_TOKEN_CHARS:
            continue
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in ids and right in ids:
                found.append((-scores[token_id], ids[left], ids[right], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _added(vocabulary: Vocabulary) -> Iterator[AddedToken]:
    """Yields the tokens that are found in a text before it is cut into rule."""
    special = (TokenType.CONTROL, TokenType.UNKNOWN)
    for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        if kind in special or kind == TokenType.USER_DEFINED:
            yield AddedToken(token, special=kind in special, normalized=False)


def _put_around(
    tokenizer: Tokenizer, model: GgufModel, vocabulary: Vocabulary, adds_bos: bool
) -> None:
    """Sets which tokens come before and after a text that is encoded with special tokens."""
    roles: dict[str, Any] = tokenizer_config_of(model, vocabulary)
    parts, tokens = ["$A"], []
    if model.flag(f"{_PREFIX}add_bos_token", adds_bos) and (bos := roles.get("bos_token")):
        parts.insert(0, bos)
        tokens.append(bos)
    if model.flag(f"{_PREFIX}add_eos_token", False) and (eos := roles.get("eos_token")):
        parts.append(eos)
        tokens.append(eos)
    if tokens:
        ids = vocabulary.ids
        tokenizer.post_processor = processors.TemplateProcessing(
            single=parts, special_tokens=[(token, ids[token]) for token in dict.fromkeys(tokens)]
        )
