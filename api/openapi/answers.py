"""What answers look like, for the document alone: nothing is decoded into these.

Members that are left out of an answer when they were not asked for are not required here. An answer
may have more members than its schema: readers ignore what they do not know.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from shared.messages import JobState

UNSET = msgspec.UNSET
Unset = msgspec.UnsetType


class ErrorObject(msgspec.Struct):
    """What is wrong, of which kind it is, which member is at fault, and a code to branch on."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(msgspec.Struct):
    """The body of every answer that is an error, and of an error event."""

    error: ErrorObject


class MessagesErrorDetails(msgspec.Struct):
    """The code that the other dialects have, and the member that is at fault."""

    error_code: str | Unset = UNSET
    param: str | Unset = UNSET


class MessagesErrorObject(msgspec.Struct):
    """What is wrong, and of which of Anthropic's kinds it is."""

    type: str
    message: str
    details: MessagesErrorDetails | Unset = UNSET


class MessagesError(msgspec.Struct):
    """The body of every error of the Messages dialect, and of an error event."""

    type: Literal["error"]
    error: MessagesErrorObject
    request_id: str


class CachedTokens(msgspec.Struct):
    cached_tokens: int


class ReasoningTokens(msgspec.Struct):
    reasoning_tokens: int


class UsageObject(msgspec.Struct):
    """Counts of tokens; the prompt counts once, however many choices there are."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str


class ChatToolCall(msgspec.Struct):
    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(msgspec.Struct):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ChatToolCall] | Unset = UNSET


class PromptToken(msgspec.Struct):
    """A token that may stand at a place of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptToken] | None]  # by token id; null for the first token


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls", "content_filter", "function_call"]
    stop_reason: str | int | None = None


class ChatCompletion(msgspec.Struct):
    """A whole answer; streamed it is `chat.completion.chunk`s and `[DONE]`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageObject
    prompt_logprobs: PromptLogprobs | Unset = UNSET


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "content_filter"]
    stop_reason: str | int | None = None
    prompt_logprobs: PromptLogprobs | Unset = UNSET


class Completion(msgspec.Struct):
    """A whole answer; streamed it is chunks of the same shape and `[DONE]`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageObject
    job_ids: list[str] | Unset = UNSET  # of several prompts, in their order


class Generated(msgspec.Struct):
    """A whole answer; streamed it is events with `text` and `token_ids`, the last with `done`."""

    id: str
    model: str
    text: str
    token_ids: list[int]
    done: Literal[True]
    full_text: str
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None
    usage: UsageObject
    ttft_ms: float | None
    prompt_logprobs: PromptLogprobs | Unset = UNSET


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class ResponseObject(msgspec.Struct):
    """A response; streamed it is OpenAI's events, each with its `sequence_number`."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: str | None
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    completed_at: int | Unset | None = UNSET


class ResponseDeleted(msgspec.Struct):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ItemList(msgspec.Struct):
    """A page of input items; newest first unless asked otherwise."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class MessagesUsage(msgspec.Struct):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    service_tier: Literal["standard"]


class MessagesAnswer(msgspec.Struct):
    """A whole answer; streamed it is Anthropic's events."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal[
        "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
    ]
    stop_sequence: str | None
    usage: MessagesUsage


class InputTokens(msgspec.Struct):
    input_tokens: int


class Model(msgspec.Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    kv_capacity_tokens: int
    vocab_size: int
    dtype: str
    num_parameters: int
    has_chat_template: bool
    default_sampling: dict[str, float]  # of members that a request leaves out
    is_served: bool  # by a live worker; else its requests wait until one comes


class ModelList(msgspec.Struct):
    """Another shape goes to who sends the header `anthropic-version`."""

    object: Literal["list"]
    data: list[Model]


class Tokens(msgspec.Struct):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | Unset = UNSET


class Detokenized(msgspec.Struct):
    prompt: str


class JobTimings(msgspec.Struct):
    """Milliseconds; null: not yet."""

    queue_ms: int | None
    ttft_ms: int | None
    total_ms: int | None


class JobError(msgspec.Struct):
    code: str | None
    message: str


class JobAnswer(msgspec.Struct):
    """A job; times are Unix seconds of the Redis clock, null: not yet."""

    id: str
    object: Literal["job"]
    job_id: str
    status: JobState
    model: str
    kind: str
    num_choices: int
    tenant: str
    queue_position: int | None
    worker: str | None
    attempt: int
    created_at: float
    started_at: float | None
    first_token_at: float | None
    ended_at: float | None
    expires_at: float | None
    queue_expires_at: float | None
    timings: JobTimings
    usage: UsageObject
    finish_reason: str | None
    stop_reason: str | int | None
    error: JobError | None
    sampling: dict[str, float] | None  # what the job has; null: of an older release
    client_request_id: str | None


class JobList(msgspec.Struct):
    object: Literal["list"]
    data: list[JobAnswer]


class StreamToken(msgspec.Struct):
    """Opens one job's stream; `expires_at` is Unix seconds."""

    object: Literal["stream_token"]
    token: str
    url: str
    expires_at: int


class DeadLetterAnswer(msgspec.Struct):
    """A job that killed whatever ran it; `died_at` is Unix seconds of the Redis clock."""

    id: str
    object: Literal["dead_letter"]
    job_id: str
    model: str
    kind: str
    tenant: str
    code: str
    crashes: int
    completion_tokens: int
    died_at: float


class DeadLetterList(msgspec.Struct):
    object: Literal["list"]
    data: list[DeadLetterAnswer]


class DeadLetterDeleted(msgspec.Struct):
    id: str
    object: Literal["dead_letter"]
    deleted: Literal[True]


class WaitingFor(msgspec.Struct):
    """A model: jobs that wait for it in the queue, and live workers that serve it."""

    waiting: int
    workers: int


class Version(msgspec.Struct):
    """The release that a frontend is of."""

    version: str


class Health(msgspec.Struct):
    """Always 200; `status` is the deployment's state. Without a key it comes alone, where there
    are keys."""

    status: Literal["ok", "stalled", "no_workers", "degraded"]
    running: int | Unset = UNSET
    waiting: int | Unset = UNSET
    models: dict[str, WaitingFor] | Unset = UNSET
    queued_tokens: int | Unset = UNSET
    redis: dict[str, Any] | Unset = UNSET
    age_ms: float | Unset | None = UNSET
    workers: list[dict[str, Any]] | Unset = UNSET


class Readiness(msgspec.Struct):
    """200 when requests are accepted here now, else 503. `models` are those that they can name;
    requests for `unserved` ones wait until a worker comes."""

    ready: bool
    closed: str | None
    status: str
    models: list[str]
    unserved: list[str]
