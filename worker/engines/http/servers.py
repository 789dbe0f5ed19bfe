"""The programs that can be upstreams: the requests that each takes and the tokens that it streams.

Each is sent token ids and streams token ids, so that no text is tokenized twice and a request that
breaks can continue after its last token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple, Protocol

from shared.messages import ErrorCode, TokenLogprob
from worker.engine.errors import RequestRefused
from worker.engine.request import EngineRequest
from worker.engines.sampling_members import sampling_members

END, LENGTH = "end", "length"  # reasons: the model's own end, the limit of tokens

# Reads the next event of a stream. Raises KeyError, TypeError or ValueError for other JSON.
Reader = Callable[[Mapping[str, Any]], "Piece"]

_VLLM_REASONS = {"stop": END, "length": LENGTH}
_LLAMA_REASONS = {"eos": END, "limit": LENGTH}
_TOKEN_ID = "token_id:"
_MAX_LLAMA_SEED = 2**32 - 2  # the number after it stands for a random seed


class Piece(NamedTuple):
    """The tokens of one event. `reason`: why the upstream ended the output: END, LENGTH or its own
    word; empty: it continues."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    reason: str = ""


class Facts(NamedTuple):
    """A server's answers before the first request."""

    version: str  # with its name
    max_model_len: int  # 0: it does not report
    num_slots: int = 0  # 0: it does not report


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

    def body(
        self, request: EngineRequest, model: str, most_tokens: int, eos_token_ids: Set[int]
    ) -> dict[str, Any]:
        """Returns the body of a request that continues after its `output_token_ids`.

        Raises RequestRefused for a parameter that this server does not have.
        """
        ...

    def reader(self, num_top: int | None, encode: Callable[[str], Sequence[int]]) -> Reader:
        """Returns the reader of one stream, whose tokens have `num_top` log probabilities.

        `encode` returns the token ids of a text, without special tokens.
        """
        ...


class VllmServer:
    """vLLM's /v1/completions, with its extensions `return_token_ids` and
    `return_tokens_as_token_ids`."""

    facts = "/version"
    tokenize_path = "/tokenize"
    generate_path = "/v1/completions"

    def read_facts(self, answer: Mapping[str, Any], entry: Mapping[str, Any]) -> Facts:
        return Facts(f"vllm {answer['version']}", int(entry.get("max_model_len") or 0))

    def tokenize_body(self, model: str, text: str) -> dict[str, Any]:
        return {"model": model, "prompt": text, "add_special_tokens": False}

    def body(
        self, request: EngineRequest, model: str, most_tokens: int, eos_token_ids: Set[int]
    ) -> dict[str, Any]:
        members = sampling_members(request, most_tokens, eos_token_ids)
        return {
            **{name: value for name, value in members.items() if value is not None},
            "model": model,
            "prompt": [*request.prompt_token_ids, *request.output_token_ids],
            "stream": True,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": False,
        }

    def reader(self, num_top: int | None, encode: Callable[[str], Sequence[int]]) -> Reader:
        def read(event: Mapping[str, Any]) -> Piece:
            if not event["choices"]:
                return Piece(())
            choice = event["choices"][0]
            token_ids = tuple(map(int, choice["token_ids"] or ()))
            logprobs: tuple[TokenLogprob, ...] = ()
            if num_top is not None and token_ids:
                given = choice["logprobs"]
                logprobs = tuple(
                    TokenLogprob(token_id, float(own), _best(_by_id(top or {}), num_top))
                    for token_id, own, top in zip(
                        token_ids, given["token_logprobs"], given["top_logprobs"], strict=True
                    )
                )
            reason = choice["finish_reason"] or ""
            return Piece(token_ids, logprobs, _VLLM_REASONS.get(reason, reason))

        return read


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
        }
        if not params.greedy:
            body["seed"] = ((params.seed or 0) + num_known) % _MAX_LLAMA_SEED
        if params.logprobs is not None:
            body["n_probs"] = max(1, params.logprobs)
        return body

    def reader(self, num_top: int | None, encode: Callable[[str], Sequence[int]]) -> Reader:
        num_seen = 0

        def read(event: Mapping[str, Any]) -> Piece:
            nonlocal num_seen
            token_ids = tuple(map(int, event["tokens"] or ()))
            if event.get("stop"):
                reason = str(event.get("stop_type") or "stop")
                # It also ends at tokens that are ends by its own list, after it has sent them.
                return Piece(token_ids, (), _LLAMA_REASONS.get(reason, reason))
            logprobs: tuple[TokenLogprob, ...] = ()
            if num_top is not None:
                for entry in event["completion_probabilities"]:
                    tops = {int(top["id"]): top["logprob"] for top in entry["top_logprobs"]}
                    own = TokenLogprob(int(entry["id"]), entry["logprob"], _best(tops, num_top))
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


SERVERS: tuple[Server, ...] = (VllmServer(), LlamaServer())


def _by_id(top: Mapping[str, float]) -> dict[int, float]:
    return {int(name.removeprefix(_TOKEN_ID)): value for name, value in top.items()}


def _best(values: Mapping[int, float], num_top: int) -> tuple[tuple[int, float], ...]:
    best = sorted(values.items(), key=lambda item: (-item[1], item[0]))
    return tuple((token_id, float(value)) for token_id, value in best[:num_top])
