from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shared.messages import ErrorCode, FinishReason, SamplingParams, TokenLogprob
from worker.engine.config import EngineConfig
from worker.engine.engine import Engine
from worker.engine.request import EngineOutput, EngineRequest
from worker.engines.echo import EchoModelRunner
from worker.runtime.loop import EngineLoop, EngineSocket, LinkClosed
from worker.runtime.messages import (
    HEADER,
    MAX_FRAME_BYTES,
    AddChoices,
    AddRequest,
    CancelRequest,
    ChoiceStart,
    FrameTooLong,
    FromEngine,
    RequestRejected,
    Shutdown,
    StepOutputs,
    ToEngine,
    decode_from_engine,
    decode_to_engine,
    encode_frame,
    frame_length,
)


def add(request_id: str, prompt: tuple[int, ...] = (1, 2, 3), **sampling: object) -> AddRequest:
    params = SamplingParams(**({"max_tokens": 5, "seed": 1} | sampling))  # type: ignore[arg-type]
    return AddRequest(
        EngineRequest(
            request_id=request_id, prompt_token_ids=prompt, params=params, job_id=request_id
        )
    )


class Service:
    """The other end of the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._connection.settimeout(10)

    def say(self, *messages: ToEngine) -> None:
        self._connection.sendall(b"".join(map(encode_frame, messages)))

    def raw(self, data: bytes) -> None:
        self._connection.sendall(data)

    def hear(self) -> FromEngine:
        return decode_from_engine(self._exactly(frame_length(self._exactly(HEADER.size))))

    def outputs_of(self, request_id: str) -> list[EngineOutput]:
        found: list[EngineOutput] = []
        while not found or found[-1].finish_reason is None:
            message = self.hear()
            assert isinstance(message, StepOutputs)
            found += [o for o in message.outputs if o.request_id == request_id]
        return found

    def _exactly(self, length: int) -> bytes:
        data = b""
        while len(data) < length:
            part = self._connection.recv(length - len(data))
            assert part, "the engine closed the socket"
            data += part
        return data


@contextmanager
def loop(**config: int) -> Iterator[tuple[Service, list[str]]]:
    """A loop in a thread; `how` tells how it ended."""
    ours, theirs = socket.socketpair()
    engine = Engine(EngineConfig(**({"num_blocks": 64} | config)), EchoModelRunner(100))
    how: list[str] = []

    def run() -> None:
        try:
            EngineLoop(engine, EngineSocket(theirs)).run()
            how.append("shutdown")
        except LinkClosed:
            how.append("closed")

    thread = threading.Thread(target=run)
    thread.start()
    try:
        with ours:
            yield Service(ours), how
    finally:
        thread.join(10)
        theirs.close()
        assert not thread.is_alive()


def test_a_request_is_run_and_its_outputs_come_in_order() -> None:
    with loop() as (service, _):
        service.say(add("r"))
        outputs = service.outputs_of("r")
        assert [t for o in outputs for t in o.token_ids] == [1, 2, 3, 1, 2]
        assert outputs[-1].finish_reason is FinishReason.LENGTH


def test_the_choices_of_one_message_run_apart_and_share_what_their_prompt_computed() -> None:
    prompt = tuple(range(40))
    starts = (
        ChoiceStart("r/1", 2, ()),
        ChoiceStart("r/2", 3, prompt[:2]),  # two of its three tokens are known
        ChoiceStart("r/bad", 4, (100,)),
    )
    with loop(block_size=8) as (service, _):
        first = add("r/0", prompt, max_tokens=3)
        service.say(first)
        service.outputs_of("r/0")
        service.say(AddChoices(first.request, starts))
        heard: dict[str, list[EngineOutput]] = {"r/1": [], "r/2": []}
        rejected: list[str] = []
        while not all(those and those[-1].finish_reason for those in heard.values()):
            match service.hear():
                case RequestRejected(request_id):
                    rejected.append(request_id)
                case StepOutputs(outputs):
                    for output in outputs:
                        heard[output.request_id].append(output)
        tokens = {name: [t for o in those for t in o.token_ids] for name, those in heard.items()}
        assert tokens == {"r/1": [0, 1, 2], "r/2": [2]}
        assert rejected == ["r/bad"]
        assert [heard[name][-1].num_cached_tokens for name in heard] == [32, 40]


@pytest.mark.promise(
    "Streaming: requests that arrive during a step start at the next one; submitting waits for no "
    "step"
)
def test_one_message_holds_a_whole_steps_outputs() -> None:
    with loop() as (service, _):
        service.say(add("a"), add("b"))
        batches = []
        while sum(1 for b in batches for o in b if o.finish_reason) < 2:
            message = service.hear()
            assert isinstance(message, StepOutputs)
            batches.append(message.outputs)
        assert max(len(outputs) for outputs in batches) == 2


def test_statistics_come_at_once_when_the_engine_becomes_idle() -> None:
    with loop() as (service, _):
        service.say(add("r"))
        service.outputs_of("r")
        while True:
            message = service.hear()
            assert isinstance(message, StepOutputs)
            if message.stats is not None and message.stats["running"] == 0:
                break
        assert message.stats["generated_tokens"] == 5
        assert message.stats["free_blocks"] == message.stats["total_blocks"] == 64


def test_a_cancelled_request_has_no_more_output_and_frees_its_blocks() -> None:
    with loop() as (service, _):
        service.say(add("long", max_tokens=1000), add("short"))
        service.outputs_of("short")
        service.say(CancelRequest("long"), CancelRequest("long"), CancelRequest("unknown"))
        while True:
            message = service.hear()
            assert isinstance(message, StepOutputs)
            if message.stats is not None and message.stats["running"] == 0:
                break
        assert message.stats["free_blocks"] == 64


def test_a_refused_request_is_answered_and_the_others_go_on() -> None:
    with loop(max_model_len=8) as (service, _):
        service.say(add("bad", tuple(range(9))), add("good"))
        messages = [service.hear()]
        while not isinstance(messages[-1], RequestRejected):
            messages.append(service.hear())
        assert messages[-1].request_id == "bad"
        assert messages[-1].code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
        assert service.outputs_of("good")[-1].finish_reason is FinishReason.LENGTH


def test_a_message_in_many_small_parts_is_put_together() -> None:
    with loop() as (service, _):
        for byte in encode_frame(add("r")):
            service.raw(bytes([byte]))
        assert service.outputs_of("r")


@pytest.mark.promise("HTTP: one owner of the engine (a process with one thread)")
def test_shutdown_ends_the_loop_and_so_does_the_end_of_the_socket() -> None:
    with loop() as (service, how):
        service.say(add("r", max_tokens=1000), Shutdown())
        while not how:
            time.sleep(0.001)
    assert how == ["shutdown"]
    with loop() as (_, how):
        pass
    assert how == ["closed"]


def test_a_service_that_does_not_read_pauses_the_engine() -> None:
    ours, theirs = socket.socketpair()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    engine = Engine(EngineConfig(num_blocks=4096), EchoModelRunner(100))
    with ours, theirs:
        service = Service(ours)
        service.say(*(add(f"r{i}", max_tokens=2000) for i in range(16)))

        def run() -> None:
            EngineLoop(engine, EngineSocket(theirs)).run()
            theirs.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=run)
        thread.start()
        steps = [-1, engine.stats().step]
        while steps[-1] != steps[-2]:
            thread.join(0.2)
            steps.append(engine.stats().step)
        assert thread.is_alive()
        assert 0 < steps[-1] < 2000
        service.say(Shutdown())
        while ours.recv(1 << 16):  # whoever reads again lets it go on
            pass
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    "message",
    [
        add("r", logit_bias={3: -1.5}, stop=("x",), seed=-(2**63), logprobs=2),
        CancelRequest("r"),
        Shutdown(),
    ],
)
def test_messages_to_the_engine_survive_the_frame(message: ToEngine) -> None:
    frame = encode_frame(message)
    assert frame_length(frame[: HEADER.size]) == len(frame) - HEADER.size
    assert decode_to_engine(frame[HEADER.size :]) == message


def test_outputs_survive_the_frame() -> None:
    message = StepOutputs(
        (
            EngineOutput(
                "r",
                (1,),
                (TokenLogprob(1, -0.5, ((1, -0.5), (2, -1.0))),),
                FinishReason.ERROR,
                None,
                ErrorCode.NONFINITE_LOGITS,
                "é",
                3,
            ),
        ),
        {"step": 1},
    )
    decoded = decode_from_engine(encode_frame(message)[HEADER.size :])
    assert decoded == message
    assert isinstance(decoded, StepOutputs)
    assert isinstance(decoded.outputs[0], EngineOutput)


def test_a_frame_that_is_too_long_is_refused() -> None:
    with pytest.raises(FrameTooLong):
        frame_length(HEADER.pack(MAX_FRAME_BYTES + 1))
