"""Traces: the context that a job carries, and spans, in the terms of OpenTelemetry.

Off unless OpenTelemetry's own variables name a collector. Then spans go there by OTLP over HTTP,
from a thread of their own, and spans not accepted are lost. This is the one module that imports
OpenTelemetry, where it is on. docs/TRACES.md has all spans and attributes.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from enum import Enum
from importlib.metadata import version
from typing import Any, NamedTuple

from shared.outages import RateLimitedOutageLog
from shared.tracing_environment import collector_of, fault_of, is_requested

MAX_TRACESTATE_CHARS = 512
MAX_TRACESTATE_MEMBERS = 32
CLOSE_S = 3.0  # for the last spans of a process
# Between two exports, unless OTEL_BSP_SCHEDULE_DELAY is set: the spans that a killed process has
# not sent is lost. The SDK's own default are five seconds.
EXPORT_DELAY_MS = 1000
SCOPE = "penstock"

AttributeValue = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, AttributeValue]

log = logging.getLogger(__name__)

# W3C Trace Context: version, trace id, parent id, flags; a later version may have more.
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
# A member of its tracestate.
_KEY = r"([a-z][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13})"
_MEMBER = re.compile(_KEY + r"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]")


class TraceContext(NamedTuple):
    """A span, as others refer to it: a parent in another process, or a link."""

    trace_id: str  # 32 hexadecimal digits
    span_id: str  # 16
    flags: int = 1  # 1: sampled
    tracestate: str = ""

    @classmethod
    def parse(cls, traceparent: str, tracestate: str = "") -> TraceContext | None:
        """Returns the context of two headers, without the second where that is not as W3C has it;
        None where the first is not."""
        found = _TRACEPARENT.fullmatch(traceparent.strip(" \t"))
        if found is None:
            return None
        release, trace_id, span_id, flags, rest = found.groups()
        if release == "ff" or (release == "00" and rest):
            return None
        if not (int(trace_id, 16) and int(span_id, 16)):
            return None
        return cls(trace_id, span_id, int(flags, 16), _valid_tracestate(tracestate))

    @property
    def traceparent(self) -> str:
        """The header of requests that belong to this span."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"


def _valid_tracestate(text: str) -> str:
    if len(text) > MAX_TRACESTATE_CHARS:
        return ""
    members = [member for part in text.split(",") if (member := part.strip(" \t"))]
    is_valid = len(members) <= MAX_TRACESTATE_MEMBERS and all(map(_MEMBER.fullmatch, members))
    return ",".join(members) if is_valid else ""


def attempt_fields(job_id: str, attempt: int, traceparent: str) -> dict[str, object]:
    """Returns what lines about an attempt have in the log; the trace where there is one."""
    fields: dict[str, object] = {"job_id": job_id, "attempt": attempt}
    context = TraceContext.parse(traceparent)
    return fields if context is None else {**fields, "trace_id": context.trace_id}


class SpanKind(Enum):
    """What a span is to its parent, as OpenTelemetry has it."""

    INTERNAL = "INTERNAL"
    SERVER = "SERVER"
    CONSUMER = "CONSUMER"


class Span:
    """A span that is not recorded. What would be its children are those of its parent."""

    is_recorded = False

    def __init__(self, context: TraceContext | None) -> None:
        self.context = context

    def rename(self, name: str) -> None:
        """Names the span."""

    def set(self, attributes: Attributes) -> None:
        """Adds attributes."""

    def fail(self, code: str) -> None:
        """Marks the span as failed. `code` is one of few, and the last one counts."""

    def end(self, end_s: float | None = None) -> None:
        """Ends the span at `end_s`, Unix time, or now. Later calls of any method have no effect."""


