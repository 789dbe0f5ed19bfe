"""A job's text as a durable stream: offsets, long polls, events, ends."""

from __future__ import annotations

import json
import threading
from itertools import pairwise
from typing import Any

import httpx
import pytest

from shared.messages import ErrorCode, JobState, Usage
from shared.transport.ports.queue import JobEnd
from tests.support.running_service import RunningService, running_frontend, wait_until

PROMPT = "line one\nline two 😀\r\nand three"
BODY = {"prompt": PROMPT, "max_tokens": 20, "stream": False, "ignore_eos": True}
BEGUN = {**BODY, "on_disconnect": "continue", "stream": True}


@pytest.fixture
def ended(client: httpx.Client) -> tuple[str, str]:
    """The path of a stream that is closed, and its text."""
    answer = client.post("/generate", json=BODY).json()
    return f"/v1/jobs/{answer['id']}/text", answer["text"]


@pytest.fixture
def paused(service: RunningService, client: httpx.Client) -> str:
    """The path of a stream whose job has five tokens and makes no more."""
    service.script.stop_after = 5
    with client.stream("POST", "/generate", json=BEGUN) as answer:
        job = f"/v1/jobs/{answer.headers['x-request-id']}"

        def is_there() -> bool:
            return bool(client.get(job).json()["usage"]["completion_tokens"] == 5)

        wait_until(is_there, "five tokens")
    return f"{job}/text"


def events_of(response: httpx.Response) -> list[tuple[str, Any]]:
    """Name and data of each event; line ends within data are newlines."""
    found = []
    for block in response.text.split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        if lines:
            values = (line[5:] for line in lines if line.startswith("data:"))
            data = "\n".join(value.removeprefix(" ") for value in values)
            found.append((lines[0].removeprefix("event: "), data))
    return found


def test_a_closed_stream_is_read_whole_and_then_at_its_end(
    client: httpx.Client, ended: tuple[str, str]
) -> None:
    path, text = ended
    whole = client.get(path)
    assert whole.content == text.encode()
    assert whole.headers["content-type"] == "text/plain; charset=utf-8"
    assert whole.headers["stream-closed"] == whole.headers["stream-up-to-date"] == "true"
    assert whole.headers["penstock-job-status"] == "finished"
    assert client.get(path, params={"offset": "-1"}).content == whole.content
    tail = whole.headers["stream-next-offset"]
    for offset in (tail, "now"):
        end = client.get(path, params={"offset": offset})
        assert (end.status_code, end.content) == (200, b"")
        assert end.headers["stream-closed"] == "true"
        assert end.headers["stream-next-offset"] == tail
        poll = client.get(path, params={"offset": offset, "live": "long-poll"})
        assert (poll.status_code, poll.headers["stream-closed"]) == (204, "true")
    assert client.head(path).headers["stream-next-offset"] == tail
    assert client.head(path).headers["cache-control"] == "no-store"
    assert client.head(path).headers["stream-closed"] == "true"


def test_a_cache_is_told_what_it_has(client: httpx.Client, paused: str) -> None:
    first = client.get(paused)
    assert first.headers["cache-control"].startswith("private, max-age=")
    same = client.get(paused, headers={"if-none-match": first.headers["etag"]})
    assert (same.status_code, same.content) == (304, b"")
    other = client.get(paused, headers={"if-none-match": '"other"'})
    assert other.content == first.content
    client.post(paused.replace("/text", "/cancel"))
    closed = client.get(paused, headers={"if-none-match": first.headers["etag"]})
    assert closed.status_code == 200, "the end changes the tag"
    assert closed.headers["penstock-job-status"] == "cancelled"


def test_a_long_poll_waits_for_text(
    service: RunningService, client: httpx.Client, paused: str
) -> None:
    read = client.get(paused)
    assert "stream-closed" not in read.headers
    offset, text = read.headers["stream-next-offset"], read.content
    waiting = threading.Timer(0.3, lambda: setattr(service.script, "stop_after", None))
    waiting.start()
    offsets = [offset]
    while "stream-closed" not in read.headers:
        query = {
            "offset": offset,
            "live": "long-poll",
            "cursor": read.headers.get("stream-cursor", ""),
        }
        read = client.get(paused, params=query)
        assert int(read.headers["stream-cursor"]) > int(query["cursor"] or 0)
        offset, text = read.headers["stream-next-offset"], text + read.content
        offsets.append(offset)
    waiting.join()
    job = client.get(paused.removesuffix("/text")).json()
    assert job["usage"]["completion_tokens"] == 20
    assert text == client.get(paused).content
    assert offsets == sorted(offsets)


