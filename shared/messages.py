"""What crosses the wire: Job, SamplingParams, JobEvent and their parts.

Standard library only: the engine core imports this module and no other one of this package. Every
class is frozen; validation happens once, where an object is made, and is never repeated further in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

MAX_SEED = 2**63 - 1
MIN_SEED = -(2**63)
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARS = 512
MAX_STOP_CHARS = 8192  # of all stop strings together
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_TOP_LOGPROBS = 20
MAX_GRAMMAR_CHARS = 262_144
MAX_CHOICES = 128
MAX_REQUEST_RECORD_BYTES = 2**20
MAX_RETAIN_MS = 7 * 24 * 3_600_000


class JobState(StrEnum):
    """QUEUED -> RUNNING -> one of TERMINAL_STATES; RUNNING -> QUEUED by release alone."""

    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


TERMINAL_STATES = frozenset(
    {JobState.FINISHED, JobState.FAILED, JobState.CANCELLED, JobState.EXPIRED}
)


class FinishReason(StrEnum):
    """Why a sequence ended in the engine."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class ErrorCode(StrEnum):
    """Why a job ended without a natural finish: an API, listed in docs/WIRE.md."""

    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    KV_CAPACITY_EXCEEDED = "kv_capacity_exceeded"
    NONFINITE_LOGITS = "nonfinite_logits"
    GRAMMAR_FAILED = "grammar_failed"
    ENGINE_ERROR = "engine_error"
    ENGINE_DIED = "engine_died"
    WORKER_LOST = "worker_lost"
    POISON = "poison"
    PAYLOAD_LOST = "payload_lost"
    PAYLOAD_INVALID = "payload_invalid"
    DETOKENIZER_MISMATCH = "detokenizer_mismatch"
    CANCELLED = "cancelled"
    DISCONNECTED = "disconnected"
    ORPHANED = "orphaned"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    QUEUE_TIMEOUT = "queue_timeout"
    STREAM_DIVERGED = "stream_diverged"
    JOB_LOST = "job_lost"
    JOB_EXPIRED = "job_expired"
    MODEL_REPLACED = "model_replaced"


class OnDisconnect(StrEnum):
    """The policy for a job whose last reader leaves."""

    CANCEL = "cancel"  # at once: plain OpenAI calls
    GRACE = "grace"  # after a grace period without a reader
    CONTINUE = "continue"  # never: background jobs


class Durability(StrEnum):
    """What the acceptance of a job waits for."""

    NONE = "none"  # the memory of the server
    FSYNC = "fsync"  # its append-only file is on its disk
    REPLICAS = "replicas"  # enough replicas have it in their memory


class InvalidParameter(ValueError):
    """A client's value that is refused by name.

    `param` is the request member at fault, `message` a sentence for the client, `code` an optional
    machine-readable code.
    """

    def __init__(self, param: str, message: str, code: str | None = None) -> None:
        super().__init__(f"{param}: {message}")
        self.param = param
        self.message = message
        self.code = code


