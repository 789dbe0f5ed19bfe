"""The requests of POST /tokenize and POST /detokenize."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import model_validator

from api.generation.messages import UNSERVED_MESSAGES, ChatMessages
from api.generation.protocol import RequestModel, ResponseModel, TokenIds
from shared.messages import InvalidParameter


class TokenizeRequest(RequestModel):
    """POST /tokenize: exactly one of `prompt` and `messages`."""

    unserved: ClassVar = UNSERVED_MESSAGES

    prompt: str | None = None
    messages: ChatMessages | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_text(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidParameter("prompt", "exactly one of 'prompt' and 'messages' must be given")
        return self


class DetokenizeRequest(RequestModel):
    """POST /detokenize."""

    tokens: TokenIds
    model: str | None = None


# The responses.


class Model(ResponseModel):
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


class ModelList(ResponseModel):
    """Another shape goes to who sends the header `anthropic-version`."""

    object: Literal["list"]
    data: list[Model]


class Tokens(ResponseModel):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class Detokenized(ResponseModel):
    prompt: str


class WaitingFor(ResponseModel):
    """A model: jobs that wait for it in the queue, and live workers that serve it."""

    waiting: int
    workers: int


class Version(ResponseModel):
    """The release that a frontend is of."""

    version: str


class Health(ResponseModel):
    """Always 200; `status` is the deployment's state. Without a key it comes alone, where there
    are keys."""

    status: Literal["ok", "stalled", "no_workers", "degraded"]
    running: int | None = None
    waiting: int | None = None
    models: dict[str, WaitingFor] | None = None
    queued_tokens: int | None = None
    redis: dict[str, Any] | None = None
    age_ms: float | None = None
    workers: list[dict[str, Any]] | None = None


class Readiness(ResponseModel):
    """200 when requests are accepted here now, else 503. `models` are those that they can name;
    requests for `unserved` ones wait until a worker comes."""

    ready: bool
    closed: str | None
    status: str
    models: list[str]
    unserved: list[str]
