"""Logging of every process: records go through a queue, so that no event loop waits for a file.

Messages are constant and values travel as fields: `log.info("job ended", extra={"job_id": ...})`.
Every line has the name of its process: of `make run` the launcher's, such as `worker 1`.
"""

from __future__ import annotations

import copy
import json
import logging
import logging.handlers
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from enum import StrEnum
from queue import Empty, Full, Queue
from types import MappingProxyType
from typing import TextIO

from shared.outages import OUTAGE, REMIND_S, OutageMark
from shared.printable import printable, printable_line

QUEUE_RECORDS = 10_000
STOP_S = 5.0  # for the queued records, at the end
SETTLED_S = 2.0  # without a failure, after which an outage is over
SETTLE_LOOK_S = 0.5  # between looks for the end of an outage, while no record comes
PROCESS_NAME = "PENSTOCK_PROCESS"  # set by a launcher for its children

# Fields of every line that is logged in this context, such as the trace id of a request.
_NONE: Mapping[str, object] = MappingProxyType({})
log_context: ContextVar[Mapping[str, object]] = ContextVar("log_context", default=_NONE)

_outages = logging.getLogger("shared.outages")
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {
    OUTAGE,
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


class ProcessIdentity:
    """What all lines of a process have: its name and id, and its worker's name once it has one."""

    def __init__(self, kind: str, part: str = "") -> None:
        """`kind`: the name of a process that no launcher has named. `part`: of one that is a part
        of the named processes, the engine of a worker."""
        named = os.environ.get(PROCESS_NAME, "")
        self._is_named = bool(named)
        self._part = f" {part}" if part else ""
        self._name = named or kind
        self._worker_id = ""

    def is_worker(self, worker_id: str) -> None:
        """Adds the worker's name to all further lines."""
        self._worker_id = worker_id

    @property
    def fields(self) -> dict[str, object]:
        """The fields of a JSON line."""
        worker = {"worker": self._worker_id} if self._worker_id else {}
        return {"process": self._name + self._part, "pid": os.getpid(), **worker}

    @property
    def label(self) -> str:
        """The start of a text line. A launcher's name is enough to distinguish processes."""
        worker_id = "" if self._is_named or not self._worker_id else f" {self._worker_id}"
        return f"[{self._name}{worker_id}{self._part}]"


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (UTC), level, process, logger, message, the fields, the
    traceback."""

    def __init__(self, identity: ProcessIdentity) -> None:
        super().__init__()
        self._identity = identity

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _utc(record.created),
            "level": record.levelname.lower(),
            **self._identity.fields,
            "logger": record.name,
            "message": record.getMessage(),
            **record_fields(record),
        }
        if trace := _trace(self, record):
            line["traceback"] = trace
        return printable(json.dumps(line, ensure_ascii=False, default=str))


class TextFormatter(logging.Formatter):
    """`12:00:00.123 INFO [worker 1] worker.service job ended job_id=... tokens=12`."""

    def __init__(self, identity: ProcessIdentity) -> None:
        super().__init__()
        self._identity = identity

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields = "".join(
            f" {printable_line(name)}={_shown(value)}"
            for name, value in record_fields(record).items()
        )
        line = (
            f"{clock}.{int(record.msecs):03d} {record.levelname:<7} {self._identity.label} "
            f"{record.name} {printable_line(record.getMessage())}{fields}"
        )
        trace = _trace(self, record)
        return f"{line}\n{printable(trace)}" if trace else line


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
        for name, value in log_context.get().items():
            vars(prepared).setdefault(name, value)
        return prepared

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except Full:
            self.num_dropped += 1


class _Listener(logging.handlers.QueueListener):
    """Writes the queue's records, those of one outage as two lines."""

    def __init__(self, records: Queue[logging.LogRecord], target: logging.Handler) -> None:
        super().__init__(records, target)
        self._records = records
        self._fold = OutageFold()

    def dequeue(self, block: bool) -> logging.LogRecord:
        while True:
            self._write_ends()
            try:
                return self._records.get(block, SETTLE_LOOK_S if self._fold.is_settling else None)
            except Empty:
                if not block:
                    raise

    def handle(self, record: logging.LogRecord) -> None:
        if self._fold.passes(record):
            super().handle(record)

    def stop(self) -> None:
        """Writes the rest. Gives up after STOP_S: the reader of a pipe may have stopped reading."""
        thread: threading.Thread | None = self._thread
        if thread is None:
            return
        end_s = time.monotonic() + STOP_S
        with suppress(Full):
            self._records.put(self._sentinel, timeout=STOP_S)  # type: ignore[attr-defined]
        thread.join(max(0.0, end_s - time.monotonic()))
        if not thread.is_alive():
            self._write_ends(at_once=True)

    def _write_ends(self, *, at_once: bool = False) -> None:
        for record in self._fold.ended(at_once=at_once):
            super().handle(record)


class Logs:
    """The process's logging while it runs; `stop` writes the queued records."""

    def __init__(
        self,
        identity: ProcessIdentity,
        handler: DroppingQueueHandler,
        listener: logging.handlers.QueueListener,
    ) -> None:
        self.identity = identity
        self._handler = handler
        self._listener = listener
        listener.start()

    def stop(self) -> None:
        """Writes the queued records. Later ones are lost. Idempotent."""
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
    process: str,
    part: str = "",
    stream: TextIO | None = None,
) -> Logs:
    """Sets up the root logger of this process. `process` and `part` name it: ProcessIdentity."""
    as_json = log_format is LogFormat.JSON or (log_format is LogFormat.AUTO and in_container())
    target = logging.StreamHandler(stream or sys.stderr)
    identity = ProcessIdentity(process, part)
    target.setFormatter(JsonFormatter(identity) if as_json else TextFormatter(identity))
    records: Queue[logging.LogRecord] = Queue(QUEUE_RECORDS)
    handler = DroppingQueueHandler(records)
    root = logging.getLogger()
    root.setLevel(level.value)
    root.addHandler(handler)
    logging.captureWarnings(True)
    return Logs(identity, handler, _Listener(records, target))


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
    is_plain = text and not set(text) & set(' "=\n')
    return printable_line(text if is_plain else json.dumps(text, ensure_ascii=False))


