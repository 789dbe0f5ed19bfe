"""The requests and responses of the routes of health, models and tokenization."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, ClassVar, Literal

from pydantic import model_validator

from api.generation.messages import UNSERVED_MESSAGES, ChatMessages, left_out_parts
from api.generation.models import ServedModel
from api.generation.protocol import RequestModel, TokenIds
from api.generation.response_schemas import ResponseModel
from api.http.openapi import Absent
from api.http.pagination import QueryModel
from api.jobs.protocol import estimated_wait_s
from shared.messages import InvalidParameter


class TokenizeRequest(RequestModel):
    """POST /tokenize: exactly one of `prompt` and `messages`."""

    unserved: ClassVar = UNSERVED_MESSAGES

    prompt: str | None = None
    messages: ChatMessages | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    chat_template: str = ""  # a name
    chat_template_kwargs: dict[str, Any] = {}
    return_token_strs: bool = False

    def left_out(self) -> Iterator[str]:
        """Yields the names of the parts that the template is given a text for."""
        return left_out_parts(self.messages or ())

    @model_validator(mode="after")
    def _check_text(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidParameter("prompt", "exactly one of 'prompt' and 'messages' must be given")
        return self


class DetokenizeRequest(RequestModel):
    """POST /detokenize."""

    tokens: TokenIds
    model: str | None = None


ModelStatus = Literal["served", "loading", "on_demand", "unserved"]


def status_of(model: ServedModel) -> ModelStatus:
    """Returns whether a worker serves a model, is about to, would when jobs wait, or none does."""
    if model.is_served:
        return "served"
    if model.offer is None:
        return "unserved"
    return "loading" if model.offer.is_loading else "on_demand"


class Model(ResponseModel):
    """A model that requests can name now."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    parent: str | None  # the model whose LoRA adapter this is; null for all others
    max_model_len: int
    kv_capacity_tokens: int
    context_length: int | None  # that the checkpoint allows; max_model_len is the limit served
    vocab_size: int
    dtype: str
    num_parameters: int
    has_chat_template: bool
    default_sampling: dict[str, int | float]  # of members that a request leaves out
    suggestions: list[str]  # questions for a first chat; empty: the checkpoint has none
    structured_output: bool  # whether outputs can be kept to a grammar
    structured_output_reason: str | None  # why not; null where they can, or the engine cannot
    is_served: bool  # by a live worker; else its requests wait until one comes
    is_paused: bool  # an operator has paused its queue: its requests wait until it is resumed
    # served; loading: a worker is about to serve it; on_demand: one loads it when requests wait for
    # it; unserved: no worker lists it
    status: ModelStatus
    estimated_wait_s: float | None  # until a worker serves it; null: one does, or not known
    load_failed: bool  # a worker could not load it when it was wanted; the dashboard shows why
    engine: str  # of its workers; "mixed": they differ
    engine_version: str
    exact_resume: bool  # whether an output that was cut continues as it would have
    embedding_size: int | None  # numbers of its vectors; null: it generates text

    @classmethod
    def of(cls, model: ServedModel) -> Model:
        """Returns the object of a model of the catalog."""
        card = model.card
        return cls(
            id=card.name,
            created=card.created_s,
            owned_by=card.owned_by,
            parent=card.parent or None,
            max_model_len=model.context_tokens,
            kv_capacity_tokens=card.kv_capacity_tokens,
            context_length=card.context_length or None,
            vocab_size=card.vocab_size,
            dtype=card.dtype,
            num_parameters=card.num_parameters,
            has_chat_template=card.has_chat_template,
            default_sampling=dict(model.defaults.values),
            suggestions=list(card.suggestions),
            structured_output=card.structured_output,
            structured_output_reason=card.structured_output_reason or None,
            is_served=model.is_served,
            is_paused=model.is_paused,
            status=status_of(model),
            estimated_wait_s=estimated_wait_s(model),
            load_failed=model.load_failed,
            engine=card.engine,
            engine_version=card.engine_version,
            exact_resume=card.exact_resume,
            embedding_size=card.embedding_size or None,
        )


class ModelList(ResponseModel):
    """Requests with the header `anthropic-version` get a `ModelPage`."""

    object: Literal["list"] = "list"
    data: list[Model]


class ModelInfo(ResponseModel):
    """A model in Anthropic's shape. `max_input_tokens` and `max_tokens` are each all that prompt
    and output share."""

    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int
    max_tokens: int

    @classmethod
    def of(cls, model: ServedModel) -> ModelInfo:
        """Returns the object of a model of the catalog."""
        card = model.card
        created = datetime.fromtimestamp(card.created_s, UTC)
        return cls(
            id=card.name,
            display_name=card.name,
            created_at=created.strftime("%Y-%m-%dT%H:%M:%SZ"),
            max_input_tokens=model.context_tokens,
            max_tokens=model.context_tokens,
        )


class ModelPage(ResponseModel):
    """A page of models in Anthropic's shape."""

    data: list[ModelInfo]
    has_more: bool
    first_id: str | None
    last_id: str | None


class Tokens(ResponseModel):
    """The response of POST /tokenize; `token_strs` where it was requested."""

    tokens: tuple[int, ...]
    count: int
    max_model_len: int
    token_strs: list[str] | Absent = None


class Detokenized(ResponseModel):
    """The response of POST /detokenize."""

    prompt: str


class TokenizerInfoQuery(QueryModel):
    """The query of GET /tokenizer_info; `model` may be left out while one model is served."""

    model: str | Absent = None


class TokenizerInfo(ResponseModel):
    """A model's tokenizer, as at vLLM: beside these members the special tokens by their roles, such
    as `eos_token`. Each is text."""

    tokenizer_class: Literal["PreTrainedTokenizerFast"] = "PreTrainedTokenizerFast"
    chat_template: str | None
    model_max_length: int
    vocab_size: int


class ModelLoad(ResponseModel):
    """The jobs that wait for a model in the queue, which operators see, and the live workers that
    serve it. `paused_since` (Unix seconds) and `paused_by` (a key's id) are there while an operator
    has paused its queue; the second for operators."""

    waiting: int | Absent = None
    workers: int
    paused_since: float | Absent = None
    paused_by: str | Absent = None


class LoadingWorker(ResponseModel):
    """A worker that cannot serve yet: what it does (`downloading`, `loading weights`, ...), and the
    share of this that is done."""

    id: str
    model: str
    stage: str
    percent: int
    report_age_ms: int


class Version(ResponseModel):
    """The release of this frontend."""

    version: str


HealthStatus = Literal["ok", "stalled", "no_workers", "degraded"]


class Health(ResponseModel):
    """The state of the deployment. If keys are configured, a request without one gets `status`
    alone, and one with a key that is no operator's `models` and `loading`, too."""

    status: HealthStatus
    running: int | Absent = None
    waiting: int | Absent = None
    models: dict[str, ModelLoad] | Absent = None
    queued_tokens: int | Absent = None
    redis: dict[str, Any] | Absent = None
    age_ms: float | None = None
    workers: list[dict[str, Any]] | Absent = None
    loading: list[LoadingWorker] | Absent = None


StoreState = Literal["ok", "nearly_full", "full"]


class Readiness(ResponseModel):
    """Whether requests are accepted here now. `models` are those that they can name; requests for
    `unserved` ones wait until a worker comes."""

    ready: bool
    closed: str | None
    status: str
    store: StoreState
    models: list[str]
    unserved: list[str]