def test_a_long_poll_from_now_on_has_the_text_that_comes(
    service: RunningService, client: httpx.Client, paused: str
) -> None:
    had = client.get(paused)
    waiting = threading.Timer(0.3, lambda: setattr(service.script, "stop_after", None))
    waiting.start()
    read = client.get(paused, params={"offset": "now", "live": "long-poll"})
    waiting.join()
    offset = had.headers["stream-next-offset"]
    assert read.content
    assert read.headers["stream-next-offset"] > offset
    rest = client.get(paused, params={"offset": offset})
    assert rest.content.startswith(read.content)


def test_events_have_the_text_and_where_a_reader_goes_on(
    service: RunningService, client: httpx.Client, paused: str
) -> None:
    had = client.get(paused)
    offset = had.headers["stream-next-offset"]
    threading.Timer(0.3, lambda: setattr(service.script, "stop_after", None)).start()
    response = client.get(paused, params={"offset": offset, "live": "sse"})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-content-type-options"] == "nosniff"
    events = events_of(response)
    controls = [json.loads(data) for name, data in events if name == "control"]
    assert controls[0]["streamNextOffset"] == offset, "there was nothing new yet"
    assert controls[0]["upToDate"]
    assert controls[-1]["streamClosed"]
    assert controls[-1]["jobStatus"] == "finished"
    assert all(after[0] == "control" for (name, _), after in pairwise(events) if name == "data")
    whole = client.get(paused).text
    read = had.text + "".join(data for name, data in events if name == "data")
    assert read == whole.replace("\r\n", "\n")
    again = client.get(paused, params={"offset": "-1", "live": "sse"})
    names = [name for name, _ in events_of(again)]
    assert names == ["data", "control"], "a closed stream is one answer"


def test_a_failed_job_reports_its_error(service: RunningService, client: httpx.Client) -> None:
    service.script.stop_after = 2
    service.script.end = JobEnd(
        JobState.FAILED, ErrorCode.NONFINITE_LOGITS, Usage(1, 2), None, "The logits are not finite."
    )
    name = client.post("/generate", json=BODY).headers["x-request-id"]
    read = client.get(f"/v1/jobs/{name}/text")
    assert (read.headers["stream-closed"], read.headers["penstock-job-status"]) == (
        "true",
        "failed",
    )


@pytest.mark.parametrize(
    "query",
    [
        *("offset=", "offset=1,2", "offset=1%202", "offset=abc", "offset=-1&offset=-1"),
        *("live=sse", "live=long-poll", "offset=-1&live=yes"),
        "offset=0000000000000009_0000000000009999",
    ],
)
def test_what_is_no_offset_is_refused(
    client: httpx.Client, ended: tuple[str, str], query: str
) -> None:
    refused = client.get(f"{ended[0]}?{query}")
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] in ("offset", "live")


def test_what_has_no_such_stream(client: httpx.Client) -> None:
    assert client.get("/v1/jobs/none/text").status_code == 404
    assert client.head("/v1/jobs/none/text").status_code == 404
    assert client.put("/v1/jobs/0-none/text").status_code == 405
    many = client.post("/v1/completions", json={"model": "penstock/tiny", "prompt": "a", "n": 2})
    assert client.get(f"/v1/jobs/{many.json()['id']}/text").status_code == 400


def test_any_frontend_reads_on(
    service: RunningService, client: httpx.Client, paused: str, redis_url: str
) -> None:
    offset = client.get(paused).headers["stream-next-offset"]
    with running_frontend(redis_url, service.settings.namespace) as other:
        other.until_ready()
        service.script.stop_after = None
        url = f"{other.base_url}{paused}"
        events = httpx.get(url, params={"offset": offset, "live": "sse"}, timeout=60)
    rest = "".join(data for name, data in events_of(events) if name == "data")
    assert client.get(paused).text.replace("\r\n", "\n").endswith(rest)
    assert rest
