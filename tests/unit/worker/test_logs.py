from __future__ import annotations

import io
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shared.logs import (
    PROCESS_NAME,
    DroppingQueueHandler,
    LogFormat,
    LogLevel,
    Logs,
    log_context,
    start_logs,
)
from shared.outages import STORE, RateLimitedOutageLog

log = logging.getLogger("tests.logs")


@contextmanager
def logs(
    log_format: LogFormat, level: LogLevel = LogLevel.INFO, part: str = ""
) -> Iterator[io.StringIO]:
    stream = io.StringIO()
    root = logging.getLogger()
    before = root.level
    started = start_logs(level, log_format, process="worker", part=part, stream=stream)
    try:
        stream.logs = started  # type: ignore[attr-defined]
        yield stream
    finally:
        started.stop()
        started.stop()
        root.setLevel(before)
        logging.captureWarnings(False)


@pytest.mark.parametrize("log_format", [LogFormat.JSON, LogFormat.TEXT])
def test_a_message_is_not_logged_twice(log_format: LogFormat) -> None:
    with logs(log_format) as stream:
        log.info("began %d", 7, extra={"color_message": "began \033[36m%d\033[0m"})
    assert "color_message" not in stream.getvalue()
    assert "began 7" in stream.getvalue()


def test_a_json_line_has_the_message_and_the_fields() -> None:
    with logs(LogFormat.JSON) as stream:
        log.info("job ended", extra={"job_id": "0-a", "tokens": 3})
        log.debug("not shown")
    (line,) = stream.getvalue().splitlines()
    assert json.loads(line) | {"time": ""} == {
        "time": "",
        "level": "info",
        "logger": "tests.logs",
        "message": "job ended",
        "process": "worker",
        "pid": os.getpid(),
        "job_id": "0-a",
        "tokens": 3,
    }


def test_a_text_line_has_them_too_and_stays_one_line() -> None:
    with logs(LogFormat.TEXT) as stream:
        log.info("job ended", extra={"job_id": "0-a", "detail": 'two words\n"x"', "took_s": 0.5})
    (line,) = stream.getvalue().splitlines()
    assert line.endswith(
        'INFO    [worker] tests.logs job ended job_id=0-a detail="two words\\n\\"x\\"" took_s=0.5'
    )


def is_worker(stream: io.StringIO, worker_id: str) -> None:
    started = stream.logs  # type: ignore[attr-defined]
    assert isinstance(started, Logs)
    started.identity.is_worker(worker_id)


def test_a_line_has_the_name_of_its_process_and_of_its_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with logs(LogFormat.TEXT, part="engine") as stream:
        is_worker(stream, "host-1")
        log.info("x")
    assert "INFO    [worker host-1 engine] tests.logs x\n" in stream.getvalue()
    monkeypatch.setenv(PROCESS_NAME, "worker 3")
    with logs(LogFormat.TEXT, part="engine") as stream:
        is_worker(stream, "host-1")
        log.info("x")
    assert "INFO    [worker 3 engine] tests.logs x\n" in stream.getvalue()
    with logs(LogFormat.JSON) as stream:
        is_worker(stream, "host-1")
        log.info("x")
    line = json.loads(stream.getvalue())
    assert (line["process"], line["worker"]) == ("worker 3", "host-1")


def test_context_fields_are_added_to_lines_without_their_own() -> None:
    with logs(LogFormat.JSON) as stream:
        token = log_context.set({"trace_id": "t1"})
        log.info("inside")
        log.info("its own", extra={"trace_id": "t2"})
        log_context.reset(token)
        log.info("outside")
    found = [json.loads(line).get("trace_id") for line in stream.getvalue().splitlines()]
    assert found == ["t1", "t2", None]


@pytest.mark.parametrize(("level", "num_lines"), [(LogLevel.INFO, 2), (LogLevel.DEBUG, 4)])
def test_an_outage_of_two_loops_is_two_lines_but_where_everything_is_wanted(
    level: LogLevel, num_lines: int
) -> None:
    loops = [
        RateLimitedOutageLog(log, failing=f"{name} fails", recovered=f"{name} works", of=STORE)
        for name in ("one", "other")
    ]
    with logs(LogFormat.JSON, level) as stream:
        for loop in loops:
            loop.failed(reason="away")
        for loop in loops:
            loop.succeeded()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    messages = [line["message"] for line in lines if line["logger"] != "asyncio"]
    assert len(messages) == num_lines, messages
    assert messages[0] == "one fails"
    assert not any(name.startswith("outage_o") for line in lines for name in line)
    if level is LogLevel.INFO:
        assert messages[1] == "the store answers again"
        assert lines[1]["num_suppressed"] == 1


def test_the_end_of_an_outage_is_written_while_nothing_else_is_logged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shared.logs.SETTLE_LOOK_S", 0.01)
    monkeypatch.setattr("shared.logs.SETTLED_S", 0.02)
    loop = RateLimitedOutageLog(log, failing="it fails", recovered="it works", of=STORE)
    with logs(LogFormat.JSON) as stream:
        loop.failed()
        loop.succeeded()
        begin_s = time.monotonic()
        while "the store answers again" not in stream.getvalue():
            assert time.monotonic() < begin_s + 30
            time.sleep(0.005)
        log.info("another matter")
    messages = [json.loads(line)["message"] for line in stream.getvalue().splitlines()]
    assert messages == ["it fails", "the store answers again", "another matter"]


@pytest.mark.parametrize("log_format", [LogFormat.JSON, LogFormat.TEXT])
def test_a_traceback_survives_the_queue(log_format: LogFormat) -> None:
    with logs(log_format) as stream:
        try:
            raise ValueError("broken")
        except ValueError:
            log.exception("it failed")
    assert "ValueError: broken" in stream.getvalue()


def test_a_full_queue_drops_and_counts_and_never_blocks() -> None:
    handler = DroppingQueueHandler(queue.Queue(1))
    for _ in range(3):
        handler.handle(logging.makeLogRecord({"msg": "x"}))
    assert handler.num_dropped == 2


def test_an_end_does_not_wait_for_a_stream_that_nobody_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shared.logs.QUEUE_RECORDS", 1)
    monkeypatch.setattr("shared.logs.STOP_S", 0.01)
    is_read = threading.Event()

    class Unread(io.StringIO):
        def write(self, text: str) -> int:
            is_read.wait()
            return super().write(text)

    started = start_logs(LogLevel.INFO, LogFormat.TEXT, process="worker", stream=Unread())
    try:
        for _ in range(10):
            log.info("a line")
        started.stop()
    finally:
        is_read.set()
