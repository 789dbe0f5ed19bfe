"""Pieces: the bytes that one vocabulary entry stands for, derived from a decoder's description.

`tokenizers` decodes whole sequences only, and one that ends inside a character cannot be continued.
Every decoder of the field is, however, a rule per token that knows at most whether the token comes
first, followed by "join, then drop a space at the very beginning". In bytes, that rule can be
applied token by token, and the one UTF-8 decoder behind it sees exactly what it would have seen had
all tokens been there at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

_TextRule = Callable[[str, bool], str]


def _byte_level_alphabet() -> dict[str, int]:
    """Returns the printable stand-ins of GPT-2's byte-level BPE: character -> byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_LEVEL = _byte_level_alphabet()


@dataclass(frozen=True, slots=True)
class PieceRule:
    """How a vocabulary entry becomes bytes; pure, and the same on every thread.

    `encode(token, first)` gives a token's bytes; `first` is true for the first token of the output
    that is not skipped. `strip` is a character of which up to `strip_count` are dropped from the
    very beginning of the output.
    """

    encode: Callable[[str, bool], bytes]
    strip: str = ""
    strip_count: int = 0


def piece_rule(decoder: Mapping[str, Any] | None) -> PieceRule | None:
    """Returns the rule of a decoder as tokenizer.json describes it; None for others.

    Known: no decoder, ByteLevel, Metaspace, WordPiece, and sequences of Replace (of a string),
    ByteFallback, ByteLevel, Metaspace or WordPiece, Fuse, and Strip from the left.
    """
    if decoder is None:
        return PieceRule(lambda token, first: (token if first else " " + token).encode())
    steps: Sequence[Mapping[str, Any]] = (
        decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    )
    rules: list[_TextRule] = []
    to_bytes: Callable[[str], bytes] | None = None
    fused = False
    strip, strip_count = "", 0
    for step in steps:
        kind = step["type"]
        if kind == "Fuse":
            fused = True
        elif kind == "Strip" and (fused or to_bytes is _byte_level) and not strip:
            if step["stop"]:
                return None
            strip, strip_count = step["content"], step["start"]
        elif fused or to_bytes is not None:
            return None  # a rule over joined text is not a rule per token
        elif kind == "ByteLevel":
            to_bytes = _byte_level
        elif kind == "ByteFallback":
            to_bytes = _byte_fallback
        else:
            rule = _text_rule(step)
            if rule is None:
                return None
            rules.append(rule)
    return PieceRule(_compose(rules, to_bytes or str.encode), strip, strip_count)


def _compose(
    rules: Sequence[_TextRule], to_bytes: Callable[[str], bytes]
) -> Callable[[str, bool], bytes]:
    def encode(token: str, first: bool) -> bytes:
        for rule in rules:
            token = rule(token, first)
        return to_bytes(token)

    return encode


def _text_rule(step: Mapping[str, Any]) -> _TextRule | None:
    if step["type"] == "Replace":
        pattern, content = step["pattern"].get("String"), step["content"]
        return None if pattern is None else lambda token, first: token.replace(pattern, content)
    if step["type"] == "Metaspace":
        return _metaspace(step["replacement"], step.get("prepend_scheme", "always") != "never")
    if step["type"] == "WordPiece":
        return _word_piece(step["prefix"], step["cleanup"])
    return None


def _metaspace(replacement: str, prepended: bool) -> _TextRule:
    def rule(token: str, first: bool) -> str:
        return token.replace(replacement, "" if first and prepended else " ")

    return rule


def _word_piece(prefix: str, cleanup: bool) -> _TextRule:
    def rule(token: str, first: bool) -> str:
        if not first:
            token = token.removeprefix(prefix) if token.startswith(prefix) else " " + token
        return _clean(token) if cleanup else token

    return rule


def _clean(text: str) -> str:
    """English typography of the WordPiece decoder: no space before punctuation or a clitic."""
    for mark in (" .", " ?", " !", " ,"):
        text = text.replace(mark, mark[1:])
    text = text.replace(" ' ", "'").replace(" n't", "n't").replace(" 'm", "'m")
    text = text.replace(" do not", " don't")
    for clitic in (" 's", " 've", " 're"):
        text = text.replace(clitic, clitic[1:])
    return text


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTE_LEVEL[character] for character in token])
    except KeyError:
        return token.encode()  # an added token outside the alphabet stands for itself


def _byte_fallback(token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.encode()
