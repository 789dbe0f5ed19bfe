"""What a frontend and the text process of a model send each other.

A message is its length, then bytes, as in `shared.text.rendering`; most are JSON.
"""

from __future__ import annotations

import msgspec

from shared.messages import GrammarKind


class LoadRequest(msgspec.Struct):
    """`card`: a model card as JSON. The blobs with these digests follow, one message each."""

    card: str
    digests: list[str]


class Vocabulary(msgspec.Struct):
    """The answer to a LoadRequest. If `error` and `has_pieces` allow, four messages follow.

    They are the bytes of every token at the start of a text, concatenated, and the end of each
    (unsigned 32-bit numbers); and the same elsewhere in a text. `missing`: ids that have no
    entry. `strip`, `strip_count`: see PieceRule. `has_pieces`: a token's text depends on no other.
    `rss_bytes`: the memory of the process that has loaded it.
    """

    vocab_size: int = 0
    special_ids: list[int] = []  # that are no text of an output
    special_texts: list[str] = []
    missing: list[int] = []
    strip: str = ""
    strip_count: int = 0
    max_token_bytes: int = 0  # 0: not known, see `least_tokens`
    has_pieces: bool = True
    rss_bytes: int = 0  # 0: not known
    error: str | None = None


class EncodeCall(msgspec.Struct, tag="encode"):
    """Text to token ids."""

    text: str
    add_special_tokens: bool
    mark: str = ""  # see `Tokenizer.encode`, as `tenant`
    tenant: str | None = None


class TokenIdCall(msgspec.Struct, tag="token_id"):
    """The id of a vocabulary entry by its name."""

    token: str


class CheckCall(msgspec.Struct, tag="check"):
    """Whether the vocabulary can follow a grammar."""

    kind: GrammarKind
    text: str


TextCall = EncodeCall | TokenIdCall | CheckCall


class TextReply(msgspec.Struct, omit_defaults=True):
    """`token_ids` of an EncodeCall or, one or none, of a TokenIdCall; else `error` is a sentence
    for the client. `rss_bytes`: the process's memory after a call before. `cpu_s`: processor
    seconds that the call took."""

    token_ids: list[int] = []
    error: str | None = None
    rss_bytes: int = 0
    cpu_s: float = 0.0
