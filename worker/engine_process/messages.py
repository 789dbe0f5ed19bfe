"""What the service and its engine process say to each other: msgspec structs in frames.

A frame is a 4-byte big-endian length and one msgpack message. The first message to the engine
process is Configure; it answers with LoadProgress ... then EngineReady or LoadFailed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec

from shared.messages import ErrorCode, FinishReason, PromptLogprob, SamplingParams, TokenLogprob

HEADER = struct.Struct(">I")
MAX_FRAME_BYTES = 256 * 2**20


class FrameTooLong(ValueError):
    """A frame is longer than MAX_FRAME_BYTES: the stream is not ours or is out of step."""


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to build the engine: the worker's settings that the engine process needs."""

    runner: str  # "model" or "echo"
    checkpoint: str  # local directory
    dtype: str
    device: str
    load_format: str
    block_size: int | None
    num_blocks: int | None
    kv_cache_memory_gb: float | None
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None
    prefix_caching: bool
    lookahead: int | None
    num_threads: int | None
    policy: str
    echo_step_ms: float
    cpu_tier: str = "auto"
    quantization: str = "none"
    step_target_ms: int | None = None
    weight_copies: str = "auto"


class Configure(msgspec.Struct, frozen=True, tag="configure"):
    """The first message to the engine process."""

    options: EngineOptions
    log_level: str
    log_format: str


class AddRequest(msgspec.Struct, frozen=True, tag="add"):
    """Run this; the answer is outputs under `request_id`, or one RequestRejected."""

    request_id: str
    job_id: str
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    sampling: SamplingParams
    tenant: str
    priority: int
    scores_prompt: bool = True


class ChoiceStart(msgspec.Struct, frozen=True, array_like=True):
    """Where one choice of a job begins or goes on."""

    request_id: str
    seed: int | None
    output_token_ids: tuple[int, ...]


class AddChoices(msgspec.Struct, frozen=True, tag="add_choices"):
    """Run these too: further choices of one job, which differ in their seeds and outputs only.

    Each is answered as if it had been added alone, but for the log probabilities of the prompt,
    which the first one gives. Sent when the first one's prompt has been
    computed, so that they find it in the prefix cache.
    """

    job_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    tenant: str
    priority: int
    choices: tuple[ChoiceStart, ...]


class CancelRequest(msgspec.Struct, frozen=True, tag="cancel"):
    """Stop it; nothing is said about it afterwards. Idempotent."""

    request_id: str


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """End now, with exit status 0."""


ToEngine = Configure | AddRequest | AddChoices | CancelRequest | Shutdown


class LoadProgress(msgspec.Struct, frozen=True, tag="progress"):
    """The model is loading; `fraction` is between 0 and 1."""

    stage: str
    fraction: float


class EngineReady(msgspec.Struct, frozen=True, tag="ready", kw_only=True):
    """Facts of the loaded model, for its card and for admission to the engine."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_parameters: int
    kv_capacity_tokens: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    dtype: str
    load_s: float
    stats: dict[str, int]  # as in StepOutputs, before the first step
    structured_output: bool = False


class LoadFailed(msgspec.Struct, frozen=True, tag="load_failed"):
    """The engine cannot be built; `by_settings` when another setting or model would help."""

    message: str
    by_settings: bool


class TokensOut(msgspec.Struct, frozen=True, tag="tokens", array_like=True):
    """New tokens of one request, and its end if `finish_reason` is given.

    One with `prompt_logprobs` has nothing else.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: FinishReason | None
    stop_reason: int | None
    error: ErrorCode | None
    message: str
    num_cached_tokens: int
    prompt_logprobs: tuple[PromptLogprob, ...] = ()


class StepOutputs(msgspec.Struct, frozen=True, tag="step"):
    """What one step said; `stats` is there at least every STATS_INTERVAL_S while busy."""

    outputs: tuple[TokensOut, ...]
    stats: dict[str, int] | None = None


class RequestRejected(msgspec.Struct, frozen=True, tag="rejected"):
    """The engine refused to take a request; nothing of it runs."""

    request_id: str
    code: ErrorCode
    message: str


class EngineEnds(msgspec.Struct, frozen=True, tag="ends"):
    """The last message: no further step can succeed in this process, for no fault of a request."""

    message: str


FromEngine = LoadProgress | EngineReady | LoadFailed | StepOutputs | RequestRejected | EngineEnds

_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
_encoder = msgspec.msgpack.Encoder()


def encode_frame(message: ToEngine | FromEngine) -> bytes:
    """Raises FrameTooLong."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise FrameTooLong(f"a message of {len(body)} bytes does not fit a frame")
    return HEADER.pack(len(body)) + body


def frame_length(header: bytes) -> int:
    """Body length from a frame's first 4 bytes. Raises FrameTooLong."""
    length: int = HEADER.unpack(header)[0]
    if length > MAX_FRAME_BYTES:
        raise FrameTooLong(f"a frame of {length} bytes was announced")
    return length


def take_bodies(buffer: bytearray) -> Iterator[bytes]:
    """Yields the bodies of the whole frames at the beginning of `buffer`, and at its end takes them
    out of it. Raises FrameTooLong."""
    begin = 0
    while len(buffer) - begin >= HEADER.size:
        body = begin + HEADER.size
        end = body + frame_length(bytes(buffer[begin:body]))
        if len(buffer) < end:
            break
        yield bytes(buffer[body:end])
        begin = end
    del buffer[:begin]


def decode_to_engine(body: bytes | memoryview) -> ToEngine:
    """Raises msgspec.DecodeError or ValidationError."""
    return _to_engine.decode(body)


def decode_from_engine(body: bytes | memoryview) -> FromEngine:
    """Raises msgspec.DecodeError or ValidationError."""
    return _from_engine.decode(body)
