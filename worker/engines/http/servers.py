"""What the kinds of upstreams have in common: Server, and the Pieces of the streams that they send.

Each is sent token ids and streams token ids, so that no text is tokenized twice and a request that
breaks can continue after its last token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple, Protocol

from shared.messages import ErrorCode, Grammar, GrammarKind, TokenLogprob
from worker.engine.errors import RequestRefused
from worker.engine.request import EngineRequest

END, LENGTH = "end", "length"  # reasons: the model's own end, the limit of tokens

# Reads the next event of a stream. Raises KeyError, TypeError or ValueError for other JSON.
Reader = Callable[[Mapping[str, Any]], "Piece"]

_KINDS = {
    GrammarKind.JSON_SCHEMA: "a JSON schema",
    GrammarKind.REGEX: "a regular expression or a choice of texts",
    GrammarKind.LARK: "a context-free grammar, such as those of forced tool calls",
}


class Piece(NamedTuple):
    """The tokens of one event. `reason`: why the upstream ended the output: END, LENGTH or its own
    word; empty: it continues."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    reason: str = ""
    num_cached_tokens: int | None = None  # of the prompt; None: this event does not report it


class Facts(NamedTuple):
    """A server's answers before the first request."""

    version: str  # with its name
    max_model_len: int  # 0: it does not report
    num_slots: int = 0  # 0: it does not report


class UpstreamBroke(Exception):
    """The upstream did not complete the request; the same or another one may continue it."""

    def __init__(self, message: str, *, is_blamed: bool = True, is_down: bool = True) -> None:
        super().__init__(message)
        self.is_blamed = is_blamed  # the request may have caused it, or another one there
        self.is_down = is_down  # the upstream is to be looked at before further requests


class UpstreamRefused(Exception):
    """The upstream rejected the request itself; so would any other."""


class Server(Protocol):
    """One kind of server. `read_facts` raises KeyError, TypeError or ValueError for other JSON."""

    facts: str  # path that exists on this kind only
    tokenize_path: str
    generate_path: str

    def read_facts(self, answer: Mapping[str, Any], entry: Mapping[str, Any]) -> Facts:
        """Reads the answer to `facts`, and the entry of the model in /v1/models."""
        ...

    def tokenize_body(self, model: str, text: str) -> dict[str, Any]:
        """Returns the body that asks for the token ids of a text, without special tokens."""
        ...

    def grammar(self, grammar: Grammar) -> Grammar:
        """Returns a grammar as this server follows it. Raises RequestRefused for a language that it
        does not have."""
        ...

    def body(
        self, request: EngineRequest, model: str, most_tokens: int, eos_token_ids: Set[int]
    ) -> dict[str, Any]:
        """Returns the body of a request that continues after its `output_token_ids`; its grammar is
        from `grammar`.

        Raises RequestRefused for a parameter that this server does not have.
        """
        ...

    def reader(self, num_top: int | None, encode: Callable[[str], Sequence[int]]) -> Reader:
        """Returns the reader of one stream, whose tokens have `num_top` log probabilities.

        `encode` returns the token ids of a text, without special tokens. The reader raises
        UpstreamBroke or UpstreamRefused for an end that is neither.
        """
        ...


def no_grammar(name: str, grammar: Grammar) -> RequestRefused:
    """Returns the refusal of a grammar in a language that the server `name` does not have."""
    sentence = f"{name} cannot keep an answer to {_KINDS[grammar.kind]}"
    return RequestRefused(ErrorCode.GRAMMAR_FAILED, sentence)


def best_of(values: Mapping[int, float], num_top: int) -> tuple[tuple[int, float], ...]:
    """Returns the `num_top` most likely of token ids with their log probabilities."""
    best = sorted(values.items(), key=lambda item: (-item[1], item[0]))
    return tuple((token_id, float(value)) for token_id, value in best[:num_top])
