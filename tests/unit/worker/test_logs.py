from __future__ import annotations

import io
import json
import logging
import queue
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shared.logs import DroppingQueueHandler, LogFormat, LogLevel, start_logs

log = logging.getLogger("tests.logs")


@contextmanager
def logs(log_format: LogFormat, level: LogLevel = LogLevel.INFO) -> Iterator[io.StringIO]:
    stream = io.StringIO()
    root = logging.getLogger()
    before = root.level
    started = start_logs(level, log_format, fields={"process": "p"}, stream=stream)
    try:
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
        "process": "p",
        "job_id": "0-a",
        "tokens": 3,
    }


def test_a_text_line_has_them_too_and_stays_one_line() -> None:
    with logs(LogFormat.TEXT) as stream:
        log.info("job ended", extra={"job_id": "0-a", "detail": 'two words\n"x"', "took_s": 0.5})
    (line,) = stream.getvalue().splitlines()
    assert line.endswith(
        'INFO    tests.logs job ended process=p job_id=0-a detail="two words\\n\\"x\\"" took_s=0.5'
    )


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
