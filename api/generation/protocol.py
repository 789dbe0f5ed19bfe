"""The requests that are understood, member by member.

A member whose value is null counts as absent. Where `temperature`, `top_p`, `top_k`, `min_p` and
`repetition_penalty` are None the model's sampling defaults hold. Ranges are checked where
SamplingParams is made (see `sampling`); members without a field are in `refusals`.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from shared.messages import Durability, OnDisconnect

# Seconds until a worker must have begun the job.
QueueTimeout = Annotated[float, msgspec.Meta(ge=0.1, le=86_400)]

# Tokens of a choice to an event of a stream.
StreamInterval = Annotated[int, msgspec.Meta(ge=1, le=4096)]
# Tokens of reasoning.
ThinkingBudget = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """No padding is ever sent: `include_obfuscation` changes nothing."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class SamplingRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Members of both OpenAI dialects.

    From `top_k` on they are extensions, but `service_tier` and chat's `response_format`.
    """

    model: str
    n: int = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = {}
    seed: int | None = None
    stop: str | list[str] = []
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int = 0
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    return_metrics: bool = False
    stream_interval: StreamInterval | None = None
    priority: int | None = None
    service_tier: str | None = None
    response_format: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: dict[str, Any] | None = None
    on_disconnect: OnDisconnect = OnDisconnect.CANCEL
    queue_timeout: QueueTimeout | None = None
    durability: Durability | None = None


class ChatRequest(SamplingRequest, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    thinking_token_budget: ThinkingBudget | None = None


class CompletionRequest(SamplingRequest, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions. `prompt`: text, token ids, or a list of texts or of token ids."""

    prompt: str | list[str | int | list[int]]
    best_of: int | None = None
    echo: bool = False
    logprobs: int | None = None


class GenerateRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /generate: the native dialect."""

    prompt: str | list[str | int | list[int]]
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    rep_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    min_tokens: int = 0
    ignore_eos: bool = False
    prompt_logprobs: int | None = None
    stream: bool = True
    stream_interval: StreamInterval | None = None
    on_disconnect: OnDisconnect = OnDisconnect.CANCEL
    queue_timeout: QueueTimeout | None = None
    durability: Durability | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize: exactly one of `prompt` and `messages`."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    return_token_strs: bool = False


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None
