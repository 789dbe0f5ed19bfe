"""A collector: takes spans by OTLP over HTTP, and shows them as a test looks at them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1 import trace_pb2


@dataclass(frozen=True)
class ReceivedSpan:
    """One span as it was sent, with its ids in hexadecimal digits and times in seconds."""

    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    tracestate: str
    start_s: float
    end_s: float
    attributes: dict[str, Any]
    links: tuple[tuple[str, str], ...]  # trace id, span id
    is_error: bool
    resource: dict[str, Any]

    @property
    def attempt(self) -> int:
        number = self.attributes["penstock.attempt"]
        assert isinstance(number, int)
        return number


class Collector:
    """Listens while its context lasts. `spans` are those that have come so far."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.num_requests = 0
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.num_requests += 1
                assert self.path == "/v1/traces"
                assert self.headers["content-type"] == "application/x-protobuf"
                collector.spans += spans_of(ExportTraceServiceRequest.FromString(body))
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @property
    def settings(self) -> dict[str, str]:
        """What makes a process send its spans here, soon."""
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": self.url, "OTEL_BSP_SCHEDULE_DELAY": "50"}

    def of_trace(self, trace_id: str) -> list[ReceivedSpan]:
        """Those of one trace, by their starts."""
        return sorted(
            (span for span in list(self.spans) if span.trace_id == trace_id),
            key=lambda span: span.start_s,
        )

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    try:
        yield collector
    finally:
        collector.close()


def wait_for_spans(
    collector: Collector, trace_id: str, names: list[str], timeout_s: float = 30.0
) -> list[ReceivedSpan]:
    """Returns the spans of a trace when there are as many of each name, and nothing else comes."""
    deadline_s = time.monotonic() + timeout_s
    while sorted(span.name for span in collector.of_trace(trace_id)) != sorted(names):
        if time.monotonic() > deadline_s:
            found = [(span.name, span.attributes) for span in collector.of_trace(trace_id)]
            raise AssertionError(f"not {sorted(names)}, but {found}")
        time.sleep(0.02)
    time.sleep(0.3)
    spans = collector.of_trace(trace_id)
    assert sorted(span.name for span in spans) == sorted(names)
    return spans


def spans_of(request: ExportTraceServiceRequest) -> list[ReceivedSpan]:
    found = []
    for of_resource in request.resource_spans:
        resource = _attributes(of_resource.resource.attributes)
        for of_scope in of_resource.scope_spans:
            assert of_scope.scope.name == "penstock"
            found += [_received(span, resource) for span in of_scope.spans]
    return found


def _received(span: trace_pb2.Span, resource: dict[str, Any]) -> ReceivedSpan:
    return ReceivedSpan(
        name=span.name,
        kind=trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        tracestate=span.trace_state,
        start_s=span.start_time_unix_nano / 1e9,
        end_s=span.end_time_unix_nano / 1e9,
        attributes=_attributes(span.attributes),
        links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
        is_error=span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
        resource=resource,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind or "string_value")
