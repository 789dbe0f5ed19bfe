"""The playground and the dashboard in a real browser, against a whole service.

The echo runner repeats the prompt at a fixed pace, so that what the pages show is known.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from playwright.sync_api import (
    Browser,
    Locator,
    Page,
    Route,
    expect,
)

from tests.support.browser import PATIENCE_MS, Tab, headless_chromium
from tests.support.checkpoints import make_checkpoint
from tests.support.launched import Launched

pytestmark = pytest.mark.browser

ECHO_STEP_MS = 25


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    directory = tmp_path_factory.mktemp("pages")
    checkpoint = make_checkpoint(directory / "tiny", "qwen3", max_position_embeddings=2048)
    env = {"RUNNER": "echo", "ECHO_STEP_MS": str(ECHO_STEP_MS), "MODEL": str(checkpoint)}
    with Launched(directory, env) as service:
        yield service


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with headless_chromium() as browser:
        yield browser


@pytest.fixture
def tab(browser: Browser, service: Launched) -> Iterator[Tab]:
    """Whatever a test does: no complaint on the console, no request that leaves the origin."""
    tab = Tab(browser, service.base_url)
    yield tab
    tab.close()


@pytest.fixture
def playground(tab: Tab) -> Page:
    tab.page.goto("/")
    expect(tab.page.get_by_role("button", name="Send")).to_be_enabled(timeout=PATIENCE_MS)
    return tab.page


def last_answer(page: Page) -> Locator:
    return page.locator(".turn.assistant").last


def ask(page: Page, question: str) -> Locator:
    page.get_by_label("Message").fill(question)
    page.keyboard.press("Enter")
    return last_answer(page)


def expect_whole(answer: Locator) -> None:
    expect(answer).to_have_attribute("aria-busy", "false", timeout=PATIENCE_MS)


def job_of(service: Launched, answer: Locator) -> dict[str, Any]:
    """The job behind the link under an answer, as the service tells it."""
    path = answer.locator("a.job").get_attribute("href")
    assert path is not None
    reply = httpx.get(f"{service.base_url}/{path}")
    assert reply.status_code == 200
    job: dict[str, Any] = reply.json()
    return job


def poll(look: Callable[[], bool], deadline_s: float = 60.0) -> None:
    end_s = time.monotonic() + deadline_s
    while not look():
        assert time.monotonic() < end_s, "it did not come to be in time"
        time.sleep(0.02)


def sse(*payloads: object) -> str:
    return "".join(f"data: {json.dumps(payload)}\n\n" for payload in payloads)


def chunk(content: str) -> dict[str, Any]:
    return {"id": "chatcmpl-x", "choices": [{"index": 0, "delta": {"content": content}}]}


# --- the playground ---


def test_a_suggested_question_is_answered_piece_by_piece(
    playground: Page, service: Launched
) -> None:
    playground.get_by_label("Max tokens").fill("160")
    playground.get_by_role("button", name="What is Penstock?").click()
    answer = last_answer(playground)
    text = answer.locator(".text")
    expect(text).not_to_be_empty(timeout=PATIENCE_MS)
    first = text.inner_text()
    expect(answer).to_have_attribute("aria-busy", "true")
    expect_whole(answer)
    assert text.inner_text().startswith(first.rstrip())
    assert len(text.inner_text()) > len(first)
    expect(answer.locator(".facts")).to_contain_text(
        re.compile(r"first token [\d.]+ m?s · 160 tokens · [\d.]+ tokens/s")
    )
    expect(playground.get_by_role("status")).to_have_text("Ended at the token limit.")
    job = job_of(service, answer)
    assert job["status"] == "finished"
    assert answer.locator("a.job").inner_text().endswith(job["id"])


@pytest.mark.parametrize("how", ["button", "escape"])
def test_stopping_an_answer_cancels_its_job(playground: Page, service: Launched, how: str) -> None:
    playground.get_by_label("Max tokens").fill("1000")
    answer = ask(playground, "Please go on for a while.")
    expect(answer.locator(".text")).not_to_be_empty(timeout=PATIENCE_MS)
    if how == "button":
        playground.get_by_role("button", name="Stop").click()
    else:
        playground.keyboard.press("Escape")
    expect_whole(answer)
    expect(playground.get_by_role("status")).to_have_text(
        re.compile(r"Stopped: the job is cancelled after \d+ tokens?\.")
    )
    assert job_of(service, answer)["status"] == "cancelled"
    expect(playground.get_by_role("button", name="Send")).to_be_visible()
    expect(playground.get_by_label("Message")).to_be_focused()


def test_leaving_the_page_cancels_the_job(playground: Page, service: Launched) -> None:
    playground.get_by_label("Max tokens").fill("1000")
    answer = ask(playground, "Nobody waits for this.")
    expect(answer.locator(".text")).not_to_be_empty(timeout=PATIENCE_MS)
    path = answer.locator("a.job").get_attribute("href")
    playground.goto("/dashboard")
    poll(lambda: httpx.get(f"{service.base_url}/{path}").json()["status"] == "cancelled")


def test_settings_and_the_conversation_so_far_are_sent(playground: Page) -> None:
    playground.get_by_label("Temperature").fill("0.5")
    playground.get_by_label("Max tokens").fill("3")
    playground.get_by_label("Seed").fill("7")
    expect_whole(ask(playground, "First?"))
    first = last_answer(playground).locator(".text").text_content()
    playground.get_by_label("Temperature").fill("")
    with playground.expect_request("**/v1/chat/completions") as sent:
        expect_whole(ask(playground, "Second?"))
    body = sent.value.post_data_json
    assert body["messages"] == [
        {"role": "user", "content": "First?"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "Second?"},
    ]
    assert (body["max_tokens"], body["seed"], body["stream"]) == (3, 7, True)
    assert "temperature" not in body  # an empty field is the service's to choose
    expect(last_answer(playground).locator(".facts")).to_contain_text("3 tokens")

    playground.get_by_role("button", name="New chat").click()
    expect(playground.locator(".turn")).to_have_count(0)
    with playground.expect_request("**/v1/chat/completions") as sent:
        expect_whole(ask(playground, "Third?"))
    assert [message["content"] for message in sent.value.post_data_json["messages"]] == ["Third?"]


def test_a_setting_out_of_its_range_is_not_sent(playground: Page, tab: Tab) -> None:
    playground.get_by_label("Temperature").fill("9")
    playground.get_by_label("Message").fill("Too hot?")
    playground.keyboard.press("Enter")
    expect(playground.locator("#temperature:invalid")).to_be_focused()
    expect(playground.locator(".turn")).to_have_count(0)
    assert not [address for address in tab.addresses if "completions" in address]


def test_a_refusal_is_shown_as_a_sentence_and_the_question_comes_back(
    playground: Page, tab: Tab
) -> None:
    question = "word " * 20_000
    answer = ask(playground, question)
    alert = answer.get_by_role("alert")
    expect(alert).to_have_text(re.compile(r"^[A-Z].*\btokens\b.*\.$"))
    expect(alert).to_contain_text("A new chat has room again.")
    expect(playground.get_by_label("Message")).to_have_value(question)
    expect(answer.locator(".text")).to_be_hidden()
    tab.expect_complaint("status of 400")


def test_markup_in_an_answer_stays_text(playground: Page) -> None:
    attack = '<img src="x" onerror="document.title=1"><script>document.title=2</script><b>b</b>'
    playground.get_by_label("Max tokens").fill("60")
    answer = ask(playground, attack)
    expect_whole(answer)
    expect(answer.locator(".text")).to_contain_text('<img src="x" onerror="document.title=1">')
    assert answer.locator(".text *").count() == 0
    assert playground.title() == "Penstock playground"


def test_an_error_event_ends_the_answer_with_its_sentence(playground: Page) -> None:
    error = {"error": {"message": "the worker was lost", "type": "server_error", "code": "x"}}
    body = sse(chunk("Half an ")) + ": ka\n" + sse(chunk("answer"), error) + "data: [DONE]\n\n"
    playground.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(body=body, content_type="text/event-stream"),
    )
    answer = ask(playground, "Well?")
    expect(answer.get_by_role("alert")).to_have_text("The worker was lost.")
    expect(answer.locator(".text")).to_have_text("Half an answer")


def test_a_stream_without_its_end_does_not_pass_for_an_answer(playground: Page) -> None:
    playground.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(body=sse(chunk("Half")), content_type="text/event-stream"),
    )
    answer = ask(playground, "Well?")
    expect(answer.get_by_role("alert")).to_have_text("The connection ended before the answer did.")


def test_a_server_that_is_gone_is_reported_in_a_sentence(playground: Page, tab: Tab) -> None:
    playground.route("**/v1/chat/completions", lambda route: route.abort("connectionrefused"))
    answer = ask(playground, "Anybody?")
    expect(answer.get_by_role("alert")).to_have_text("The server cannot be reached.")
    tab.expect_complaint("ERR_CONNECTION_REFUSED")


def test_a_proxy_s_page_is_not_shown_as_an_answer(playground: Page, tab: Tab) -> None:
    playground.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(
            status=502, body="<html>", content_type="text/html", headers={"retry-after": "3"}
        ),
    )
    answer = ask(playground, "Anybody?")
    expect(answer.get_by_role("alert")).to_have_text(
        "The server answered with status 502. The server asks to wait 3 s."
    )
    tab.expect_complaint("status of 502")


def test_the_playground_waits_for_a_model_to_appear(tab: Tab) -> None:
    def no_models(route: Route) -> None:
        route.fulfill(json={"object": "list", "data": []})

    tab.page.route("**/v1/models", no_models)
    tab.page.goto("/")
    expect(tab.page.get_by_role("status")).to_have_text(re.compile("No worker serves a model yet"))
    expect(tab.page.get_by_role("button", name="Send")).to_be_disabled()
    tab.page.unroute("**/v1/models", no_models)
    expect(tab.page.get_by_role("button", name="Send")).to_be_enabled(timeout=PATIENCE_MS)


def test_the_playground_works_by_keyboard_alone(playground: Page) -> None:
    playground.keyboard.press("Tab")
    expect(playground.get_by_role("link", name="Skip to the message box")).to_be_focused()
    playground.keyboard.press("Enter")
    expect(playground.get_by_label("Message")).to_be_focused()
    playground.keyboard.type("one")
    playground.keyboard.press("Shift+Enter")
    playground.keyboard.type("two")
    playground.keyboard.press("Enter")
    expect(playground.locator(".turn.user .text")).to_have_text("one\ntwo")
    expect(last_answer(playground).locator(".text")).not_to_be_empty(timeout=PATIENCE_MS)
    playground.keyboard.press("Escape")
    expect_whole(last_answer(playground))


# --- the parser ---

SPLITS = """
async ([bytes, sizes]) => {
  const { readEvents } = await import("/static/sse.js");
  const results = [];
  for (const size of sizes) {
    const body = new ReadableStream({
      start(controller) {
        const all = Uint8Array.from(bytes);
        for (let at = 0; at < all.length; at += size) controller.enqueue(all.slice(at, at + size));
        controller.close();
      },
    });
    const events = [];
    for await (const event of readEvents(body)) events.push(event);
    results.push(events);
  }
  return results;
}
"""


def test_events_are_the_same_however_the_bytes_are_cut(playground: Page) -> None:
    stream = (
        "\ufeff: hello\n\n"
        'data: {"text": "höß 🌊 漢字"}\n\n'
        ": ka\n"
        "id: 3-17\r\nevent: delta\r\ndata: one\r\ndata:two\r\n\r\n"
        "data: lone\rdata: returns\r\r"
        "retry: 10\nnonsense\n\n"
        "data\n\n"
        "data: [DONE]\n\n"
        "data: cut off"
    ).encode()
    expected = [
        {"event": "message", "data": '{"text": "höß 🌊 漢字"}', "id": ""},
        {"event": "delta", "data": "one\ntwo", "id": "3-17"},
        {"event": "message", "data": "lone\nreturns", "id": "3-17"},
        {"event": "message", "data": "", "id": "3-17"},
        {"event": "message", "data": "[DONE]", "id": "3-17"},
    ]
    sizes = [*range(1, 40), len(stream)]
    results = playground.evaluate(SPLITS, [list(stream), sizes])
    for size, events in zip(sizes, results, strict=True):
        assert events == expected, f"in pieces of {size} bytes"


def test_an_endless_event_is_refused(playground: Page) -> None:
    error = playground.evaluate(
        """async () => {
          const { MAX_BUFFERED_CHARS, SseParser } = await import("/static/sse.js");
          const parser = new SseParser(() => {});
          try {
            for (let sent = 0; sent <= MAX_BUFFERED_CHARS; sent += 65536) {
              parser.push("data: " + "x".repeat(65530) + "\\n");
            }
          } catch (error) {
            return error.name;
          }
        }"""
    )
    assert error == "RangeError"


# --- the dashboard ---


def test_the_dashboard_shows_workers_queue_and_jobs(tab: Tab, service: Launched) -> None:
    page = tab.page
    page.goto("/dashboard")
    model = httpx.get(f"{service.base_url}/v1/models").json()["data"][0]["id"]
    worker = httpx.get(f"{service.base_url}/health").json()["workers"][0]
    row = page.locator("#workers tr")
    expect(row).to_have_count(1, timeout=PATIENCE_MS)
    expect(row).to_contain_text(worker["id"])
    expect(row).to_contain_text(model)
    expect(row).to_contain_text(f"of {worker['total_blocks']:,}")
    expect(page.locator("#status")).to_have_text("All is well.")
    expect(page.locator("#no-workers")).to_be_hidden()

    body = {"model": model, "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 4}
    answer = httpx.post(f"{service.base_url}/v1/chat/completions", json=body, timeout=30)
    done = page.locator("#jobs tr").filter(has=page.get_by_text("finished")).first
    expect(done).to_contain_text(answer.json()["id"].removeprefix("chatcmpl-"))
    expect(done.get_by_role("button")).to_be_hidden()
    expect(done.locator("td").nth(4)).to_have_text("4")


def test_a_job_is_cancelled_from_the_dashboard(tab: Tab, service: Launched) -> None:
    model = httpx.get(f"{service.base_url}/v1/models").json()["data"][0]["id"]
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Cancel me."}],
        "max_tokens": 1000,
        "stream": True,
    }
    url = f"{service.base_url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=30) as answer:
        job_id = answer.headers["x-request-id"].removeprefix("chatcmpl-")
        tab.page.goto("/dashboard")
        row = tab.page.locator("#jobs tr").filter(has_text=job_id)
        expect(row).to_contain_text("running", timeout=PATIENCE_MS)
        row.get_by_role("button", name="Cancel").click()
        expect(row).to_contain_text("cancelled", timeout=PATIENCE_MS)
        expect(row.get_by_role("button", name="Cancel")).to_be_hidden()
        lines = list(answer.iter_lines())
    assert "data: [DONE]" in lines
    assert httpx.get(f"{service.base_url}/v1/jobs/{job_id}").json()["status"] == "cancelled"
    tab.page.get_by_label("State").select_option("cancelled")
    expect(row).to_have_count(1, timeout=PATIENCE_MS)
    tab.page.get_by_label("State").select_option("expired")
    expect(row).to_have_count(0, timeout=PATIENCE_MS)


def test_the_dashboard_says_when_the_service_is_away_and_comes_back(tab: Tab) -> None:
    page = tab.page
    page.goto("/dashboard")
    expect(page.locator("#status")).to_have_text("All is well.", timeout=PATIENCE_MS)
    page.route("**/health", lambda route: route.abort("connectionrefused"))
    expect(page.locator("#status")).to_have_text("The server cannot be reached.")
    expect(page.locator("#workers tr")).to_have_count(1)  # the last known stays in sight
    page.unroute("**/health")
    expect(page.locator("#status")).to_have_text("All is well.", timeout=PATIENCE_MS)
    tab.expect_complaint("ERR_CONNECTION_REFUSED")


@pytest.mark.parametrize(
    ("status", "shown"), [("stalled", "stalled"), ("draining", "draining"), ("ok", "idle")]
)
def test_the_dashboard_shows_a_worker_s_state(tab: Tab, status: str, shown: str) -> None:
    worker = {"id": "w1", "status": status, "models": ["m"], "step": 12_345, "running": 0}
    health = {"status": "stalled" if status == "stalled" else "ok", "running": 0, "waiting": 3}
    payload = {**health, "queued_tokens": 9, "redis": {"latency_ms": 0.2}, "workers": [worker]}
    tab.page.route("**/health", lambda route: route.fulfill(json=payload))
    tab.page.goto("/dashboard")
    expect(tab.page.locator("#workers .badge")).to_have_text(shown, timeout=PATIENCE_MS)
    expect(tab.page.locator("#workers tr")).to_contain_text("12,345")
    expect(tab.page.locator("#status.bad")).to_have_count(1 if status == "stalled" else 0)


# --- the API page ---


@pytest.mark.parametrize("path", ["/docs", "/redoc"])
def test_the_api_page_lists_every_operation_and_fetches_from_the_service_alone(
    tab: Tab, path: str
) -> None:
    tab.page.goto(path)
    expect(tab.page.locator("#status")).to_have_text(re.compile(r"^\d+ operations$"))
    chat = tab.page.locator("details", has_text="/v1/chat/completions")
    chat.locator("summary").click()
    expect(chat).to_contain_text("max_completion_tokens")
    document = tab.page.evaluate("fetch('openapi.json').then((response) => response.json())")
    count = sum(len(item) for item in document["paths"].values())
    expect(tab.page.locator("details")).to_have_count(count)


# --- all ---


@pytest.mark.parametrize("path", ["/", "/dashboard", "/docs"])
def test_a_page_follows_the_reader_s_colour_scheme(tab: Tab, path: str) -> None:
    def shades() -> list[int]:
        colours = tab.page.evaluate(
            """() => {
              const style = getComputedStyle(document.documentElement);
              return [style.backgroundColor, style.color];
            }"""
        )
        return [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in colours]

    tab.page.emulate_media(color_scheme="light")
    tab.page.goto(path)
    paper, ink = shades()
    assert paper > ink
    tab.page.emulate_media(color_scheme="dark")
    paper, ink = shades()
    assert paper < ink


@pytest.mark.parametrize("path", ["/", "/dashboard", "/docs"])
def test_a_page_fits_a_narrow_screen(tab: Tab, path: str) -> None:
    tab.page.set_viewport_size({"width": 360, "height": 640})
    tab.page.goto(path)
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= 360
