"""curl through nginx, which gives up after 5 s of silence, and over every version of HTTP."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from shared.process import dying_with_this_process
from tests.support.dialects import DIALECTS
from tests.support.proxy import Proxy, nginx
from tests.support.running_service import MODEL, RunningService, wait_until
from tests.support.service_fixtures import module_service
from tests.support.sse_readers import payloads

pytestmark = pytest.mark.nginx

READ_TIMEOUT_S = 5
KEEPALIVE_S = 1.0
PATIENCE_S = 60.0
CHAT = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "héllo 😀 " * 4}],
    "max_tokens": 60,
    "stream": True,
    "ignore_eos": True,
}
MESSAGES = {name: CHAT[name] for name in ("model", "messages", "max_tokens", "stream")}
BODIES = {"/v1/chat/completions": CHAT, "/v1/messages": MESSAGES}

shared_service = module_service(keepalive_s=KEEPALIVE_S)


@pytest.fixture(scope="module")
def proxy(
    shared_service: RunningService, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Proxy]:
    directory = tmp_path_factory.mktemp("nginx")
    with nginx(directory, shared_service.base_url, READ_TIMEOUT_S) as made:
        yield made


class Curl:
    """A curl that prints what comes as it comes."""

    def __init__(self, url: str, body: Any, *options: str) -> None:
        content = ["-H", "content-type: application/json", "-d", json.dumps(body)]
        self._process = subprocess.Popen(
            ["curl", "-sS", "-N", "--compressed", *options, *content, url],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=dying_with_this_process(),
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line)

    def wait(self) -> int:
        code = self._process.wait(PATIENCE_S)
        self._reader.join(10)
        return code

    def close(self) -> None:
        self._process.kill()
        self._process.wait(10)
        self._reader.join(10)
        assert self._process.stdout is not None
        self._process.stdout.close()


@contextmanager
def curl(url: str, body: Any, *options: str) -> Iterator[Curl]:
    made = Curl(url, body, *options)
    with contextlib.closing(made):
        yield made


def text_of(reply: str) -> str:
    """What the chunks of a chat say."""
    return "".join(map(DIALECTS["chat"].piece, payloads(reply[: reply.rfind("\n") + 1])))


def whole_text(service: RunningService) -> str:
    answer = httpx.post(
        f"{service.base_url}/v1/chat/completions", json={**CHAT, "stream": False}, timeout=30
    )
    return str(answer.json()["choices"][0]["message"]["content"])


def queued_job(service: RunningService) -> str | None:
    jobs = httpx.get(f"{service.base_url}/v1/jobs?state=queued&limit=1").json()["data"]
    return str(jobs[0]["id"]) if jobs else None


def test_tokens_come_through_a_proxy_as_they_are_made(
    service: RunningService, proxy: Proxy
) -> None:
    service.script.stop_after = 8
    with curl(f"{proxy.base_url}/v1/chat/completions", CHAT) as client:
        wait_until(lambda: len(text_of(client.output)) >= 5, "the first text", PATIENCE_S)
        assert "[DONE]" not in client.output
        service.script.stop_after = None
        assert client.wait() == 0
    assert client.output.endswith("data: [DONE]\n\n")
    assert text_of(client.output) == whole_text(service)


@pytest.mark.promise(
    "Clients: a stream outlasts a proxy with a timeout shorter than the wait, over HTTP/1.0, 1.1 "
    "and 2"
)
@pytest.mark.parametrize("path", BODIES)
def test_a_stream_outlasts_the_proxy_s_patience_in_the_queue(
    service: RunningService, proxy: Proxy, path: str
) -> None:
    service.park()
    enough = int(READ_TIMEOUT_S / KEEPALIVE_S) + 2
    with curl(f"{proxy.base_url}{path}", BODIES[path]) as client:
        wait_until(lambda: client.output.count(": ka") >= enough, "signs of life", PATIENCE_S)
        service.script.pulls = True
        assert client.wait() == 0
    assert client.output.rstrip().endswith(("data: [DONE]", '{"type":"message_stop"}'))
    assert "error" not in client.output


def test_a_whole_answer_that_waits_as_long_is_given_up_and_cancelled(
    service: RunningService, proxy: Proxy
) -> None:
    """Which shows that the proxy means it, and that what waits long is better streamed."""
    service.park()
    url = f"{proxy.base_url}/v1/chat/completions"
    with curl(url, {**CHAT, "stream": False}, "-o", "/dev/null", "-w", "%{http_code}") as client:
        wait_until(lambda: queued_job(service), "the job", PATIENCE_S)
        name = queued_job(service)
        assert client.wait() == 0
    assert client.output == "504"
    job = f"{service.base_url}/v1/jobs/{name}"
    wait_until(lambda: httpx.get(job).json()["status"] == "cancelled", "the cancel", PATIENCE_S)


@pytest.mark.parametrize("state", ["queued", "decode"])
def test_a_client_that_leaves_the_proxy_leaves_its_job(
    service: RunningService, proxy: Proxy, state: str
) -> None:
    if state == "queued":
        service.park()
    service.script.step_s = 0.05
    body = {**CHAT, "max_tokens": 400}
    with curl(f"{proxy.base_url}/v1/chat/completions", body) as client:
        wait_until(lambda: '"role":"assistant"' in client.output, "the first chunk", PATIENCE_S)
        if state == "decode":
            wait_until(lambda: text_of(client.output), "text", PATIENCE_S)
        first = next(line for line in client.lines if line.startswith("data: {"))
        name = json.loads(first[6:])["id"]
    job = f"{service.base_url}/v1/jobs/{name}"
    wait_until(lambda: httpx.get(job).json()["status"] == "cancelled", "the cancel", PATIENCE_S)
    service.script.pulls = True
    wait_until(lambda: not service.worker.jobs, "the worker to drop it", PATIENCE_S)


def test_errors_come_through_with_their_bodies_and_headers(
    service: RunningService, proxy: Proxy
) -> None:
    url = f"{proxy.base_url}/v1/chat/completions"
    with curl(url, {**CHAT, "model": "nobody"}, "-i") as client:
        assert client.wait() == 0
    head, _, body = client.output.partition("\n\n")
    assert head.startswith("HTTP/1.1 404")
    assert "x-request-id: chatcmpl-" in head.lower()
    assert json.loads(body)["error"]["code"] == "model_not_found"
    with curl(f"{proxy.base_url}/v1/messages", {**MESSAGES, "max_tokens": 0}) as client:
        assert client.wait() == 0
    assert json.loads(client.output)["error"]["type"] == "invalid_request_error"


def test_a_stream_over_http_2(service: RunningService, proxy: Proxy) -> None:
    url = f"{proxy.http2_url}/v1/chat/completions"
    with curl(url, CHAT, "--http2-prior-knowledge", "-i") as client:
        assert client.wait() == 0
    assert client.output.startswith("HTTP/2 200")
    assert text_of(client.output) == whole_text(service)
    assert client.output.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("through", ["proxy", "nothing"])
def test_a_stream_over_http_1_0(service: RunningService, proxy: Proxy, through: str) -> None:
    base_url = proxy.base_url if through == "proxy" else service.base_url
    with curl(f"{base_url}/v1/chat/completions", CHAT, "--http1.0", "-i") as client:
        assert client.wait() == 0
    head = client.output.partition("\n\n")[0].lower()
    assert "transfer-encoding" not in head
    assert "connection: close" in head
    assert text_of(client.output) == whole_text(service)
