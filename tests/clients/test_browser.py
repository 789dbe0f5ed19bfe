"""A page of another origin in a real Chromium: streams, leaves, reads errors and headers."""

from __future__ import annotations

import functools
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page

from tests.support.browser import headless_chromium
from tests.support.cutting_proxy import cutting_proxy
from tests.support.node import installed_clients, our_client
from tests.support.running_service import MODEL, RunningService, wait_until

pytestmark = pytest.mark.browser

PAGE = Path(__file__).resolve().parent / "page"
PATIENCE_S = 60.0
CHAT = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "The keeper counts, héllo 😀."}],
    "max_tokens": 60,
    "ignore_eos": True,
}


class Files(http.server.SimpleHTTPRequestHandler):
    """The page, and the packages that a page may import."""

    def translate_path(self, path: str) -> str:
        if path.startswith("/node_modules/penstock/"):
            return str(our_client() / path.lstrip("/"))
        if path.startswith("/node_modules/"):
            return str(installed_clients() / path.partition("?")[0].lstrip("/"))
        return str(PAGE / path.removeprefix("/page").lstrip("/"))

    def log_message(self, *arguments: object) -> None:
        return


@pytest.fixture(scope="module")
def origin() -> Iterator[str]:
    """Where the page comes from; not where the service is."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Files) as server:
        thread = threading.Thread(target=functools.partial(server.serve_forever, 0.05))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join(10)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with headless_chromium() as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, origin: str) -> Iterator[Page]:
    page = browser.new_page()
    page.goto(f"{origin}/index.html")
    page.wait_for_function("window.calls")
    yield page
    page.close()


def ask(page: Page, url: str, body: Any, name: str = "it", **headers: str) -> None:
    """Begins a call; what becomes of it is in `told`."""
    options = {
        "method": "POST",
        "headers": {"content-type": "application/json", "authorization": "Bearer none", **headers},
        "body": json.dumps(body),
    }
    page.evaluate("([name, url, options]) => { call(name, url, options) }", [name, url, options])


def result(page: Page, name: str = "it") -> dict[str, Any]:
    return dict(page.evaluate("(name) => JSON.parse(JSON.stringify(calls[name]))", name))


def wait_for(page: Page, state: str, name: str = "it") -> dict[str, Any]:
    page.wait_for_function(
        "([name, state]) => calls[name]?.state === state",
        arg=[name, state],
        timeout=PATIENCE_S * 1000,
    )
    return result(page, name)


def text_of(events: str) -> str:
    chunks = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


def whole_text(service: RunningService) -> str:
    answer = httpx.post(f"{service.base_url}/v1/chat/completions", json=CHAT, timeout=30)
    return str(answer.json()["choices"][0]["message"]["content"])


def test_a_stream_is_read_piece_by_piece(page: Page, service: RunningService) -> None:
    service.script.stop_after = 10
    ask(page, f"{service.base_url}/v1/chat/completions", {**CHAT, "stream": True})
    wait_until(lambda: text_of(result(page)["text"]), "the first text", PATIENCE_S)
    assert result(page)["state"] == "reading"
    service.script.stop_after = None
    answer = wait_for(page, "read")
    assert answer["text"].endswith("data: [DONE]\n\n")
    assert text_of(answer["text"]) == whole_text(service)
    assert answer["headers"]["x-request-id"].startswith("chatcmpl-")
    assert answer["headers"]["content-type"].startswith("text/event-stream")


@pytest.mark.promise(
    "Clients: a page of an allowed origin (any of this machine, without keys) streams, aborts in "
    "every state and reads errors"
)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("state", ["queued", "prefill", "decode"])
def test_an_abort_cancels_the_job_wherever_it_is(
    page: Page,
    service: RunningService,
    state: str,
    stream: bool,
) -> None:
    before = service.job_ids()
    service.hold_jobs_in(state)
    body = {**CHAT, "max_tokens": 400, "stream": stream}
    ask(page, f"{service.base_url}/v1/chat/completions", body)

    job_id = service.until_job_in(state, before)
    page.evaluate("calls.it.abort()")
    assert wait_for(page, "failed")["error"] == "AbortError"
    service.until_disconnected(job_id)


def test_a_page_that_goes_away_leaves_its_job(
    page: Page, service: RunningService, origin: str
) -> None:
    service.script.step_s = 0.05
    ask(page, f"{service.base_url}/v1/messages", {
        "model": MODEL, "messages": CHAT["messages"], "max_tokens": 400, "stream": True,
    })  # fmt: skip
    wait_until(lambda: "content_block_delta" in result(page)["text"], "the first text", PATIENCE_S)
    name = result(page)["headers"]["request-id"]
    page.goto(f"{origin}/index.html?again")
    service.until_job_is(name, "cancelled")
    wait_until(lambda: not service.worker.jobs, "the worker to drop it", PATIENCE_S)


@pytest.mark.parametrize(
    ("path", "members", "status"),
    [
        ("/v1/chat/completions", {"model": "nobody"}, 404),
        ("/v1/chat/completions", {"temperature": 9}, 400),
        ("/v1/messages", {}, 400),
        ("/v1/nothing", {}, 404),
    ],
)
def test_errors_can_be_read_across_origins(
    page: Page,
    service: RunningService,
    path: str,
    members: dict[str, Any],
    status: int,
) -> None:
    # What the SDKs send beside: each name has to be allowed by the preflight.
    headers = {
        "x-stainless-lang": "js",
        "x-stainless-retry-count": "0",
        "anthropic-version": "2023-06-01",
        "anthropic-dangerous-direct-browser-access": "true",
        "x-api-key": "none",
        "idempotency-key": f"{path}{members}",
    }
    ask(page, service.base_url + path, {**CHAT, **members}, **headers)
    answer = wait_for(page, "read")
    assert answer["status"] == status
    assert json.loads(answer["text"])["error"]["message"]
    assert answer["headers"]["x-request-id"]


def test_an_event_source_follows_a_job_of_another_origin(
    page: Page, service: RunningService
) -> None:
    answer = httpx.post(f"{service.base_url}/v1/chat/completions", json=CHAT, timeout=30).json()
    url = f"{service.base_url}/v1/jobs/{answer['id']}/stream"
    page.evaluate("(url) => { source('it', url) }", url)
    events = wait_for(page, "read")["events"]
    assert events[-1] == "[DONE]"
    text = "".join(json.loads(event).get("text", "") for event in events[:-1])
    assert text == answer["choices"][0]["message"]["content"]


@pytest.mark.node
@pytest.mark.packages
def test_openai_s_sdk_runs_in_the_page_itself(page: Page, service: RunningService) -> None:
    page.evaluate(
        "([base, asked]) => { sdk('it', base, asked) }",
        [service.base_url, {name: CHAT[name] for name in ("model", "messages", "max_tokens")}],
    )
    ended = "['read', 'failed'].includes(calls.it?.state)"
    page.wait_for_function(ended, timeout=PATIENCE_S * 1000)
    answer = result(page)
    assert answer["error"] == ["NotFoundError", "model_not_found", "chatcmpl"]
    assert answer["text"]


@pytest.mark.node
@pytest.mark.packages
def test_our_client_reads_over_cuts_in_the_page_itself(page: Page, service: RunningService) -> None:
    service.script.step_s = 0.01
    with cutting_proxy(service.base_url) as proxy:
        # One of them may meet the question whether the page may ask, which is sent again as well.
        proxy.cuts = [2000, 700, 1300]
        members = {name: CHAT[name] for name in ("model", "max_tokens", "ignore_eos")}
        page.evaluate(
            "([base, asked, parameters]) => { ours('it', base, asked, parameters) }",
            [proxy.base_url, CHAT["messages"], members],
        )
        ended = "['read', 'failed'].includes(calls.it?.state)"
        page.wait_for_function(ended, timeout=PATIENCE_S * 1000)
        answer = result(page)
        assert proxy.num_cut >= 2, answer
    whole = httpx.post(f"{service.base_url}/v1/chat/completions", json=CHAT, timeout=30).json()
    assert answer["text"] == answer["answer"]["text"] == whole["choices"][0]["message"]["content"]
    assert answer["answer"]["usage"]["completion_tokens"] == CHAT["max_tokens"]
    assert answer["error"] == ["NotFound", "model_not_found"]
    left = f"{service.base_url}/v1/jobs/{answer['left']}"
    wait_until(lambda: httpx.get(left).json()["status"] == "cancelled", "the cancel", PATIENCE_S)
