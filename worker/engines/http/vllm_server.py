"""VllmServer: vLLM's own OpenAI server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from shared.messages import Grammar, GrammarKind, TokenLogprob
from worker.engine.request import EngineRequest
from worker.engines.http.servers import END, LENGTH, Facts, Piece, Reader, best_of
from worker.engines.sampling_members import STRUCTURED_OUTPUTS, sampling_members

_REASONS = {"stop": END, "length": LENGTH}
_TOKEN_ID = "token_id:"


class VllmServer:
    """vLLM's /v1/completions, with its extensions `return_token_ids` and
    `return_tokens_as_token_ids`. `cached_tokens` come where it was started with
    `--enable-prompt-tokens-details`.
    """

    facts = "/version"
    tokenize_path = "/tokenize"
    generate_path = "/v1/completions"

    def read_facts(self, answer: Mapping[str, Any], entry: Mapping[str, Any]) -> Facts:
        return Facts(f"vllm {answer['version']}", int(entry.get("max_model_len") or 0))

    def tokenize_body(self, model: str, text: str) -> dict[str, Any]:
        return {"model": model, "prompt": text, "add_special_tokens": False}

    def grammar(self, grammar: Grammar) -> Grammar:
        if grammar.kind is not GrammarKind.LARK or "%llguidance" in grammar.text:
            return grammar
        # XGrammar, which vLLM tries first, reads special tokens in another way. It refuses a line
        # that llguidance knows.
        return Grammar(grammar.kind, f"%llguidance {{}}\n{grammar.text}")

    def body(
        self, request: EngineRequest, model: str, most_tokens: int, eos_token_ids: Set[int]
    ) -> dict[str, Any]:
        members = sampling_members(request, most_tokens, eos_token_ids)
        grammar = request.params.grammar
        if grammar is not None:
            members["structured_outputs"] = {STRUCTURED_OUTPUTS[grammar.kind]: grammar.text}
        return {
            **{name: value for name, value in members.items() if value is not None},
            "model": model,
            "prompt": [*request.prompt_token_ids, *request.output_token_ids],
            "stream": True,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": False,
            "stream_options": {"include_usage": True},
        }

    def reader(self, num_top: int | None, encode: Callable[[str], Sequence[int]]) -> Reader:
        last = Piece(())  # kept until the event after it, which has the usage

        def read(event: Mapping[str, Any]) -> Piece:
            nonlocal last
            if not event["choices"]:
                details = event["usage"].get("prompt_tokens_details") or {}
                return last._replace(num_cached_tokens=details.get("cached_tokens"))
            choice = event["choices"][0]
            token_ids = tuple(map(int, choice["token_ids"] or ()))
            logprobs: tuple[TokenLogprob, ...] = ()
            if num_top is not None and token_ids:
                given = choice["logprobs"]
                logprobs = tuple(
                    TokenLogprob(token_id, float(own), best_of(_by_id(top or {}), num_top))
                    for token_id, own, top in zip(
                        token_ids, given["token_logprobs"], given["top_logprobs"], strict=True
                    )
                )
            reason = choice["finish_reason"] or ""
            piece = Piece(token_ids, logprobs, _REASONS.get(reason, reason))
            if piece.reason not in (END, LENGTH):
                return piece
            last = piece
            return Piece(())

        return read


def _by_id(top: Mapping[str, float]) -> dict[int, float]:
    return {int(name.removeprefix(_TOKEN_ID)): value for name, value in top.items()}
