"""The ports of text: tokenizer, detokenizer, chat template, grammars, and their errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from shared.messages import Grammar


class Detokenizer(Protocol):
    """Text of one growing token sequence. What it returned never changes afterwards."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Returns the text that these tokens complete; '' while a character is still open.

        Well-formed UTF-8 always; each maximal invalid part becomes one U+FFFD as soon as it is
        known to be invalid.
        """
        ...

    def flush(self) -> str:
        """Returns the rest: a character cut off at the end becomes U+FFFD. Nothing is held then."""
        ...


class Tokenizer(Protocol):
    """Text to token ids and back. Implementations are safe to call from several threads."""

    vocab_size: int
    special_texts: Sequence[str]  # texts that are encoded as special tokens

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        mark: str = "",
        tenant: str | None = None,
    ) -> list[int]:
        """Returns the token ids. Raises InvalidParameter("prompt") for a lone surrogate.

        `mark`: is no part of the text, and a special token with it inside is ordinary text
        (`shared.text.special_text`). `tenant`: the ids of long texts may be kept for other prompts
        of this one.
        """
        ...

    def least_tokens(self, text: str) -> int:
        """Returns a lower bound of the tokens that `encode` would return, at little cost."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the whole text at once: the concatenation of a Detokenizer's pushes and flush."""
        ...

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """Returns a detokenizer for one new sequence."""
        ...

    def token_text(self, token_id: int) -> str:
        """Returns one token as text, special tokens included (for logprobs and /tokenize)."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the exact bytes of one token."""
        ...

    def token_id(self, token: str) -> int | None:
        """Returns the id of a vocabulary entry by its exact name, such as '<|im_end|>'."""
        ...


class ChatTemplate(Protocol):
    """Messages to prompt text, as transformers' apply_chat_template does it."""

    variables: frozenset[str]  # names that the template reads and does not set itself
    source: str  # of the default template

    def __hash__(self) -> int: ...

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
        name: str = "",
    ) -> str:
        """Raises InvalidParameter('messages', ...) when the template refuses the conversation."""
        ...


class GrammarChecks(Protocol):
    """Finds out whether a model's vocabulary can follow a grammar."""

    def check(self, grammar: Grammar, param: str) -> None:
        """Raises InvalidParameter(param) with a sentence for a grammar that cannot be followed."""
        ...


# What can be wrong with the text files of a model, and with a grammar for its outputs.


class TextInvalid(ValueError):
    """A tokenizer, chat template or model card that cannot be used.

    Raised when a model is loaded and never while it serves. The message is a sentence that names
    the file and the remedy.
    """


class RenderingUnavailable(RuntimeError):
    """No process could render a chat template: none could be started, they were killed from
    outside or timed out, or this process is going down.

    Shows no fault of the template or the conversation: a later attempt may succeed.
    """


class GrammarInvalid(ValueError):
    """A grammar that cannot be compiled, or that no output can follow; the message is a sentence.

    The client's fault where a frontend checks it. If a worker finds it, another release or
    another model has let it pass.
    """
