"""Base models of the requests: pydantic models that are strict and refuse unknown parameters.

A parameter whose value is null counts as absent (see `api.generation.validation.parse_request`).
The model's sampling defaults replace a `temperature`, `top_p`, `top_k`, `min_p` or
`repetition_penalty` that is None. SamplingParams checks their ranges, whatever the dialect.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from api.generation.schemas import (
    BIAS,
    WHOLE_NUMBERS,
    Count,
    Penalty,
    RepetitionPenalty,
    Seed,
    Share,
    StopString,
    StopStrings,
    Temperature,
    TopK,
    TopLogprobs,
    accept_whole_numbers,
    described,
)
from api.on_demand import load_part
from api.request_errors import MISSING, unsupported
from shared.keys import NUM_LANES
from shared.messages import (
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    Durability,
    InvalidParameter,
    OnDisconnect,
)

MAX_ENTRIES = MAX_LOGIT_BIAS  # of an object with keys of the client's choice
MIN_RETENTION_S = 60
NO_PROMPT = "must be text, token ids, or a list of one of these"
_AT_OBJECT = "object_value"


class RequestModel(BaseModel):
    """An object of a request; unknown parameters are refused.

    `kind` is the dialect whose parameters without effect are accepted as well.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    kind: ClassVar[str] = ""
    # the path of a parameter -> why this value of it is not served
    unserved: ClassVar[Sequence[tuple[re.Pattern[str], str]]] = ()

    def left_out(self) -> Iterable[str]:
        """Returns the names of what the model does not see, for the header of ignored members."""
        return ()

    @classmethod
    def explain(cls, error: InvalidParameter) -> InvalidParameter:
        """Returns an error of parsing with the reason, where one is known."""
        if error.code != MISSING:
            for pattern, why in cls.unserved:
                if pattern.fullmatch(error.param):
                    return unsupported(error.param, why)
        return error

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[BaseModel], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Returns the schema of validation. An integer may be written as `8.0`."""
        schema = handler(source)
        accept_whole_numbers(schema)
        return schema

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Returns the schema of accepted values: null for every optional parameter, and the
        parameters without a field."""
        reference = handler(core_schema)
        load_part("request_schemas").complete(handler.resolve_ref_schema(reference), cls.kind)
        return reference


