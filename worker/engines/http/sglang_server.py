"""SglangServer: SGLang's native /generate.

The facts below are those of SGLang 0.5.23's source, in python/sglang/srt:

- entrypoints/http_server.py: /server_info is its own path; /v1/models has `max_model_len`;
  /tokenize has `add_special_tokens`. /generate streams `data: {...}` and `data: [DONE]`, and an
  error as an event whose `code` is 400. A closed connection aborts the request.
- managers/tokenizer_manager.py: each event has the `output_ids` so far, or with
  `--incremental-streaming-output` those since the last event; `meta_info` has
  `completion_tokens`, `cached_tokens` and, if asked, `output_token_logprobs` and
  `output_top_logprobs` as lists of [log probability, token id, text], so far or since as well.
- managers/schedule_batch.py: `finish_reason` is an object of type stop, length or abort, the latter
  with `message` and `status_code`, which is 400 for a grammar that does not compile. `ignore_eos`
  ignores `stop_token_ids` as well.
- sampling/sampling_params.py: members and their bounds. `sampling_seed` has an effect with
  `--enable-deterministic-inference`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from itertools import zip_longest
from typing import Any

from shared.messages import Grammar, GrammarKind, TokenLogprob
from worker.engine.request import EngineRequest
from worker.engines.http.servers import (
    END,
    LENGTH,
    Facts,
    Piece,
    Reader,
    UpstreamRefused,
    best_of,
    no_grammar,
)
from worker.engines.sampling_members import sampling_members

_REASONS = {"stop": END, "length": LENGTH}
_GRAMMARS = {GrammarKind.JSON_SCHEMA: "json_schema", GrammarKind.REGEX: "regex"}
_SAME_NAMES = (
    *("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "stop_token_ids"),
)


class SglangServer:
    """SGLang's /generate. Its own end tokens end an output as well as the checkpoint's."""

    facts = "/server_info"
    tokenize_path = "/tokenize"
    generate_path = "/generate"

    def read_facts(self, answer: Mapping[str, Any], entry: Mapping[str, Any]) -> Facts:
        return Facts(f"sglang {answer['version']}", int(entry.get("max_model_len") or 0))

    def tokenize_body(self, model: str, text: str) -> dict[str, Any]:
        return {"model": model, "prompt": text, "add_special_tokens": False}

    def grammar(self, grammar: Grammar) -> Grammar:
        if grammar.kind not in _GRAMMARS:
            raise no_grammar("SGLang", grammar)
        return grammar

    def body(
        self, request: EngineRequest, model: str, most_tokens: int, eos_token_ids: Set[int]
    ) -> dict[str, Any]:
        params = request.params
        members = sampling_members(request, most_tokens, eos_token_ids)
        sampling: dict[str, Any] = {
            **{name: members[name] for name in _SAME_NAMES},
            "max_new_tokens": members["max_tokens"],
            "min_new_tokens": members["min_tokens"],
            "top_k": params.top_k or -1,
            "ignore_eos": params.ignore_eos,
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
        if params.logit_bias:
            sampling["logit_bias"] = {str(key): bias for key, bias in params.logit_bias.items()}
        if members["seed"] is not None:
            sampling["sampling_seed"] = members["seed"]
        if params.grammar is not None:
            sampling[_GRAMMARS[params.grammar.kind]] = params.grammar.text
        body: dict[str, Any] = {
            "input_ids": [*request.prompt_token_ids, *request.output_token_ids],
            "sampling_params": sampling,
            "stream": True,
        }
        if params.logprobs is not None:
            body |= {"return_logprob": True, "top_logprobs_num": params.logprobs}
        return body

    def reader(self, num_top: int | None, encode: Callable[[str], Sequence[int]]) -> Reader:
        num_seen = 0

        def read(event: Mapping[str, Any]) -> Piece:
            nonlocal num_seen
            meta = event["meta_info"]
            before, num_seen = num_seen, int(meta["completion_tokens"])
            token_ids = tuple(map(int, _news(event["output_ids"], before, num_seen)))
            logprobs: tuple[TokenLogprob, ...] = ()
            if num_top is not None and token_ids:
                own = _news(meta["output_token_logprobs"], before, num_seen)
                tops = _news(meta["output_top_logprobs"], before, num_seen) if num_top else ()
                logprobs = tuple(
                    TokenLogprob(int(entry[1]), float(entry[0]), _best(top or (), num_top))
                    for entry, top in zip_longest(own, tops)
                )
            end = meta["finish_reason"] or {"type": ""}
            if end["type"] == "abort" and end.get("status_code") == 400:
                raise UpstreamRefused(str(end.get("message")))
            reason = _REASONS.get(end["type"], end["type"])
            num_cached = None if before else int(meta["cached_tokens"])
            return Piece(token_ids, logprobs, reason, num_cached)

        return read


def _news(values: Sequence[Any], before: int, total: int) -> Sequence[Any]:
    """Returns the entries after the first `before` of `total`; `values` has all of them, or those
    alone. Raises ValueError."""
    if total == before:
        return ()
    if len(values) == total - before:
        return values
    if len(values) >= total:
        return values[before:total]
    raise ValueError(f"{total - before} new tokens are sent as {len(values)}")


def _best(entries: Sequence[Sequence[Any]], num_top: int) -> tuple[tuple[int, float], ...]:
    return best_of({int(entry[1]): float(entry[0]) for entry in entries}, num_top)