class GrammarKind(StrEnum):
    """The languages that a Grammar may be written in."""

    JSON_SCHEMA = "json_schema"  # a JSON schema, as JSON
    REGEX = "regex"  # the whole output matches it
    LARK = "lark"  # llguidance's dialect of Lark


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an output must match. It was compiled once at the edge before it got here."""

    kind: GrammarKind
    text: str

    def __post_init__(self) -> None:
        if not 0 < len(self.text) <= MAX_GRAMMAR_CHARS:
            raise InvalidParameter("grammar", f"must have 1 to {MAX_GRAMMAR_CHARS} characters")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop. Raises InvalidParameter naming the member at fault.

    Order of application to the logits: logit bias, penalties (repetition, then presence and
    frequency), temperature, min-p, top-k, top-p.
    """

    max_tokens: int = 16  # 0: the prompt alone is computed
    min_tokens: int = 0
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output only
    frequency_penalty: float = 0.0  # over output only
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None  # resolved to a number before a job is queued
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; k: the chosen token's and the k best
    prompt_logprobs: int | None = None  # the same of each prompt token but the first
    grammar: Grammar | None = None  # tokens that would leave it are never chosen

    def __post_init__(self) -> None:
        _whole("max_tokens", self.max_tokens, 0, 2**31 - 1)
        _whole("min_tokens", self.min_tokens, 0, self.max_tokens)
        _real("temperature", self.temperature, 0.0, 2.0)
        _whole("top_k", self.top_k, 0, 2**31 - 1)
        _real("top_p", self.top_p, 0.0, 1.0)
        _real("min_p", self.min_p, 0.0, 1.0)
        _real("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _whole("seed", self.seed, MIN_SEED, MAX_SEED)
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)
        if self.prompt_logprobs is not None:
            _whole("prompt_logprobs", self.prompt_logprobs, 0, MAX_TOP_LOGPROBS)
        self._check_stops()
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidParameter("logit_bias", f"at most {MAX_LOGIT_BIAS} entries")
        for token_id, bias in self.logit_bias.items():
            _whole("logit_bias", token_id, 0, 2**31 - 1)
            _real("logit_bias", bias, -100.0, 100.0)

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidParameter("stop", f"at most {MAX_STOP_STRINGS} stop strings")
        for text in self.stop:
            if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_STRING_CHARS:
                raise InvalidParameter(
                    "stop", f"each stop string has 1 to {MAX_STOP_STRING_CHARS} characters"
                )
        if sum(map(len, self.stop)) > MAX_STOP_CHARS:
            raise InvalidParameter(
                "stop", f"all stop strings together have at most {MAX_STOP_CHARS} characters"
            )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidParameter("stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} ids")
        for token_id in self.stop_token_ids:
            _whole("stop_token_ids", token_id, 0, 2**31 - 1)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _whole(param: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidParameter(param, "must be a whole number")
    if not low <= value <= high:
        raise InvalidParameter(param, f"must be between {low} and {high}, got {value}")


def _real(param: str, value: object, low: float, high: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise InvalidParameter(param, "must be a finite number")
    if not low <= value <= high:
        raise InvalidParameter(param, f"must be between {low:g} and {high:g}, got {value:g}")


MAX_EMBEDDED_INPUTS = 2048  # of one job
MAX_EMBEDDED_TOKENS = 300_000  # of all inputs of one job together
VECTOR_SLICE_BYTES = 65_536  # of one PromptSlice of vectors, unless one vector alone has more
NUMBER_BYTES = 4  # of a vector's number: a float32, little endian


@dataclass(frozen=True, slots=True)
class Pooling:
    """A job that computes a vector of each of its inputs, and no tokens.

    `lengths` divide the prompt's tokens into the inputs, in order. A vector has `dimensions`
    numbers: the model's, or fewer, the first ones.
    """

    lengths: tuple[int, ...]
    dimensions: int

    def __post_init__(self) -> None:
        if not 0 < len(self.lengths) <= MAX_EMBEDDED_INPUTS:
            raise InvalidParameter("input", f"must have 1 to {MAX_EMBEDDED_INPUTS} inputs")
        for length in self.lengths:
            _whole("input", length, 1, MAX_EMBEDDED_TOKENS)
        _whole("dimensions", self.dimensions, 1, 2**20)

    @property
    def vectors_per_slice(self) -> int:
        """How many vectors a PromptSlice has, but for the last one."""
        return max(1, VECTOR_SLICE_BYTES // (NUMBER_BYTES * self.dimensions))

    @property
    def num_slices(self) -> int:
        return -(-len(self.lengths) // self.vectors_per_slice)

    @property
    def num_bytes(self) -> int:
        """Bytes of all vectors."""
        return NUMBER_BYTES * self.dimensions * len(self.lengths)


@dataclass(frozen=True, slots=True)
class Idempotency:
    """A client's key for a job and the request that it stands for, both as digests."""

    key: str  # of the tenant and its key
    body: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One accepted request, as a worker runs it; nothing about HTTP.

    Seed and `max_tokens` are resolved at the edge, so that every attempt continues the same stream.
    """

    job_id: str  # "<partition>-<uuid>"
    model: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    kind: str  # the dialect: "chat", "completion", "embedding", "generate", "message", "response"
    tenant: str = "default"
    lane: int = 0  # its priority: the first lane it may get; 0 is served first
    timeout_ms: int = 600_000  # from submit to terminal, in Redis time
    queue_timeout_ms: int | None = None  # from submit to its first claim; None: its timeout alone
    on_disconnect: OnDisconnect = OnDisconnect.CANCEL
    client_request_id: str | None = None
    num_choices: int = 1  # answers to the one prompt; `max_tokens` is for each of them
    request_record: str = ""  # with which its dialect renders the response again; opaque
    retain_ms: int | None = None  # how long it is kept after its end; None: as long as all others
    text_ms: int | None = None  # how long its text is, where it has no `retain_ms`
    idempotency: Idempotency | None = None  # known only to Redis
    durability: Durability = Durability.NONE  # known to the accepting frontend alone
    prompt_digest: str = ""  # of the ModelCard that the prompt was prepared for; "": any
    adapter: str = ""  # `model`, where it names a LoRA adapter
    traceparent: str = ""  # W3C Trace Context of its submit; "" without one
    tracestate: str = ""
    pooling: Pooling | None = None  # it computes vectors instead of tokens

    def __post_init__(self) -> None:
        _whole("n", self.num_choices, 1, MAX_CHOICES)
        if self.pooling is not None and sum(self.pooling.lengths) != len(self.prompt_token_ids):
            raise InvalidParameter("input", "the lengths of the inputs must be the prompt's")
        if len(self.request_record.encode()) > MAX_REQUEST_RECORD_BYTES:
            raise InvalidParameter("request_record", f"at most {MAX_REQUEST_RECORD_BYTES} bytes")
        for name, life_ms in (("retain_ms", self.retain_ms), ("text_ms", self.text_ms)):
            if life_ms is not None:
                _whole(name, life_ms, 1, MAX_RETAIN_MS)

    @property
    def num_prompt_logprobs(self) -> int:
        """How many prompt tokens the request has scored: all but the first, or 0."""
        return 0 if self.sampling.prompt_logprobs is None else len(self.prompt_token_ids) - 1


class Cursor(NamedTuple):
    """How far a stream is: tokens and UTF-8 bytes of text so far, both cumulative.

    Its text form "<tokens>-<bytes>" is the log entry's id and the SSE event id.
    """

    num_tokens: int
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.num_tokens}-{self.num_bytes}"

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """Raises ValueError for anything but two non-negative decimal numbers joined by '-'."""
        tokens, dash, num_bytes = text.partition("-")
        if not (dash and tokens.isascii() and num_bytes.isascii()):
            raise ValueError(f"not a cursor: {text[:40]!r}")
        if not (tokens.isdigit() and num_bytes.isdigit() and len(text) <= 40):
            raise ValueError(f"not a cursor: {text[:40]!r}")
        return cls(int(tokens), int(num_bytes))


START = Cursor(0, 0)


class TokenLogprob(NamedTuple):
    """Log probability of a sampled token and of the most likely ones, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class PromptLogprob(NamedTuple):
    """Log probability of a prompt's token after the tokens before it, from the model's logits:
    without bias and penalties."""

    token_id: int
    logprob: float
    rank: int  # 1: no token is more likely there
    top: tuple[tuple[int, float], ...] = ()  # the most likely ones, best first


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a job, all its choices together; the prompt counts once.

    Cached tokens are those of the first attempt's prefix hit, of the choice that ran first.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Started:
    """A worker has claimed the job. Not durable: a reader may never see it."""

    worker_id: str
    attempt: int


class Segment(NamedTuple):
    """A run of a delta that belongs to one choice. With a finish reason it is the choice's last.

    `stop_reason` is the stop string or token id that matched; None for EOS.
    """

    choice: int  # from 0
    num_tokens: int
    num_bytes: int  # of UTF-8
    finish_reason: FinishReason | None = None  # STOP or LENGTH
    stop_reason: str | int | None = None


class Delta(NamedTuple):
    """Tokens and the text they released, from `start` to `end`. Durable.

    `text` is well-formed UTF-8 of exactly `end.num_bytes - start.num_bytes` bytes and may be empty
    (held back); `token_ids` has `end.num_tokens - start.num_tokens` ids. `segments` divide both
    among the choices of a job that has several, in order and without remainder; None: all of it is
    choice 0's, whose end is the job's. Cursors count all choices together.
    """

    start: Cursor
    end: Cursor
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] | None = None
    segments: tuple[Segment, ...] | None = None


PROMPT_SLICE_TOKENS = 512  # of one PromptSlice: some 200 KiB with twenty alternatives each


@dataclass(frozen=True, slots=True)
class PromptSlice:
    """What a job computes of a part of its prompt. Durable; all of them precede the first delta.

    Log probabilities: slice i starts at token `i * PROMPT_SLICE_TOKENS + 1`; the first token of a
    prompt has none. Vectors: slice i starts at input `i * Pooling.vectors_per_slice`.
    """

    index: int  # from 0
    entries: bytes  # PromptLogprobs, encoded (see shared.prompt_logprobs), or vectors in a row


def num_slices_of(num_entries: int) -> int:
    """Returns the number of slices of `num_entries` log probabilities."""
    return -(-num_entries // PROMPT_SLICE_TOKENS)


@dataclass(frozen=True, slots=True)
class Finished:
    """The one terminal event of a job that ended by itself. Durable.

    With several choices `reason` is LENGTH if one of them was cut by its length, and `stop_reason`
    is None: each choice's own are in its last segment. `ended_ms` is Unix time by the
    server's clock, the same for every reader; None in the entries of earlier releases.
    """

    end: Cursor
    reason: FinishReason  # STOP or LENGTH
    usage: Usage
    stop_reason: str | int | None = None  # the stop string or token id that matched; None for EOS
    ended_ms: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Failed:
    """The one terminal event of every other job: failed, cancelled or expired. Durable."""

    end: Cursor
    state: JobState
    code: str  # an ErrorCode's value, or a newer release's
    message: str
    usage: Usage


JobEvent = Started | PromptSlice | Delta | Finished | Failed
