"""Logging of every process: records go through a queue, so that no event loop waits for a file.

Messages are constant and values travel as fields: `log.info("job ended", extra={"job_id": ...})`.
"""

from __future__ import annotations

import copy
import json
import logging
import logging.handlers
import os
import queue
import socket
import sys
import time
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import TextIO

QUEUE_RECORDS = 10_000

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {
    "message",
    "asctime",
    "taskName",
    "color_message",  # uvicorn's: the message once more, with terminal codes
}
_CONTAINER_MARKS = ("/.dockerenv", "/run/.containerenv")


class LogLevel(StrEnum):
    """The least severe record that is written."""

    DEBUG = "DEBUG"
    INFO = "INFO"
    WARNING = "WARNING"
    ERROR = "ERROR"


class LogFormat(StrEnum):
    """AUTO is JSON inside a container and readable text elsewhere."""

    AUTO = "auto"
    JSON = "json"
    TEXT = "text"


def in_container() -> bool:
    """Returns whether this process runs inside Docker, Podman or Kubernetes."""
    return "KUBERNETES_SERVICE_HOST" in os.environ or any(map(os.path.exists, _CONTAINER_MARKS))


def record_fields(record: logging.LogRecord) -> dict[str, object]:
    """Returns the fields passed as `extra`, in their order."""
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (UTC), level, logger, message, the fields, the traceback."""

    def __init__(self, fields: Mapping[str, object] | None = None) -> None:
        super().__init__()
        self._fields = dict(fields or {})

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _utc(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._fields,
            **record_fields(record),
        }
        if trace := _trace(self, record):
            line["traceback"] = trace
        return json.dumps(line, ensure_ascii=False, default=str)


class TextFormatter(logging.Formatter):
    """`12:00:00.123 INFO worker.service job ended job_id=... tokens=12`."""

    def __init__(self, fields: Mapping[str, object] | None = None) -> None:
        super().__init__()
        self._fields = dict(fields or {})

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields = "".join(
            f" {name}={_shown(value)}"
            for name, value in {**self._fields, **record_fields(record)}.items()
        )
        line = (
            f"{clock}.{int(record.msecs):03d} {record.levelname:<7} {record.name} "
            f"{record.getMessage()}{fields}"
        )
        trace = _trace(self, record)
        return f"{line}\n{trace}" if trace else line


class DroppingQueueHandler(logging.handlers.QueueHandler):
    """Never blocks: when the queue is full the record is dropped and counted in `num_dropped`."""

    num_dropped = 0

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Resolves arguments and traceback here, where they are still what they were."""
        prepared = copy.copy(record)
        prepared.msg = record.getMessage()
        prepared.args = None
        prepared.exc_text = _trace(_PLAIN, record) or None
        prepared.exc_info = None
        prepared.stack_info = None
        return prepared

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self.num_dropped += 1


class Logs:
    """The process's logging while it runs; `stop` writes what is still queued."""

    def __init__(
        self, handler: DroppingQueueHandler, listener: logging.handlers.QueueListener
    ) -> None:
        self._handler = handler
        self._listener = listener
        listener.start()

    def stop(self) -> None:
        """Writes what is queued. Later records are lost. Idempotent."""
        root = logging.getLogger()
        if self._handler not in root.handlers:
            return
        if self._handler.num_dropped:
            logging.getLogger(__name__).warning(
                "log records were dropped", extra={"num_dropped": self._handler.num_dropped}
            )
        root.removeHandler(self._handler)
        self._listener.stop()


def start_logs(
    level: LogLevel,
    log_format: LogFormat,
    *,
    fields: Mapping[str, object] | None = None,
    stream: TextIO | None = None,
) -> Logs:
    """Sets up the root logger of this process; `fields` are on every line."""
    as_json = log_format is LogFormat.JSON or (log_format is LogFormat.AUTO and in_container())
    target = logging.StreamHandler(stream or sys.stderr)
    target.setFormatter(JsonFormatter(fields) if as_json else TextFormatter(fields))
    records: queue.Queue[logging.LogRecord] = queue.Queue(QUEUE_RECORDS)
    handler = DroppingQueueHandler(records)
    root = logging.getLogger()
    root.setLevel(level.value)
    root.addHandler(handler)
    logging.captureWarnings(True)
    return Logs(handler, logging.handlers.QueueListener(records, target))


_PLAIN = logging.Formatter()


def _trace(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    if record.exc_text:
        return record.exc_text
    parts = []
    if record.exc_info and record.exc_info[0] is not None:
        parts.append(formatter.formatException(record.exc_info))
    if record.stack_info:
        parts.append(record.stack_info)
    return "\n".join(parts)


def _utc(created_s: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(created_s))
    return f"{whole}.{int(created_s % 1 * 1000):03d}Z"


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}".rstrip("0").rstrip(".")
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if not text or set(text) & set(' "=\n') else text


REMIND_S = 30.0


class Outage:
    """Decides which failures of something that is tried again and again are reported.

    A loop that reports each of its tries fills a disk while the server is away, and buries the line
    that tells since when. A loop that reports the first one alone looks dead after an hour.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.since_s: float | None = None  # None while the tries succeed
        self._reported_s = 0.0

    def failed(self) -> float | None:
        """Counts a failure. Returns the outage's age in seconds where it is to be reported: at its
        first failure (0.0), then at most every REMIND_S; None otherwise."""
        now_s = self._clock()
        if self.since_s is None:
            self.since_s = self._reported_s = now_s
            return 0.0
        if now_s - self._reported_s < REMIND_S:
            return None
        self._reported_s = now_s
        return now_s - self.since_s

    def succeeded(self) -> float | None:
        """Ends the outage. Returns how many seconds it lasted; None where there was none."""
        if self.since_s is None:
            return None
        lasted_s, self.since_s = self._clock() - self.since_s, None
        return lasted_s


class RateLimitedOutageLog:
    """Logs an outage when it begins, every REMIND_S while it lasts, and when it is over."""

    def __init__(
        self,
        log: logging.Logger,
        *,
        failing: str,
        recovered: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`failing` and `recovered` are the constant messages of the two records."""
        self._log = log
        self._failing = failing
        self._recovered = recovered
        self._outage = Outage(clock)

    def failed(self, **fields: object) -> None:
        """Counts a failed try; logs a warning with `fields` where one is due."""
        outage_s = self._outage.failed()
        if outage_s is not None:
            lasting = {"outage_s": round(outage_s, 1)} if outage_s else {}
            self._log.warning(self._failing, extra={**fields, **lasting})

    def succeeded(self) -> None:
        """Ends the outage, if there is one, with a line that tells its length."""
        # Looked at first: this is called for every message that is received.
        if self._outage.since_s is not None and (outage_s := self._outage.succeeded()) is not None:
            self._log.info(self._recovered, extra={"outage_s": round(outage_s, 1)})


# This machine's name, as a part of the names of its processes.

MAX_CHARS = 40


def host_name() -> str:
    """Returns this machine's name, of letters, digits, '-' and '.' only: it stands in keys."""
    return "".join(c if c.isalnum() or c in "-." else "-" for c in socket.gethostname())[:MAX_CHARS]
