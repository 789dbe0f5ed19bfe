"""Pages of a foreign site in a real Chromium: they read nothing of a server without keys, start
nothing on it and cancel nothing."""

from __future__ import annotations

import functools
import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from playwright.sync_api import Browser, Page

from tests.support.browser import headless_chromium
from tests.support.running_service import MODEL, RunningService, wait_until

pytestmark = pytest.mark.browser

EVIL = "evil.example"
FRIEND = "app.localhost"
BODY = {"model": MODEL, "prompt": "water", "messages": [{"role": "user", "content": "water"}]}
JOB_ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/generate")

# Each attempt resolves to what the page could read of the answer, or to null.
ATTEMPTS = """
  const readable = async (url, options) => {
    try {
      const answer = await fetch(url, options);
      return answer.type === "opaque" ? null : { status: answer.status, text: await answer.text() };
    } catch {
      return null;
    }
  };
"""
FETCH = f"async ([url, options]) => {{ {ATTEMPTS} return await readable(url, options); }}"
FETCH_BLOB = f"""async ([url, text, mode]) => {{
  {ATTEMPTS}
  return await readable(url, {{ method: "POST", mode, body: new Blob([text]) }});
}}"""
UPLOAD = f"""async ([url, text]) => {{
  {ATTEMPTS}
  const form = new FormData();
  form.append("purpose", "batch");
  form.append("file", new Blob([text]), "rows.jsonl");
  return await readable(url, {{ method: "POST", mode: "no-cors", body: form }});
}}"""
BEACON = "([url, text]) => navigator.sendBeacon(url, text)"
EVENT_SOURCE = """(url) => new Promise((resolve) => {
  const events = [];
  const source = new EventSource(url);
  source.onmessage = (event) => events.push(event.data);
  source.onerror = () => { source.close(); resolve(events); };
  setTimeout(() => { source.close(); resolve(events); }, 3000);
})"""
# A form needs no script's leave to be sent elsewhere; its one field spells the body.
FORM = """([url, text]) => new Promise((resolve) => {
  const frame = document.createElement("iframe");
  frame.name = "target";
  frame.onload = () => resolve();
  document.body.append(frame);
  const form = document.createElement("form");
  Object.assign(form, { method: "POST", action: url, enctype: "text/plain", target: "target" });
  const field = document.createElement("input");
  field.name = text.slice(0, -1) + ', "user": "';
  field.value = '"}';
  form.append(field);
  document.body.append(form);
  form.submit();
})"""


class BlankPage(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        content = b"<!doctype html><title>A page</title><body></body>"
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        return


@pytest.fixture(scope="module")
def page_port() -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), BlankPage) as server:
        thread = threading.Thread(target=functools.partial(server.serve_forever, 0.05))
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join(10)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with headless_chromium(EVIL, FRIEND) as browser:
        yield browser


@pytest.fixture
def hostile(browser: Browser, page_port: int) -> Iterator[Page]:
    page = browser.new_page()
    page.goto(f"http://{EVIL}:{page_port}/")
    yield page
    page.close()


def jobs_of(service: RunningService) -> list[dict[str, Any]]:
    return list(httpx.get(f"{service.base_url}/v1/jobs?limit=100").json()["data"])


@pytest.fixture
def running_job(service: RunningService) -> Iterator[str]:
    """The id of a job that runs until the test is over."""
    service.script.step_s = 0.05
    body = {"prompt": "a secret question", "max_tokens": 480, "stream": True}
    with httpx.stream("POST", f"{service.base_url}/generate", json=body, timeout=30) as answer:
        job_id = str(answer.headers["x-request-id"])
        wait_until(lambda: service.worker.jobs, "the job to run")
        yield job_id
        assert httpx.get(f"{service.base_url}/v1/jobs/{job_id}").json()["status"] == "running"
        httpx.delete(f"{service.base_url}/v1/jobs/{job_id}")


