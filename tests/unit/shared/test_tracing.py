"""What a trace context is, and when spans are made at all."""

from __future__ import annotations

import logging
import socket
import sys
import threading

import pytest

from shared.tracing import (
    MAX_TRACESTATE_CHARS,
    SpanContext,
    format_trace_id,
    read_context,
    write_context,
)
from shared.tracing_environment import collector_of
from shared.tracing_export import open_tracing
from tests.support.otlp import collecting
from tests.support.table import table

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@table(
    ("traceparent", "flags"),
    [
        (f"00-{TRACE}-{SPAN}-01", 1),
        (f"00-{TRACE}-{SPAN}-00", 0),
        (f"00-{TRACE}-{SPAN}-03", 3),
        (f"01-{TRACE}-{SPAN}-01-more", 1),
        (f" 00-{TRACE}-{SPAN}-01\t", 1),
    ],
)
def test_a_traceparent_is_read(traceparent: str, flags: int) -> None:
    context = read_context(traceparent)
    assert context.is_valid
    assert (format_trace_id(context.trace_id), context.trace_flags) == (TRACE, flags)
    assert write_context(context) == (f"00-{TRACE}-{SPAN}-{flags:02x}", "")


@table(
    "traceparent",
    [
        "",
        "hello",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"00-{TRACE[:-1]}٣-{SPAN}-01",
    ],
)
def test_a_malformed_traceparent_is_no_context(traceparent: str) -> None:
    context = read_context(traceparent)
    assert not context.is_valid
    assert write_context(context) == ("", "")


@table(
    ("given", "kept"),
    [
        ("vendor=value", "vendor=value"),
        ("a=1 , b@c=2,", "a=1,b@c=2"),
        ("vendor", ""),
        ("vendor=a\r\nx: y", ""),
        ("a=" + "x" * MAX_TRACESTATE_CHARS, ""),
        (",".join(f"a{n}=1" for n in range(33)), ""),
        ("vendor=ä", ""),
    ],
)
def test_a_tracestate_is_kept_where_it_is_valid(
    given: str, kept: str, caplog: pytest.LogCaptureFixture
) -> None:
    context = read_context(f"00-{TRACE}-{SPAN}-01", given)
    assert write_context(context) == (f"00-{TRACE}-{SPAN}-01", kept)
    assert not caplog.records, "a client decides neither what is logged nor how much"


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_TRACES_EXPORTER", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_without_a_collector_nothing_is_made_and_contexts_pass_through(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    tracing = open_tracing("service", "1")
    assert not tracing.is_on
    context = SpanContext(int(TRACE, 16), int(SPAN, 16), is_remote=True)
    assert tracing.begin("x", context).get_span_context() is context
    assert not tracing.begin("x").get_span_context().is_valid
    assert not caplog.records


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER='zipkin'"),
        (
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "OTEL_EXPORTER_OTLP_PROTOCOL='grpc': http/protobuf is known",
        ),
        ({"OTEL_BSP_SCHEDULE_DELAY": "0"}, "schedule_delay"),
    ],
)
def test_unsupported_tracing_options_are_warnings(
    variables: dict[str, str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name, value in {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", **variables}.items():
        monkeypatch.setenv(name, value)
    assert not open_tracing("service", "1").is_on
    (record,) = caplog.records
    assert record.getMessage() == "tracing is off"
    assert words in record.reason  # type: ignore[attr-defined]


def test_without_the_packages_the_sentence_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    assert not open_tracing("service", "1").is_on
    assert "pip install 'penstock[otel]'" in caplog.records[0].reason  # type: ignore[attr-defined]


def test_a_sampler_that_drops_a_trace_gives_a_context_that_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
        tracing = open_tracing("service", "1")
        span = tracing.begin("x")
        assert not span.is_recording()
        assert span.get_span_context().is_valid
        assert not span.get_span_context().trace_flags.sampled
        span.end()
        tracing.close()
        assert collector.num_requests == 0


def test_variables_name_the_service_and_others_add_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
        tracing = open_tracing("service", "i1")
        span = tracing.begin("x", span_id=255)
        span.end()
        other = tracing.begin("y", span.get_span_context())
        other.end()
        tracing.close()
        first, second = sorted(collector.spans, key=lambda s: s.name)
    assert first.resource["service.name"] == "mine"
    assert first.resource["service.instance.id"] == "i1"
    assert first.resource["deployment.environment.name"] == "test"
    assert (first.span_id, first.parent_id, first.attributes) == ("00000000000000ff", "", {})
    assert second.parent_id == first.span_id != second.span_id


def test_closing_does_not_wait_for_a_collector_that_never_answers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "10")
        monkeypatch.setattr("shared.tracing_export.CLOSE_S", 0.2)
        tracing = open_tracing("service", "1")
        tracing.begin("x").end()
        tracing.close()
        assert any(thread.name.startswith("OtelBatch") for thread in threading.enumerate())
    assert [record for record in caplog.records if record.levelno > logging.WARNING] == []


@table(
    ("endpoint", "shown"),
    [
        ("http://c:4318", "c:4318"),
        ("https://user:s3cret@c/v1", "c:443"),
        ("http://c:4317", "c:4317; 4317 is gRPC's port, that of HTTP is 4318"),
    ],
)
def test_a_collector_is_named_without_what_may_be_secret(endpoint: str, shown: str) -> None:
    assert collector_of({"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}) == shown
