"""SamplingParams of a request, with the model's defaults, then OpenAI's."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from api.errors import MAX_ECHO_CHARS
from api.generation.formatter import CHAT_ENTRY_BYTES, TOKEN_BYTES, TOKEN_ID_BYTES
from api.generation.ignored_parameters import request_ignored
from api.generation.protocol import SamplingFields
from api.request_errors import unsupported
from shared.messages import (
    MAX_TOP_LOGPROBS,
    InvalidParameter,
    SamplingParams,
)
from shared.text.model_card import KEEP_ALL_TOP_K, SamplingDefaults

DRAWN_SEED = -1  # as at vLLM and llama.cpp
MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ContextBudget:
    """What the model's context holds, how much of it the prompt takes, and the
    sampling defaults."""

    context_tokens: int
    vocab_size: int
    prompt_tokens: int = 0
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)

    @property
    def left(self) -> int:
        return self.context_tokens - self.prompt_tokens

    def check_prompt(self, param: str, *, is_least: bool = False) -> None:
        """Raises InvalidParameter when the prompt leaves no place for an answer, or is empty.

        `is_least`: `prompt_tokens` is a lower bound, not a count.
        """
        if self.prompt_tokens < 1:
            raise InvalidParameter(param, "must have at least one token")
        if self.left < 1:
            prompt = f"at least {self.prompt_tokens}" if is_least else f"{self.prompt_tokens}"
            raise InvalidParameter(
                param,
                f"This model's maximum context length is {self.context_tokens} tokens, but the "
                f"prompt alone has {prompt}. Please shorten it.",
                "context_length_exceeded",
            )

    def max_tokens(self, requested: int | None, default: int, *, least: int = 1) -> int:
        """Returns the most tokens of the answer: at most the context without the prompt.

        `report_clipped` names a parameter that requests more. Raises InvalidParameter.
        """
        if requested is None:
            return min(default, self.left)
        check_max_tokens(requested, least)
        return min(requested, self.left)

    def report_clipped(self, param: str, requested: int | None) -> None:
        """Names `param` as ignored where it requests more tokens than the context has left.

        Raises InvalidParameter where such a request is refused.
        """
        if requested is None or requested <= self.left:
            return
        refusal = InvalidParameter(
            param,
            f"This model's maximum context length is {self.context_tokens} tokens, but "
            f"{self.prompt_tokens + requested} were requested ({self.prompt_tokens} in the "
            f"prompt, {requested} for the answer). Please ask for less.",
            "context_length_exceeded",
        )
        request_ignored.get().report(param, refusal)


def check_max_tokens(requested: int, least: int = 1) -> None:
    """Raises InvalidParameter. An answer without any token is one of `echo` alone."""
    if requested < least:
        raise InvalidParameter("max_tokens", f"must be between {least} and {MAX_TOKENS}")


def check_prompt_logprobs(requested: int | None, *, streamed: bool) -> None:
    """Raises InvalidParameter."""
    if requested is None:
        return
    if not 0 <= requested <= MAX_TOP_LOGPROBS:
        raise InvalidParameter("prompt_logprobs", f"must be between 0 and {MAX_TOP_LOGPROBS}")
    if streamed:
        raise unsupported("prompt_logprobs", "only in whole responses: leave out 'stream'")


def sampling_params(
    request: SamplingFields,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    budget: ContextBudget,
) -> SamplingParams:
    """Returns the parameters of a job. Raises InvalidParameter."""
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        **with_defaults(request, request.repetition_penalty, budget.defaults),
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias=_logit_bias(request.logit_bias, budget.vocab_size),
        seed=resolved_seed(request.seed),
        stop=stop_strings(request.stop),
        stop_token_ids=stop_token_ids("stop_token_ids", request.stop_token_ids, budget),
        ignore_eos=request.ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


class _Defaulted(Protocol):
    """Parameters that the model has defaults for."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None


def with_defaults(
    request: _Defaulted,
    repetition_penalty: float | None,
    defaults: SamplingDefaults,
    neutral_temperature: float = 1.0,
) -> dict[str, Any]:
    """Returns the parameters that the model has defaults for, each with a value."""
    requested = {
        "temperature": request.temperature,
        "top_k": 0 if request.top_k == KEEP_ALL_TOP_K else request.top_k,
        "top_p": request.top_p,
        "min_p": request.min_p,
        "repetition_penalty": repetition_penalty,
    }
    return defaults.fill(requested, neutral_temperature=neutral_temperature)


