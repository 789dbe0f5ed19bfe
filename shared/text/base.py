"""The ports of text: what the rest of the house may ask of a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Detokenizer(Protocol):
    """Text of one growing token sequence. What it returned never changes afterwards."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that these tokens complete; '' while a character is still open.

        Well-formed UTF-8 always; each maximal invalid part becomes one U+FFFD as soon as it is
        known to be invalid.
        """
        ...

    def flush(self) -> str:
        """The rest: a character cut off at the end becomes U+FFFD. Afterwards nothing is held."""
        ...


class Tokenizer(Protocol):
    """Text to token ids and back. Implementations are safe to call from several threads."""

    vocab_size: int

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def least_tokens(self, text: str) -> int:
        """A lower bound of the tokens that `encode` would return, without the work of it."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The whole text at once: equals the concatenation of a Detokenizer's pushes and flush."""
        ...

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer: ...
    def token_text(self, token_id: int) -> str:
        """One token as text, special tokens included (for logprobs and /tokenize)."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes one token stands for."""
        ...

    def token_id(self, token: str) -> int | None:
        """The id of a vocabulary entry by its exact name, such as '<|im_end|>'."""
        ...


class ChatTemplate(Protocol):
    """Messages to prompt text, as transformers' apply_chat_template does it."""

    variables: frozenset[str]  # names that the template reads beyond what it sets itself

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """Raises InvalidParameter('messages', ...) when the template refuses the conversation."""
        ...