def at_the_object(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """Validates an object with keys of the client's choice, or a list; errors name it alone."""
    if isinstance(value, dict) and len(value) > MAX_ENTRIES:
        raise PydanticCustomError(_AT_OBJECT, f"at most {MAX_ENTRIES} entries")
    try:
        return handler(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        if not first["loc"]:
            raise
        raise PydanticCustomError(_AT_OBJECT, "{reason}", {"reason": first["msg"]}) from None


def _check_boolean(value: Any) -> Any:
    if not isinstance(value, bool):
        raise ValueError("must be a boolean")
    return value


# A Literal alone would accept 0.
OnlyFalse = Annotated[Literal[False], BeforeValidator(_check_boolean)]
# Seconds until a worker must have started the job.
QueueTimeout = Annotated[float, Field(ge=0.1, le=86_400)]
# Tokens of a choice to an event of a stream.
StreamInterval = Annotated[int, Field(ge=1, le=4096)]
# Lists end at their first fault: the cost of an error is bounded.
TokenIds = Annotated[list[int], Field(fail_fast=True), WHOLE_NUMBERS]
Texts = Annotated[list[str], Field(fail_fast=True)]
StopTokenIds = Annotated[TokenIds, described(maxItems=MAX_STOP_TOKEN_IDS)]
LogitBias = Annotated[
    dict[str, float],
    WrapValidator(at_the_object),
    described(maxProperties=MAX_LOGIT_BIAS, additionalProperties=BIAS),
]
Labels = Annotated[dict[str, str], WrapValidator(at_the_object)]
# Enumerations come as their strings.
DisconnectPolicy = Annotated[OnDisconnect, Field(strict=False)]
DurabilityLevel = Annotated[Durability, Field(strict=False)]


class StreamOptions(RequestModel):
    """No padding is ever sent: `include_obfuscation` changes nothing.

    `continuous_usage_stats` is an extension, vLLM's: the usage so far, in each chunk with choices.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JobExpiry(RequestModel):
    """When an ended job expires: `seconds` after what `anchor` names."""

    anchor: Annotated[str, described(enum=["completed_at"])]
    seconds: Annotated[int, described(minimum=MIN_RETENTION_S, maximum=86_400)]


class JobParameters(RequestModel):
    """Extensions of every dialect: how long a job may wait, how it is stored, and for how long."""

    queue_timeout: QueueTimeout | None = None
    durability: DurabilityLevel | None = None
    store: bool | None = None
    expires_after: JobExpiry | None = None


class StreamParameters(RequestModel):
    """Extensions of the dialects that stream over a connection of their own."""

    stream: bool = False
    stream_interval: StreamInterval | None = None
    on_disconnect: DisconnectPolicy = OnDisconnect.CANCEL

    @model_validator(mode="after")
    def _check_stream_interval(self) -> StreamParameters:
        if self.stream_interval is not None and not self.stream:
            raise InvalidParameter("stream_interval", "only allowed when 'stream' is true")
        return self


class SamplingFields(RequestModel):
    """Sampling parameters of the OpenAI dialects; from `top_k` on they are extensions."""

    temperature: Temperature | None = None
    top_p: Share | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: LogitBias = {}
    seed: Seed | None = None
    stop: StopString | StopStrings = []
    top_k: TopK | None = None
    min_p: Share | None = None
    repetition_penalty: RepetitionPenalty | None = None
    min_tokens: Count = 0
    stop_token_ids: StopTokenIds = []
    ignore_eos: bool = False


class TierFields(RequestModel):
    """The queue priority of the OpenAI dialects; `priority` is an extension."""

    priority: Annotated[int, described(minimum=0, maximum=NUM_LANES - 2)] | None = None
    service_tier: Annotated[str, described(enum=["auto", "default", "flex"])] | None = None


class ResponseFormatText(RequestModel):
    """Any text."""

    type: Literal["text"]


class ResponseFormatJsonObject(RequestModel):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(RequestModel):
    """A JSON schema, which is enforced whether it is strict or not."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    json_schema: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormatJsonSchema(RequestModel):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[
    ResponseFormatText | ResponseFormatJsonObject | ResponseFormatJsonSchema,
    Field(discriminator="type"),
]


class StructuredOutputs(RequestModel):
    """vLLM's: exactly one of its members."""

    json_schema: dict[str, Any] | str | bool | None = Field(None, alias="json")
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None
    json_object: bool | None = None


class CompletionFields(SamplingFields, TierFields, StreamParameters, JobParameters):
    """Parameters of both chat completions and legacy completions.

    From `prompt_logprobs` on they are extensions, but chat's `response_format`. One of the last six
    at most.
    """

    model: str
    n: Annotated[int, described(minimum=1, maximum=MAX_CHOICES)] = 1
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, described(minimum=0)] | None = None
    max_completion_tokens: Annotated[int, described(minimum=0)] | None = None
    prompt_logprobs: TopLogprobs | None = None
    return_token_ids: bool = False
    return_metrics: bool = False
    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None

    @model_validator(mode="after")
    def _check_stream_options(self) -> CompletionFields:
        if self.stream_options is not None:
            check_stream_options(self.stream, self.stream_options.include_obfuscation)
        return self

    @property
    def requested_tokens(self) -> tuple[str, int | None]:
        """Returns the parameter that bounds the response's tokens, and its value."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    @property
    def is_structured(self) -> bool:
        """Returns whether a parameter may keep the output to a grammar."""
        guided = (self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)
        members = (self.response_format, self.structured_outputs, *guided)
        return any(member is not None for member in members)

    @property
    def include_usage(self) -> bool:
        """Returns whether a stream ends with an event of its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def has_continuous_usage(self) -> bool:
        """Returns whether each chunk of a stream has the usage so far."""
        options = self.stream_options
        return options is not None and bool(options.continuous_usage_stats)


def check_stream_options(is_streamed: bool, include_obfuscation: bool | None) -> None:
    """Raises InvalidParameter for options of a response that is not streamed, and for padding."""
    if not is_streamed:
        raise InvalidParameter("stream_options", "only allowed when 'stream' is true")
    if include_obfuscation:
        raise InvalidParameter(
            "stream_options.include_obfuscation", "no padding is sent: it can only be false"
        )


# Queue priorities that a client may choose: default, or after all others.

MAX_PRIORITY = NUM_LANES - 2  # the last lane is for batches
FLEX_LANE = 4
_TIERS = {"auto": 0, "default": 0, "flex": FLEX_LANE}


def job_lane(request: TierFields) -> int:
    """Returns the lane of `priority` (0, the default, is the highest) or `service_tier`.

    Raises InvalidParameter.
    """
    tier, priority = request.service_tier, request.priority
    if tier is not None and tier not in _TIERS:
        raise unsupported("service_tier", f"the tiers are {', '.join(_TIERS)}")
    if priority is None:
        return _TIERS[tier or "auto"]
    if not 0 <= priority <= MAX_PRIORITY:
        raise InvalidParameter("priority", f"must be between 0 (highest) and {MAX_PRIORITY}")
    if tier == "flex":
        raise InvalidParameter("priority", "excludes the service tier 'flex'")
    return priority


def served_tier(request: TierFields) -> str | None:
    """Returns the tier that a response names; None where the request names none."""
    if request.service_tier is None:
        return None
    return "flex" if request.service_tier == "flex" else "default"
