"""Traces over OpenTelemetry: the context that a job carries, and spans.

Without a collector (shared/tracing_export.py) the API's spans record nothing, and pass their
parent's context on. docs/TRACES.md has all spans and attributes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.trace import (
    INVALID_SPAN,
    INVALID_SPAN_CONTEXT,
    Link,
    NonRecordingSpan,
    NoOpTracer,
    Span,
    SpanContext,
    SpanKind,
    StatusCode,
    Tracer,
    format_trace_id,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

__all__ = [
    "INVALID_SPAN",
    "INVALID_SPAN_CONTEXT",
    "NonRecordingSpan",
    "Span",
    "SpanContext",
    "SpanKind",
    "format_trace_id",
]

MAX_TRACESTATE_CHARS = 512  # it is stored with each job

AttributeValue = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, AttributeValue]

_W3C = TraceContextTextMapPropagator()
# It logs a line, with its value, for each header of a client that it refuses.
for _name in ("opentelemetry.trace.span", TraceContextTextMapPropagator.__module__):
    logging.getLogger(_name).setLevel(logging.ERROR)


def read_context(traceparent: str, tracestate: str = "") -> SpanContext:
    """Returns the span that two headers name, an invalid one where the first is not as W3C has it.

    A second one that is not, or is longer than MAX_TRACESTATE_CHARS, counts as "".
    """
    carrier = {"traceparent": traceparent}
    if tracestate and len(tracestate) <= MAX_TRACESTATE_CHARS:
        carrier["tracestate"] = tracestate
    return get_current_span(_W3C.extract(carrier)).get_span_context()


def write_context(context: SpanContext) -> tuple[str, str]:
    """Returns `traceparent` and `tracestate` of what belongs to a span; "" for an invalid one."""
    carrier: dict[str, str] = {}
    _W3C.inject(carrier, set_span_in_context(NonRecordingSpan(context), Context()))
    return carrier.get("traceparent", ""), carrier.get("tracestate", "")


def attempt_fields(job_id: str, attempt: int, traceparent: str) -> dict[str, object]:
    """Returns what lines about an attempt have in the log; the trace where there is one."""
    fields: dict[str, object] = {"job_id": job_id, "attempt": attempt}
    context = read_context(traceparent)
    return {**fields, "trace_id": format_trace_id(context.trace_id)} if context.is_valid else fields


def fail_span(span: Span, code: str) -> None:
    """Marks a span as failed. `code` is one of few, and the last one counts."""
    span.set_attribute("error.type", code)
    span.set_status(StatusCode.ERROR)


class Tracing:
    """Makes spans; without a `tracer` those that record nothing. Used by one thread."""

    is_on = False

    def __init__(self, tracer: Tracer | None = None) -> None:
        self._tracer = tracer or NoOpTracer()

    def begin(
        self,
        name: str,
        parent: SpanContext = INVALID_SPAN_CONTEXT,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        start_s: float | None = None,
        attributes: Attributes | None = None,
        links: Sequence[SpanContext] = (),
        span_id: int | None = None,
    ) -> Span:
        """Returns a span that begins at `start_s`, Unix time, or now.

        Without a valid `parent` it begins a trace. `span_id`: for a span to which others refer
        before it is sent.
        """
        return self._tracer.start_span(
            name,
            context=set_span_in_context(NonRecordingSpan(parent), Context()),
            kind=kind,
            attributes=attributes,
            links=[Link(link) for link in links],
            start_time=None if start_s is None else round(start_s * 1e9),
        )

    def close(self) -> None:
        """Sends the rest, for a few seconds at most. Blocks."""