@pytest.mark.promise(
    "Access: a foreign page reads, starts and cancels nothing on a server without keys, also under "
    "its own name"
)
def test_a_foreign_page_reads_nothing(
    hostile: Page, service: RunningService, running_job: str
) -> None:
    paths = ("/v1/jobs", f"/v1/jobs/{running_job}", "/v1/models", "/health", "/ready", "/metrics")
    for path in (*paths, f"/v1/jobs/{running_job}/stream"):
        for mode in ("cors", "no-cors"):
            options = {"mode": mode, "credentials": "include"}
            read = hostile.evaluate(FETCH, [service.base_url + path, options])
            assert read is None, (path, mode)
    url = f"{service.base_url}/v1/jobs/{running_job}/stream"
    assert hostile.evaluate(EVENT_SOURCE, url) == []


def test_a_foreign_page_starts_no_job_and_stores_no_file(
    hostile: Page, service: RunningService
) -> None:
    before = jobs_of(service)
    text = json.dumps(BODY | {"max_tokens": 2})
    for path in JOB_ROUTES:
        url = service.base_url + path
        for kind in ("application/json", "text/plain", "application/x-www-form-urlencoded"):
            for mode in ("cors", "no-cors"):
                headers = {"content-type": kind}
                options = {"method": "POST", "mode": mode, "headers": headers, "body": text}
                assert hostile.evaluate(FETCH, [url, options]) is None, (path, kind, mode)
        for mode in ("cors", "no-cors"):  # a blob has no type at all
            assert hostile.evaluate(FETCH_BLOB, [url, text, mode]) is None, (path, mode)
        hostile.evaluate(BEACON, [url, text])
        hostile.evaluate(FORM, [url, text])
    row = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": BODY}
    assert hostile.evaluate(UPLOAD, [f"{service.base_url}/v1/files", json.dumps(row)]) is None
    assert [job["id"] for job in jobs_of(service)] == [job["id"] for job in before]
    assert httpx.get(f"{service.base_url}/v1/files").json()["data"] == []
    assert not service.worker.seen


def test_a_foreign_page_cancels_nothing(
    hostile: Page, service: RunningService, running_job: str
) -> None:
    url = f"{service.base_url}/v1/jobs/{running_job}"
    for method, path in (("DELETE", ""), ("POST", "/cancel")):
        for mode in ("cors", "no-cors"):
            if (method, mode) == ("DELETE", "no-cors"):
                continue  # no browser sends that
            options = {"method": method, "mode": mode}
            assert hostile.evaluate(FETCH, [url + path, options]) is None, (method, mode)
    assert httpx.get(url).json()["status"] == "running"


def test_a_name_that_comes_to_mean_this_machine_opens_nothing(
    browser: Browser, service: RunningService, running_job: str
) -> None:
    """DNS rebinding: to the browser the service is the foreign page's own origin."""
    before = jobs_of(service)
    page = browser.new_page()
    base = f"http://{EVIL}:{urlsplit(service.base_url).port}"
    shown = page.goto(f"{base}/")
    assert shown is not None
    assert shown.status == 421
    for method, path, body in (
        ("GET", "/v1/jobs", None),
        ("GET", f"/v1/jobs/{running_job}/stream", None),
        ("GET", "/metrics", None),
        ("DELETE", f"/v1/jobs/{running_job}", None),
        ("POST", "/generate", json.dumps(BODY | {"max_tokens": 2})),
    ):
        options = {"method": method, "headers": {"content-type": "application/json"}, "body": body}
        read = page.evaluate(FETCH, [path, options])
        assert read["status"] == 421, path
        assert "ALLOWED_HOSTS" in json.loads(read["text"])["error"]["message"]
    page.close()
    assert [job["id"] for job in jobs_of(service)] == [job["id"] for job in before]


@pytest.mark.parametrize("host", ["127.0.0.1", FRIEND])
def test_a_page_of_this_machine_reads_and_starts(
    browser: Browser, service: RunningService, page_port: int, host: str
) -> None:
    """The page of a program that runs here, on another port."""
    page = browser.new_page()
    page.goto(f"http://{host}:{page_port}/")
    assert page.evaluate(FETCH, [f"{service.base_url}/v1/jobs", {}])["status"] == 200
    text = json.dumps({"prompt": "water", "max_tokens": 2, "stream": False})
    headers = {"content-type": "application/json"}
    options = {"method": "POST", "headers": headers, "body": text}
    assert page.evaluate(FETCH, [f"{service.base_url}/generate", options])["status"] == 200
    page.close()
