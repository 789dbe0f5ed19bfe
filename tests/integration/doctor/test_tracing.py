"""`penstock doctor` finds each way in which spans would be lost."""

from __future__ import annotations

import http.server
import json
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import penstock.doctor.tracing as module
from penstock.cli.application import main
from penstock.doctor.finding import Finding, Level
from penstock.doctor.tracing import check_tracing
from tests.support.launched import free_port
from tests.support.otlp import Collector, collecting

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (ENDPOINT, "OTEL_TRACES_EXPORTER", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with collecting() as made:
        monkeypatch.setenv(ENDPOINT, made.url)
        yield made


def warned(words: str) -> Finding:
    """The one finding, a warning with these words."""
    (found,) = check_tracing()
    assert found.level is Level.WARNING
    assert words in found.sentence, found
    return found


def test_without_a_collector_it_is_off() -> None:
    (found,) = check_tracing()
    assert found.level is Level.OK
    assert "Off" in found.sentence


def test_a_collector_that_answers_gets_no_span(collector: Collector) -> None:
    (found,) = check_tracing()
    assert (found.level, found.sentence) == (Level.OK, "The collector takes traces.")
    assert (collector.num_requests, collector.spans) == (1, [])


def test_a_package_that_is_missing(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    warned("pip install 'penstock[otel]'")


def test_a_collector_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv(ENDPOINT, f"http://127.0.0.1:{port}")
    warned(f"127.0.0.1:{port} does not take spans (Connection refused)")


def test_a_collector_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COLLECTOR_TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv(ENDPOINT, f"http://127.0.0.1:{silent.getsockname()[1]}")
        warned("no answer within 0.5 s")


def test_a_collector_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one does that wants another key."""

    class Refusing(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_error(401)

        def log_message(self, *_: Any) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        monkeypatch.setenv(ENDPOINT, f"http://127.0.0.1:{server.server_address[1]}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=s3cret")
        assert "s3cret" not in warned("does not take spans (401").sentence


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        (ENDPOINT, "collector:4317", "http://"),
        ("OTEL_TRACES_EXPORTER", "zipkin", "otlp and none are known"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "http/protobuf is known"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json", "http/protobuf is known"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "api-key: s3cret", "OTEL_EXPORTER_OTLP_HEADERS: name=value"),
        ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "a=b,s3cret", "TRACES_HEADERS: name=value"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zip", "zip"),
        ("OTEL_TRACES_SAMPLER", "sometimes", "sampler sometimes"),
        ("OTEL_BSP_SCHEDULE_DELAY", "soon", "OTEL_BSP_SCHEDULE_DELAY"),
        ("OTEL_BSP_SCHEDULE_DELAY", "0", "schedule_delay"),
    ],
)
def test_a_variable_that_cannot_be_read(
    collector: Collector, name: str, value: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert "s3cret" not in warned(words).sentence


@pytest.mark.usefixtures("own_environment")
def test_the_command_says_it_and_ends_well(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(ENDPOINT, "collector:4318")
    assert main(["doctor", "--json", "--port", str(free_port())]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["level"] for row in rows if row["check"] == "tracing"] == ["warning"]
