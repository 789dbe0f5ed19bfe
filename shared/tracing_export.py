"""Exports spans to the collector that OpenTelemetry's own variables name, by its SDK.

By OTLP over HTTP, from a thread of their own; spans not accepted are lost. The SDK is imported
where it is on.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from shared.outages import RateLimitedOutageLog
from shared.tracing import INVALID_SPAN_CONTEXT, Span, SpanContext, Tracing
from shared.tracing_environment import collector_of, fault_of, is_requested

CLOSE_S = 3.0  # for the last spans of a process
# Between two exports, unless OTEL_BSP_SCHEDULE_DELAY is set: the spans that a killed process has
# not sent are lost. The SDK's own default is five seconds.
EXPORT_DELAY_MS = 1000
SCOPE = "penstock"

log = logging.getLogger(__name__)


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
        return _SdkTracing(service, instance_id)
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
    sdk_log = logging.getLogger("opentelemetry")  # the SDK logs what it leaves out
    sdk_log.addHandler(heard)
    propagated, sdk_log.propagate = sdk_log.propagate, False
    try:
        tracing = _SdkTracing("penstock", "doctor")
        refused = tracing.refused(timeout_s)
        tracing.close()
    except ImportError as error:
        return [f"{error}: pip install 'penstock[otel]'"]
    except ValueError as error:
        return [str(error)]
    finally:
        sdk_log.removeHandler(heard)
        sdk_log.propagate = propagated
    return [sentence for sentence in (heard.last, refused) if sentence]


class _SdkTracing(Tracing):
    """Spans of the SDK, which reads its own variables.

    Raises ImportError where it is not installed, and ValueError for a variable that it refuses.
    """

    is_on = True

    def __init__(self, service: str, instance_id: str) -> None:
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
        super().__init__(self._provider.get_tracer(SCOPE, version("penstock")))

    def begin(
        self,
        name: str,
        parent: SpanContext = INVALID_SPAN_CONTEXT,
        *,
        span_id: int | None = None,
        **options: Any,
    ) -> Span:
        self._ids.next_span_id = span_id
        return super().begin(name, parent, **options)

    def refused(self, timeout_s: float) -> str:
        """Sends a request without spans. Returns why it is not accepted, or ""."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        words = _LastWords()
        exporter_log = logging.getLogger(OTLPSpanExporter.__module__)
        exporter: Any = OTLPSpanExporter(timeout=timeout_s)
        exporter_log.addHandler(words)
        try:
            is_taken = exporter.export([]).name == "SUCCESS"
        finally:
            exporter_log.removeHandler(words)
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


class _Ids:
    """The SDK's generator of ids, but for a span whose id is given."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self.next_span_id: int | None = None

    def generate_span_id(self) -> int:
        span_id, self.next_span_id = self.next_span_id, None
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
        exporter_log = logging.getLogger(type(exporter).__module__)
        exporter_log.addHandler(self._words)
        exporter_log.propagate = False
        # Silences the SDK's lines about a full queue while export is failing.
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
