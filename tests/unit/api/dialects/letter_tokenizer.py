"""A tokenizer small enough to think about: id 0 ends, the others stand for given bytes."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class LetterDetokenizer:
    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        raw = b"".join(b"" if token == 0 else self._pieces[token] for token in token_ids)
        return self._decoder.decode(raw)

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class LetterTokenizer:
    """Implements shared.text.base.Tokenizer over `pieces`; pieces[0] is the end token's name."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self.vocab_size = len(pieces)
        self.special_texts: Sequence[str] = ()

    def least_tokens(self, text: str) -> int:
        return 0

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        mark: str = "",
        tenant: str | None = None,
    ) -> list[int]:
        return [self._pieces.index(char.encode()) for char in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        detokenizer = self.detokenizer()
        return detokenizer.push(token_ids) + detokenizer.flush()

    def detokenizer(self, *, skip_special_tokens: bool = True) -> LetterDetokenizer:
        return LetterDetokenizer(self._pieces)

    def token_text(self, token_id: int) -> str:
        return self._pieces[token_id].decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id]
