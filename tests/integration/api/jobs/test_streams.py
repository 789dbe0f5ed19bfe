"""Streams as bytes: framing, headers, keep-alives, ends."""

from __future__ import annotations

import json
import socket
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from httpx_sse import connect_sse

from tests.support.running_service import MODEL, RunningService, wait_until
from tests.support.service_fixtures import module_service
from tests.support.sse_readers import payloads

patient_service = module_service(keepalive_s=15.0)

CHAT = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "line one\nline two\u2028and three\u0085 😀"}],
    "max_tokens": 60,
    "stream": True,
    "ignore_eos": True,
}
COMPLETION = {"model": MODEL, "prompt": "line one\nline two", "max_tokens": 20, "stream": True}
GENERATE = {"prompt": "line one\nline two", "max_tokens": 20}
ROUTES = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", COMPLETION),
    ("/generate", GENERATE),
]


def raw_post(service: RunningService, path: str, body: bytes, *headers: str) -> bytes:
    """Everything the server sends for one request over a plain socket."""
    with service.connect() as connection:
        lines = [
            f"POST {path} HTTP/1.1",
            "Host: localhost",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            "Connection: close",
            *headers,
        ]
        connection.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        received = b""
        while part := connection.recv(65536):
            received += part
    return received


def dechunked(body: bytes) -> bytes:
    text, rest = b"", body
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        text, rest = text + rest[:length], rest[length + 2 :]
        if length == 0:
            break
    return text


def data_events(text: bytes) -> list[Any]:
    assert text.endswith(b"data: [DONE]\n\n")
    return payloads(text)


@pytest.mark.promise("Streaming: headers prevent proxy buffering; one event, one write")
@pytest.mark.promise("Chat: framing: data lines, comments, one blank line")
@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_every_event_is_one_data_line_and_one_blank_line(
    service: RunningService,
    path: str,
    body: dict[str, Any],
) -> None:
    received = raw_post(service, path, json.dumps(body).encode())
    head, _, framed = received.partition(b"\r\n\r\n")
    headers = head.decode().lower()
    assert headers.startswith("http/1.1 200")
    assert "content-type: text/event-stream" in headers
    assert "cache-control: no-cache" in headers
    assert "x-accel-buffering: no" in headers
    assert "x-request-id: " in headers
    assert "content-length" not in headers
    assert "content-encoding" not in headers
    text = dechunked(framed)
    assert text.endswith(b"data: [DONE]\n\n")
    lines = text.decode().split("\n")
    assert all(line.startswith(("data: ", ":")) for line in lines[0:-1:2])
    assert all(line == "" for line in lines[1::2])
    assert len(text.decode().splitlines()) == len(text.split(b"\n")) - 1  # no other line ends


def test_httpx_sse_decodes_what_was_sent(service: RunningService) -> None:
    with (
        httpx.Client(base_url=service.base_url) as client,
        connect_sse(client, "POST", "/v1/chat/completions", json=CHAT) as source,
    ):
        events = [event.data for event in source.iter_sse()]
    assert events[-1] == "[DONE]"
    text = "".join(
        json.loads(data)["choices"][0]["delta"].get("content", "") for data in events[:-1]
    )
    assert "line one\nline two\u2028and three\u0085 😀" in text


@pytest.mark.promise("Chat: the role comes first, at admission")
def test_the_role_and_keepalives_come_while_the_job_still_waits(service: RunningService) -> None:
    service.script.pulls = False
    with httpx.stream(
        "POST", f"{service.base_url}/v1/chat/completions", json=CHAT, timeout=20
    ) as response:
        received = b""
        for part in response.iter_raw():
            received += part
            if received.count(b": ka\n\n") >= 2:
                break
        first = received.split(b"\n\n")[0]
        assert json.loads(first.removeprefix(b"data: "))["choices"][0]["delta"] == {
            "role": "assistant",
            "content": "",
        }
        service.script.pulls = True


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_no_comment_comes_while_no_silence_was_long(
    patient_service: RunningService, path: str, body: dict[str, Any]
) -> None:
    """SGLang's benchmark client takes every line of a stream as JSON."""
    received = raw_post(patient_service, path, json.dumps(body).encode())
    assert data_events(dechunked(received.partition(b"\r\n\r\n")[2]))
    assert b"\n:" not in received