def resolved_seed(requested: int | None) -> int:
    """Returns a seed, drawn where the request has none or -1: every attempt on every worker
    continues the same stream."""
    return secrets.randbits(63) if requested in (None, DRAWN_SEED) else requested


def stop_strings(requested: str | list[str]) -> tuple[str, ...]:
    """Returns the stop strings of a text or a list."""
    return (requested,) if isinstance(requested, str) else tuple(requested)


def stop_token_ids(param: str, requested: list[int], budget: ContextBudget) -> tuple[int, ...]:
    """Returns the ids. Raises InvalidParameter for one that the model does not have."""
    if requested and not 0 <= min(requested) <= max(requested) < budget.vocab_size:
        raise InvalidParameter(param, f"token ids are between 0 and {budget.vocab_size - 1}")
    return tuple(requested)


def _logit_bias(requested: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    bias = {}
    for key, value in requested.items():
        is_id = key.isascii() and key.isdigit() and len(key) <= 10
        if not is_id or int(key) >= vocab_size:
            raise InvalidParameter(
                "logit_bias",
                f"keys are token ids between 0 and {vocab_size - 1}, got {key[:MAX_ECHO_CHARS]!r}",
            )
        bias[int(key)] = value
    return bias


@contextmanager
def renamed_parameters(names: Mapping[str, str]) -> Iterator[None]:
    """Renames parameters in errors: from those that are known here to those that the client sent.

    Only the first name of a path is looked up: `messages.3.content` becomes all of `input`.
    """
    try:
        yield
    except InvalidParameter as error:
        name = names.get(error.param.partition(".")[0])
        if name is None:
            raise
        message = error.message.replace(f"'{error.param}'", f"'{name}'")
        raise InvalidParameter(name, message, error.code) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseSize:
    """The parameters that determine a response's size, by their names in the dialect."""

    choices: tuple[tuple[str, int], ...] = ()  # members that multiply to the number of choices
    max_tokens: tuple[str, int | None]  # None: left to the default
    logprobs: tuple[str, int | None] = ("logprobs", None)  # alternatives of each token
    entry_bytes: int = CHAT_ENTRY_BYTES
    has_token_ids: bool = False
    prompts: tuple[str, int] = ("echo", 0)  # bytes of the prompts that the answer repeats

    @property
    def num_choices(self) -> int:
        num_choices = 1
        for _, factor in self.choices:
            num_choices *= factor
        return num_choices

    @property
    def token_bytes(self) -> int:
        """Returns the bytes of each token of each choice."""
        num_bytes = TOKEN_BYTES + (TOKEN_ID_BYTES if self.has_token_ids else 0)
        num_alternatives = self.logprobs[1]
        if num_alternatives is not None:
            num_bytes += (1 + num_alternatives) * self.entry_bytes
        return num_bytes

    def fitted(self, sampling: SamplingParams, max_bytes: int) -> SamplingParams:
        """Returns `sampling`, with a default of max_tokens that keeps the answer in `max_bytes`.

        Raises InvalidParameter, on max_tokens or on the prompts, if the caller requests more.
        """
        prompts_param, prompt_bytes = self.prompts
        step_bytes = self.num_choices * self.token_bytes
        num_bytes = prompt_bytes + sampling.max_tokens * step_bytes
        if num_bytes <= max_bytes:
            return sampling
        param, requested = self.max_tokens
        num_tokens = max(0, max_bytes - prompt_bytes) // step_bytes
        if requested is None and num_tokens:
            return replace(sampling, max_tokens=num_tokens)
        members = [(name, factor) for name, factor in self.choices if factor > 1]
        members.append((param, sampling.max_tokens))
        if self.logprobs[1] is not None:
            members.append((self.logprobs[0], self.logprobs[1]))
        named = ", ".join(f"{name} {value}" for name, value in members)
        if prompt_bytes:
            named += f" and {prompt_bytes} bytes of prompts ({prompts_param})"
        if prompt_bytes and not num_tokens:
            raise InvalidParameter(
                prompts_param,
                f"an answer with {named} can have about {num_bytes} bytes, and {max_bytes} are "
                f"allowed: the prompts that it repeats leave no room for a token.",
                "answer_too_large",
            )
        raise InvalidParameter(
            param,
            f"an answer with {named} can have about {num_bytes} bytes, and {max_bytes} are "
            f"allowed. Please ask for less: {param} can be {num_tokens} here.",
            "answer_too_large",
        )
