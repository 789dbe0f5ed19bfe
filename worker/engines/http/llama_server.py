"""LlamaServer: llama.cpp's own server."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from shared.messages import ErrorCode, Grammar, GrammarKind, TokenLogprob
from worker.engine.errors import RequestRefused
from worker.engine.request import EngineRequest
from worker.engines.http.servers import (
    END,
    LENGTH,
    Facts,
    Piece,
    Reader,
    best_of,
    no_grammar,
)

_REASONS = {"eos": END, "limit": LENGTH}
_MAX_SEED = 2**32 - 2  # the number after it stands for a random seed


class LlamaServer:
    """llama.cpp's /completion. It ends an output at the model's own end tokens only."""

    facts = "/props"
    tokenize_path = "/tokenize"
    generate_path = "/completion"

    def read_facts(self, answer: Mapping[str, Any], entry: Mapping[str, Any]) -> Facts:
        context = answer["default_generation_settings"].get("n_ctx") or 0
        name = str(answer.get("build_info") or "").strip()
        return Facts(f"llama.cpp {name}".strip(), int(context), int(answer["total_slots"]))

    def tokenize_body(self, model: str, text: str) -> dict[str, Any]:
        return {"content": text, "add_special": False, "parse_special": False}

    def grammar(self, grammar: Grammar) -> Grammar:
        if grammar.kind is not GrammarKind.JSON_SCHEMA:
            raise no_grammar("llama.cpp", grammar)
        schema = _required_first(json.loads(grammar.text))
        return Grammar(grammar.kind, json.dumps(schema, ensure_ascii=False))

    def body(
        self, request: EngineRequest, model: str, most_tokens: int, eos_token_ids: Set[int]
    ) -> dict[str, Any]:
        params = request.params
        if params.min_tokens > len(request.output_token_ids):
            raise RequestRefused(
                ErrorCode.PAYLOAD_INVALID,
                "min_tokens is not supported: llama.cpp has no such limit",
            )
        num_known = len(request.output_token_ids)
        body: dict[str, Any] = {
            "prompt": [*request.prompt_token_ids, *request.output_token_ids],
            "n_predict": max(1, most_tokens - num_known),
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "typical_p": 1.0,
            "repeat_penalty": params.repetition_penalty,
            # All of them; newer servers refuse -1, which older ones take for that.
            "repeat_last_n": len(request.prompt_token_ids) + most_tokens,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "logit_bias": [[token_id, bias] for token_id, bias in params.logit_bias.items()],
            "ignore_eos": params.ignore_eos,
            "stream": True,
            "return_tokens": True,
            "cache_prompt": True,
            "return_progress": True,
        }
        if not params.greedy:
            body["seed"] = ((params.seed or 0) + num_known) % _MAX_SEED
        if params.logprobs is not None:
            body["n_probs"] = max(1, params.logprobs)
        if params.grammar is not None:
            body["json_schema"] = json.loads(params.grammar.text)
        return body

    def reader(self, num_top: int | None, encode: Callable[[str], Sequence[int]]) -> Reader:
        num_seen, is_prompt_seen = 0, False

        def read(event: Mapping[str, Any]) -> Piece:
            nonlocal num_seen, is_prompt_seen
            if "prompt_progress" in event:  # before the first token, of each batch of the prompt
                cached = None if is_prompt_seen else int(event["prompt_progress"]["cache"])
                is_prompt_seen = True
                return Piece((), num_cached_tokens=cached)
            token_ids = tuple(map(int, event["tokens"] or ()))
            if event.get("stop"):
                reason = str(event.get("stop_type") or "stop")
                # It also ends at tokens that are ends by its own list, after it has sent them.
                return Piece(token_ids, (), _REASONS.get(reason, reason))
            logprobs: tuple[TokenLogprob, ...] = ()
            if num_top is not None:
                for entry in event["completion_probabilities"]:
                    tops = {int(top["id"]): top["logprob"] for top in entry["top_logprobs"]}
                    own = TokenLogprob(int(entry["id"]), entry["logprob"], best_of(tops, num_top))
                    logprobs = (*logprobs, own)
            num_new = int(event["tokens_predicted"]) - num_seen
            num_seen += num_new
            if num_new > len(token_ids):
                # It sends only the last token of a character that has several, with its whole text.
                whole = tuple(encode(event["content"]))
                if len(whole) != num_new or whole[-1:] != token_ids[-1:]:
                    raise ValueError(f"{num_new} tokens are sent as {token_ids}")
                unknown = tuple(TokenLogprob(token_id, 0.0) for token_id in whole[:-1])
                return Piece(whole, (*unknown, *logprobs) if num_top is not None else ())
            return Piece(token_ids, logprobs)

        return read


def _required_first(value: Any) -> Any:
    """Returns a schema with the properties in the order in which llama.cpp has them written."""
    if isinstance(value, list):
        return [_required_first(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    found = {name: _required_first(entry) for name, entry in value.items()}
    properties, required = found.get("properties"), found.get("required")
    if isinstance(properties, dict) and isinstance(required, list):
        found["properties"] = dict(sorted(properties.items(), key=lambda it: it[0] not in required))
    return found
