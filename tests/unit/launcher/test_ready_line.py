"""The ready line: a command that a shell takes as it is, and frontends that are none."""

from __future__ import annotations

import json
import shlex
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from penstock.launcher import ready_line
from penstock.launcher.ready_line import ReadyLine
from penstock.launcher.settings import LauncherSettings
from penstock.launcher.worker_specs import WorkerSpec


@contextmanager
def server(*, answer: bytes) -> Iterator[int]:
    """A server that answers every connection with `answer`, whatever is requested."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:  # closed
                    return
                with connection:
                    connection.recv(65_536)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def http(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def line(port: int, model: str) -> ReadyLine:
    settings = LauncherSettings(port=port, ready_timeout_s=1)
    return ReadyLine(settings, "redis://x", [WorkerSpec("worker 0", model)], {}, print)


def test_the_command_has_any_name_of_a_model_as_one_word(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = "it's-$(touch made)-`x`"
    ready = json.dumps({"models": [model], "unserved": []}).encode()
    with server(answer=http(ready)) as port:
        assert line(port, model).announce(threading.Event())
    printed = capsys.readouterr().out
    command = printed[printed.index("curl") : printed.index("Look inside")].replace("\\\n", " ")
    words = shlex.split(command)
    assert json.loads(words[words.index("-d") + 1])["model"] == model


def test_the_pages_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    ready = json.dumps({"models": ["m"], "unserved": []}).encode()
    with server(answer=http(ready)) as port:
        assert line(port, "m").announce(threading.Event())
    printed = capsys.readouterr().out
    for page in ("Playground  ", "Dashboard   ", "API         "):
        path = {"P": "/", "D": "/dashboard", "A": "/docs"}[page[0]]
        assert f"  {page}http://127.0.0.1:{port}{path}\n" in printed


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\n{",
        http(b"<html>"),
        http(b"\xff"),
        http(b"[]"),
        http(b'{"models": 3, "unserved": []}'),
        http(b'{"status": "ok"}'),
    ],
)
def test_another_server_on_the_port_is_not_a_frontend_that_is_ready(answer: bytes) -> None:
    over = threading.Event()
    over.set()  # it looks once
    with server(answer=answer) as port:
        assert line(port, "m").announce(over) is False


class Frontend(BaseHTTPRequestHandler):
    """Answers as a frontend of one model without a chat template."""

    answers: ClassVar[dict[str, Any]] = {
        "/ready": {"models": ["m"], "unserved": []},
        "/health": {"loading": []},
        "/v1/models": {"data": [{"id": "m", "has_chat_template": False}]},
    }

    def do_GET(self) -> None:
        body = json.dumps(self.answers[self.path]).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def frontend() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Frontend) as served:
        thread = threading.Thread(target=served.serve_forever)
        thread.start()
        yield served.server_address[1]
        served.shutdown()
        thread.join()


def test_a_model_without_a_chat_template_is_shown_with_a_completion(
    frontend: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert line(frontend, "m").announce(threading.Event())
    printed = capsys.readouterr().out
    assert "/v1/completions" in printed
    assert "/v1/chat/completions" not in printed
    command = printed[printed.index("curl") : printed.index("Look inside")].replace("\\\n", " ")
    words = shlex.split(command)
    assert json.loads(words[words.index("-d") + 1])["prompt"]


def test_a_second_model_that_loads_is_told_of_beside_one_that_is_served(
    frontend: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading = [{"id": "w1", "model": "big", "stage": "loading weights", "percent": 40}]
    monkeypatch.setitem(Frontend.answers, "/health", {"loading": loading})
    monkeypatch.setattr(ready_line, "TELL_S", 0.0)
    said: list[str] = []
    settings = LauncherSettings(port=frontend, ready_timeout_s=0.5)
    specs = [WorkerSpec("worker 0", "m"), WorkerSpec("worker 1", "big")]
    over = threading.Event()

    def say(sentence: str) -> None:
        said.append(sentence)
        if "big" in sentence:
            over.set()

    ReadyLine(settings, "redis://x", specs, {}, say).announce(over)
    assert "big: loading weights, 40 %" in said


def test_what_a_start_still_waits_for_is_named(frontend: int) -> None:
    assert line(frontend, "other").unserved() == "other (its worker is still starting)"


def test_a_model_that_loads_for_long_is_shown_at_each_stage_and_tenth(
    frontend: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quick start shows nothing but its ready line."""
    weights = [("loading weights", percent) for percent in (3, 4, 12, 13, 14)]
    states = iter([*weights, ("compiling kernels", 0), ("compiling kernels", 0)])
    answers = {"/ready": {"models": [], "unserved": []}, "/health": {"loading": []}}
    monkeypatch.setattr(Frontend, "answers", {**Frontend.answers, **answers})

    class Looks(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            state = next(states, None)
            if state is None:
                Frontend.answers["/ready"] = {"models": ["m"], "unserved": []}
            else:
                stage, percent = state
                worker = {"id": "w", "model": "m", "stage": stage, "percent": percent}
                Frontend.answers["/health"] = {"loading": [worker]}
            return False

    monkeypatch.setattr(ready_line, "TELL_S", 0.0)
    assert line(frontend, "m").announce(Looks())
    shown = capsys.readouterr().out.partition("\nPenstock is ready")[0]
    assert shown.splitlines() == [
        "m: loading weights, 3 %",
        "m: loading weights, 13 %",
        "m: compiling kernels",
    ]
