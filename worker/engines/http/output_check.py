"""OutputChecks: whether an upstream's output keeps to the grammar that it was sent. Replay: whether
it starts as before.

Servers ignore keywords of schemas that they do not know, or read a grammar in another way. A client
gets an error and no text that only looks like its structure.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

from llguidance import LLMatcher

from shared.messages import ErrorCode, Grammar, GrammarKind
from shared.text.grammar_compiler import GrammarCompiler
from worker.engine.errors import RequestRefused
from worker.engines.http.servers import END, Piece


class OutputCheck:
    """One output, from its first token."""

    def __init__(self, matcher: LLMatcher, stop_token_ids: Collection[int]) -> None:
        self._matcher, self._stop_token_ids = matcher, stop_token_ids

    def take(self, piece: Piece) -> None:
        """Raises RequestRefused where the next tokens leave the grammar, and at the model's own end
        where the grammar does not end."""
        matcher = self._matcher
        is_kept = all(matcher.consume_token(token_id) for token_id in piece.token_ids)
        is_stopped = piece.token_ids[-1:] and piece.token_ids[-1] in self._stop_token_ids
        if is_kept and piece.reason == END and not is_stopped:
            is_kept = matcher.is_stopped() or matcher.is_accepting()
        if not is_kept:
            raise RequestRefused(
                ErrorCode.GRAMMAR_FAILED,
                "the model's server did not keep the answer to its schema or grammar; it may not "
                "have all that they use",
            )


class OutputChecks:
    """Makes them for one vocabulary."""

    def __init__(self, grammars: GrammarCompiler) -> None:
        self._grammars = grammars

    async def check(self, grammar: Grammar, stop_token_ids: Collection[int] = ()) -> OutputCheck:
        """Returns that of an output that may end at one of `stop_token_ids` anywhere, too.

        Raises GrammarInvalid.
        """
        compiled = self._grammars.compiled(_as_servers_write_it(grammar))
        matcher = (await asyncio.wrap_future(compiled)).deep_copy()
        return OutputCheck(matcher, stop_token_ids)


class Replay:
    """Tokens that an output has, which an upstream that starts it again must make first."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._expected = deque(token_ids)

    def new(self, piece: Piece) -> Piece:
        """Returns what a piece has after them. Raises RequestRefused where it has others."""
        num = 0
        while self._expected and num < len(piece.token_ids):
            if piece.token_ids[num] != self._expected.popleft():
                raise RequestRefused(
                    ErrorCode.GRAMMAR_FAILED,
                    "the model's server broke off in the middle of the structured output and made "
                    "another one when it was sent again; send the request again",
                )
            num += 1
        return piece._replace(token_ids=piece.token_ids[num:], logprobs=piece.logprobs[num:])


def _as_servers_write_it(grammar: Grammar) -> Grammar:
    """Returns a schema with any white space, which each server bounds in its own way."""
    if grammar.kind is not GrammarKind.JSON_SCHEMA:
        return grammar
    schema: Any = json.loads(grammar.text)
    if isinstance(schema, dict):
        schema.pop("x-guidance", None)
    return Grammar(grammar.kind, json.dumps(schema))
