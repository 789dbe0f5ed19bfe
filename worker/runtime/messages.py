"""Messages between the service and its engine process: msgspec structs in frames.

A frame is a 4-byte big-endian length and one msgpack message. The first message to the engine
process is Configure, or Prepare before it; it answers with LoadProgress ... then EngineReady or
LoadFailed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import replace

import msgspec

from shared.logs import LogFormat, LogLevel
from shared.messages import ErrorCode
from worker.engine.config import EngineConfig
from worker.engine.measures import Counts, PrefixChanges
from worker.engine.request import EngineOutput, EngineRequest
from worker.engine_options import EngineOptions

EXIT_RANK_LOST = 72  # of the engine process: see worker.runtime.process

HEADER = struct.Struct(">I")
MAX_FRAME_BYTES = 256 * 2**20


class FrameTooLong(ValueError):
    """A frame is longer than MAX_FRAME_BYTES: the stream is foreign or out of step."""


class Configure(msgspec.Struct, frozen=True, tag="configure"):
    """The first message to the engine process."""

    options: EngineOptions
    log_level: LogLevel
    log_format: LogFormat
    worker_id: str = ""  # for the log


class Prepare(msgspec.Struct, frozen=True, tag="prepare"):
    """Comes before Configure where that follows later: the process imports meanwhile what an engine
    of such options needs."""

    options: EngineOptions


class AddRequest(msgspec.Struct, frozen=True, tag="add"):
    """Runs a request; its outputs follow, or one RequestRejected."""

    request: EngineRequest


class ChoiceStart(msgspec.Struct, frozen=True, array_like=True):
    """Where one choice of a job starts or resumes."""

    request_id: str
    seed: int | None
    output_token_ids: tuple[int, ...]


class AddChoices(msgspec.Struct, frozen=True, tag="add_choices"):
    """Runs further choices of a job, which differ from its first in their seeds and outputs only.

    Each is answered as if it had been added alone, but for the log probabilities of the prompt,
    which the first one gives. Sent when the first one's prompt has been computed, so that they find
    it in the prefix cache.
    """

    first: EngineRequest
    choices: tuple[ChoiceStart, ...]

    def requests(self) -> Iterator[EngineRequest]:
        """Yields the request of each choice."""
        for choice in self.choices:
            yield replace(
                self.first,
                request_id=choice.request_id,
                params=replace(self.first.params, seed=choice.seed),
                output_token_ids=choice.output_token_ids,
                scores_prompt=False,
            )


class CancelRequest(msgspec.Struct, frozen=True, tag="cancel"):
    """Cancels a request, which has no further outputs. Idempotent."""

    request_id: str


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Ends the engine process with exit status 0."""


ToEngine = Prepare | Configure | AddRequest | AddChoices | CancelRequest | Shutdown


class LoadProgress(msgspec.Struct, frozen=True, tag="progress"):
    """The model is loading; `fraction` is between 0 and 1."""

    stage: str
    fraction: float


class EngineReady(msgspec.Struct, frozen=True, tag="ready", kw_only=True):
    """The engine has loaded its model and takes requests."""

    config: EngineConfig
    vocab_size: int
    num_parameters: int
    dtype: str  # of weights and KV cache, e.g. "bfloat16"
    load_s: float
    stats: dict[str, int]  # as in StepOutputs, before the first step
    engine_name: str = "penstock"
    engine_version: str = ""  # of another's engine
    exact_resume: bool = True  # whether a resumed output continues as if it had not been cut
    device: str = "auto"  # cpu or cuda, as chosen; auto: the engine has none
    embedding_size: int = 0  # of its vectors; 0: it generates text


class LoadFailed(msgspec.Struct, frozen=True, tag="load_failed"):
    """The engine cannot be built; `by_settings` when another setting or model would help."""

    message: str
    by_settings: bool


class StepOutputs(msgspec.Struct, frozen=True, tag="step"):
    """The outputs of one step, and the requests that were preempted in it for a higher lane; with
    `stats` and `prefixes` at least every STATS_INTERVAL_S while busy, with `measures` (see
    StepMeasures.counts) every MEASURES_INTERVAL_S, and then with the processor seconds of masks
    since, by tenant."""

    outputs: tuple[EngineOutput, ...]
    stats: dict[str, int] | None = None
    measures: dict[str, Counts] | None = None
    mask_s: dict[str, float] = {}
    prefixes: PrefixChanges = ()  # since the last ones
    gave_way: tuple[str, ...] = ()


class RequestRejected(msgspec.Struct, frozen=True, tag="rejected"):
    """The engine did not take a request."""

    request_id: str
    code: ErrorCode
    message: str


class EngineEnds(msgspec.Struct, frozen=True, tag="ends"):
    """The last message: no further step can succeed in this process; no request is at fault."""

    message: str
    by_upstreams: bool = False  # none answers; this machine's device is well


FromEngine = LoadProgress | EngineReady | LoadFailed | StepOutputs | RequestRejected | EngineEnds

_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
# These decode a frame's body and raise msgspec.DecodeError or ValidationError.
decode_to_engine = _to_engine.decode
decode_from_engine = _from_engine.decode
_encoder = msgspec.msgpack.Encoder()


def encode_frame(message: ToEngine | FromEngine) -> bytes:
    """Returns a message as a frame. Raises FrameTooLong."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise FrameTooLong(f"a message of {len(body)} bytes does not fit a frame")
    return HEADER.pack(len(body)) + body


def frame_length(header: bytes) -> int:
    """Returns the body's length from a frame's first 4 bytes. Raises FrameTooLong."""
    length: int = HEADER.unpack(header)[0]
    if length > MAX_FRAME_BYTES:
        raise FrameTooLong(f"a frame of {length} bytes was announced")
    return length


def take_bodies(buffer: bytearray) -> Iterator[bytes]:
    """Yields the bodies of the whole frames at the start of `buffer`, then removes them from it.
    Raises FrameTooLong."""
    begin = 0
    while len(buffer) - begin >= HEADER.size:
        body = begin + HEADER.size
        end = body + frame_length(bytes(buffer[begin:body]))
        if len(buffer) < end:
            break
        yield bytes(buffer[body:end])
        begin = end
    del buffer[:begin]