# This machine's name, as a part of the names of its processes.

MAX_CHARS = 40


def host_name() -> str:
    """Returns this machine's name, of letters, digits, '-' and '.' only: it stands in keys."""
    return "".join(c if c.isalnum() or c in "-." else "-" for c in socket.gethostname())[:MAX_CHARS]


class OutageFold:
    """Lets one line pass when something goes away, and makes one when it is back.

    The first record of an outage passes, whichever loop it is from, then one every REMIND_S. The
    outage is over at the first success that no failure follows within SETTLED_S; the line of it is
    so much later. A loop that still fails then begins another one with its next record, and so does
    the next one after loops that have ended without success. At DEBUG each loop has its own lines.
    Used by one thread.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._running: dict[str, _Folded] = {}

    def passes(self, record: logging.LogRecord) -> bool:
        """Returns whether a record is to be written."""
        mark = getattr(record, OUTAGE, None)  # a library's extra may have the name
        if (
            not isinstance(mark, OutageMark)
            or record.levelno <= logging.DEBUG
            or _outages.isEnabledFor(logging.DEBUG)
        ):
            return True
        folded = self._running.get(mark.of)
        now_s = self._clock()
        if mark.num_failed is not None:
            if folded is not None:  # else a loop that noticed it late
                folded.num_failures += mark.num_failed - 1  # its first one was counted
                folded.answered_s = now_s if folded.answered_s is None else folded.answered_s
            return False
        if folded is None or now_s - folded.failed_s > 2 * REMIND_S:
            if mark.is_loop:
                self._running[mark.of] = _Folded(now_s, record.getMessage())
            return True
        return folded.failed(now_s)

    @property
    def is_settling(self) -> bool:
        """Whether `ended` will return a line when nothing fails."""
        return any(folded.answered_s is not None for folded in self._running.values())

    def ended(self, *, at_once: bool = False) -> list[logging.LogRecord]:
        """Returns the line of each outage that is over, once; `at_once` before it has settled."""
        settled_s = self._clock() - (0.0 if at_once else SETTLED_S)
        lines = []
        for of, folded in list(self._running.items()):
            if folded.answered_s is not None and folded.answered_s <= settled_s:
                del self._running[of]
                lines.append(folded.end(of, folded.answered_s))
        return [line for line in lines if _outages.isEnabledFor(line.levelno)]


class _Folded:
    """An outage of one thing that several loops need."""

    def __init__(self, now_s: float, failing: str) -> None:
        self.failing = failing
        self.since_s = self.shown_s = self.failed_s = now_s
        self.num_failures = 1
        self.num_shown = 1
        self.answered_s: float | None = None  # the first success since the last failure

    def failed(self, now_s: float) -> bool:
        """Counts a failure. Returns whether it is shown."""
        self.failed_s, self.num_failures = now_s, self.num_failures + 1
        self.answered_s = None  # what answered before was no end
        if now_s - self.shown_s < REMIND_S:
            return False
        self.shown_s, self.num_shown = now_s, self.num_shown + 1
        return True

    def end(self, of: str, answered_s: float) -> logging.LogRecord:
        """Returns the line of its end."""
        extra = {
            "outage_s": round(answered_s - self.since_s, 1),
            "began_with": self.failing,
            "num_suppressed": max(0, self.num_failures - self.num_shown),
        }
        message = f"{of} answers again"
        name = _outages.name
        return _outages.makeRecord(name, logging.INFO, "", 0, message, (), None, extra=extra)