@pytest.mark.promise("Streaming: the last event carries the whole text")
@pytest.mark.promise("HTTP: events of text, then `[DONE]`")
@pytest.mark.promise("HTTP: clients get text and need no tokenizer")
def test_generate_sends_the_promised_events(service: RunningService) -> None:
    response = httpx.post(f"{service.base_url}/generate", json=GENERATE)
    events = data_events(response.content)
    assert all(isinstance(event["text"], str) for event in events)
    assert events[0]["is_first"] is True
    assert events[0]["ttft_ms"] == round(events[0]["ttft_ms"], 1) > 0
    assert all("is_first" not in event and "ttft_ms" not in event for event in events[1:])
    *pieces, last = events
    assert all("done" not in event for event in pieces)
    assert last["done"] is True
    assert last["text"] == ""
    assert last["full_text"] == "".join(event["text"] for event in pieces)
    assert last["finish_reason"] == "length"
    assert last["usage"]["completion_tokens"] == 20
    assert (
        [token for event in events for token in event["token_ids"]]
        == (
            service.text.tokenizer.encode(GENERATE["prompt"]) * 20  # type: ignore[arg-type]
        )[:20]
    )
    whole = httpx.post(f"{service.base_url}/generate", json={**GENERATE, "stream": False}).json()
    assert whole["text"] == whole["full_text"] == last["full_text"]
    assert (whole["done"], whole["finish_reason"]) == (True, "length")
    assert whole["usage"] == last["usage"]
    assert whole["id"].startswith("gen-")


@pytest.mark.promise("HTTP: `POST /generate` with its own defaults (`stream: false` is honoured)")
def test_generate_has_the_defaults_of_its_own_dialect(service: RunningService) -> None:
    httpx.post(f"{service.base_url}/generate", json={"prompt": "a", "stream": False})
    sampling = service.worker.seen[-1].job.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k) == (64, 0.0, 0)
    assert (sampling.top_p, sampling.repetition_penalty) == (1.0, 1.0)


@pytest.mark.promise(
    "Runtime: no empty events except the last (towards clients; the log holds every token)"
)
def test_an_answer_without_text_is_still_first_and_last(service: RunningService) -> None:
    eos = service.card.eos_token_ids[0]
    events = data_events(httpx.post(f"{service.base_url}/generate", json={"prompt": [eos]}).content)
    assert len(events) == 1
    assert events[0]["is_first"]
    assert events[0]["done"]
    assert (events[0]["full_text"], events[0]["finish_reason"]) == ("", "stop")


@pytest.mark.promise("Chat: every buffer towards a reader is bounded")
@pytest.mark.promise("Runtime: a slow consumer costs bounded memory")
def test_a_stalled_reader_gets_everything_in_the_end(service: RunningService) -> None:
    """More frames than any queue in between holds: the rest comes from the log."""
    service.script.tokens_per_step = 1
    body = {"prompt": "stalled reader ", "max_tokens": 400}
    address = urlsplit(service.base_url)
    payload = json.dumps(body).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.connect((address.hostname, address.port))
        connection.settimeout(60)
        connection.sendall(
            b"POST /generate HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(payload) + payload
        )
        wait_until(lambda: service.worker.seen, "the job")
        job_id = service.worker.seen[-1].job.job_id
        job = f"{service.base_url}/v1/jobs/{job_id}"
        wait_until(lambda: httpx.get(job).json()["status"] == "finished", "the end of the job")
        received = b""
        while part := connection.recv(4096):
            received += part
    events = data_events(dechunked(received.partition(b"\r\n\r\n")[2]))
    assert events[-1]["full_text"] == "".join(event["text"] for event in events)
    assert events[-1]["usage"]["completion_tokens"] == 400