class Tracing:
    """Makes spans; here none. Used by one thread."""

    is_on = False

    def begin(
        self,
        name: str,
        parent: TraceContext | None,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        start_s: float | None = None,
        attributes: Attributes | None = None,
        links: Sequence[TraceContext] = (),
        span_id: str = "",
    ) -> Span:
        """Returns a span that begins at `start_s`, Unix time, or now.

        Without `parent` it begins a trace. `span_id`: 16 hexadecimal digits, for a span to which
        others refer before it is sent.
        """
        return Span(parent)

    def close(self) -> None:
        """Sends the rest, for CLOSE_S at most. Blocks."""


def open_tracing(service: str, instance_id: str) -> Tracing:
    """Returns what makes the spans of this process, by the variables of the environment.

    `service` and `instance_id` name it where those do not. What keeps spans from being sent is
    logged; it stops no process.
    """
    if not is_requested(os.environ):
        return Tracing()
    try:
        if fault := fault_of(os.environ):
            raise ValueError(fault)
        return _OpenTelemetry(service, instance_id)
    except ImportError as error:
        reason = f"{error}: pip install 'penstock[otel]'"
    except ValueError as error:
        reason = str(error)
    log.warning("tracing is off", extra={"reason": reason})
    return Tracing()


def find_faults(timeout_s: float) -> list[str] | None:
    """Returns why spans of a process with this environment would be lost, or otherwise than its
    variables set; None if none are requested.

    Sends the collector a request without spans, and waits for its answer for so long. Blocks.
    """
    if not is_requested(os.environ):
        return None
    if fault := fault_of(os.environ):
        return [fault]
    heard = _LastWords(logging.WARNING)
    logger = logging.getLogger("opentelemetry")  # the SDK logs what it leaves out
    logger.addHandler(heard)
    propagated, logger.propagate = logger.propagate, False
    try:
        tracing = _OpenTelemetry("penstock", "doctor")
        refused = tracing.refused(timeout_s)
        tracing.close()
    except ImportError as error:
        return [f"{error}: pip install 'penstock[otel]'"]
    except ValueError as error:
        return [str(error)]
    finally:
        logger.removeHandler(heard)
        logger.propagate = propagated
    return [sentence for sentence in (heard.last, refused) if sentence]


class _OpenTelemetry(Tracing):
    """Spans of OpenTelemetry's SDK, which reads its own variables.

    Raises ImportError where it is not installed, and ValueError for a variable that it refuses.
    """

    is_on = True

    def __init__(self, service: str, instance_id: str) -> None:
        from opentelemetry import trace
        from opentelemetry.context import Context
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

        own = {
            "service.name": service,
            "service.version": version("penstock"),
            "service.instance.id": instance_id,
        }
        given = OTELResourceDetector().detect()  # these come before our own
        self._ids = _Ids(RandomIdGenerator())
        ids: Any = self._ids
        exporter: Any = _ReportingExporter(OTLPSpanExporter())
        self._provider = TracerProvider(
            resource=Resource.create().merge(Resource(own)).merge(given),
            id_generator=ids,
            shutdown_on_exit=False,
        )
        delay_ms = None if os.environ.get("OTEL_BSP_SCHEDULE_DELAY") else EXPORT_DELAY_MS
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter, schedule_delay_millis=delay_ms)
        )
        self._tracer = self._provider.get_tracer(SCOPE, version("penstock"))
        self._trace = trace
        self._nothing = Context()  # around a span that begins a trace

    def begin(
        self,
        name: str,
        parent: TraceContext | None,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        start_s: float | None = None,
        attributes: Attributes | None = None,
        links: Sequence[TraceContext] = (),
        span_id: str = "",
    ) -> Span:
        trace = self._trace
        around = self._nothing
        if parent is not None:
            around = trace.set_span_in_context(trace.NonRecordingSpan(self._own(parent)), around)
        self._ids.next_span_id = int(span_id, 16) if span_id else 0
        span = self._tracer.start_span(
            name,
            context=around,
            kind=trace.SpanKind[kind.value],
            attributes=attributes,
            links=[trace.Link(self._own(link)) for link in links],
            start_time=None if start_s is None else round(start_s * 1e9),
        )
        own = span.get_span_context()
        context = TraceContext(
            f"{own.trace_id:032x}",
            f"{own.span_id:016x}",
            int(own.trace_flags),
            own.trace_state.to_header(),
        )
        if not span.is_recording():
            return Span(context)
        return _RecordedSpan(context, span, trace.Status(trace.StatusCode.ERROR))

    def refused(self, timeout_s: float) -> str:
        """Sends a request without spans. Returns why it is not accepted, or ""."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        words = _LastWords()
        logger = logging.getLogger(OTLPSpanExporter.__module__)
        exporter: Any = OTLPSpanExporter(timeout=timeout_s)
        logger.addHandler(words)
        try:
            is_taken = exporter.export([]).name == "SUCCESS"
        finally:
            logger.removeHandler(words)
            exporter.shutdown()
        if is_taken:
            return ""
        # The SDK's first sentence has the cause, its last one only that it has given up.
        reason = re.search(r"\[Errno -?\d+\] ([\w ]+)|code: (.+)", words.first)
        said = (reason[1] or reason[2]) if reason else f"no answer within {timeout_s:g} s"
        return f"{collector_of(os.environ)} does not take spans ({said})"

    def close(self) -> None:
        # In a thread: a collector that does not answer would hold the process for half a minute.
        closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(CLOSE_S)

    def _own(self, context: TraceContext) -> Any:
        trace = self._trace
        return trace.SpanContext(
            trace_id=int(context.trace_id, 16),
            span_id=int(context.span_id, 16),
            is_remote=True,
            trace_flags=trace.TraceFlags(context.flags),
            trace_state=trace.TraceState.from_header([context.tracestate]),
        )


class _RecordedSpan(Span):
    is_recorded = True

    def __init__(self, context: TraceContext, span: Any, failed: Any) -> None:
        super().__init__(context)
        self._span = span
        self._failed = failed

    def rename(self, name: str) -> None:
        if self._span.is_recording():
            self._span.update_name(name)

    def set(self, attributes: Attributes) -> None:
        if self._span.is_recording():
            self._span.set_attributes(attributes)

    def fail(self, code: str) -> None:
        if self._span.is_recording():
            self._span.set_attribute("error.type", code)
            self._span.set_status(self._failed)

    def end(self, end_s: float | None = None) -> None:
        if not self._span.is_recording():
            return
        end_ns = round((time.time() if end_s is None else end_s) * 1e9)
        self._span.end(max(end_ns, self._span.start_time))


class _Ids:
    """The SDK's generator of ids, but for a span whose id is given."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self.next_span_id = 0  # 0: any

    def generate_span_id(self) -> int:
        span_id, self.next_span_id = self.next_span_id, 0
        return span_id or int(self._generator.generate_span_id())

    def generate_trace_id(self) -> int:
        return int(self._generator.generate_trace_id())

    def is_trace_id_random(self) -> bool:
        return bool(self._generator.is_trace_id_random())


class _ReportingExporter:
    """Logs one line when spans begin to be lost, and one when they are sent again.

    The SDK would log a line of each try.
    """

    def __init__(self, exporter: Any) -> None:
        self._exporter = exporter
        self._is_failing = False
        self._words = _LastWords()
        logger = logging.getLogger(type(exporter).__module__)
        logger.addHandler(self._words)
        logger.propagate = False
        # Silence the SDK's queue-full messages while export is failing.
        queue = logging.getLogger("opentelemetry.sdk._shared_internal")
        queue.addFilter(lambda record: not self._is_failing)
        self._outage = RateLimitedOutageLog(
            log, failing="traces cannot be sent", recovered="traces are sent again"
        )

    def export(self, spans: Sequence[Any]) -> Any:
        result = self._exporter.export(spans)
        self._is_failing = result.name != "SUCCESS"
        if self._is_failing:
            self._outage.failed(reason=self._words.last)
        else:
            self._outage.succeeded()
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


class _LastWords(logging.Handler):
    """Keeps the first and the last message of a logger."""

    first = last = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.last = record.getMessage()[:300]
        self.first = self.first or record.getMessage()
