"""Steps that tests of the playground share."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import httpx
from playwright.sync_api import Locator, Page, expect

from tests.support.browser import PATIENCE_MS
from tests.support.launched import Launched

POLL_S = 0.02


def ready(page: Page, path: str = "/") -> Page:
    """Opens the playground and waits until questions can be sent."""
    page.goto(path)
    expect(page.get_by_label("Message", exact=True)).to_be_visible()
    expect(page.locator("#send")).to_be_enabled(timeout=PATIENCE_MS)
    return page


def last_answer(page: Page) -> Locator:
    return page.locator(".turn.assistant").last


def text_of(answer: Locator) -> Locator:
    """What the model said, without its reasoning."""
    return answer.locator("> .text")


def ask(page: Page, question: str) -> Locator:
    """Sends a question; returns the answer, which has begun."""
    page.get_by_label("Message", exact=True).fill(question)
    page.keyboard.press("Enter")
    return last_answer(page)


def expect_whole(answer: Locator) -> None:
    expect(answer).to_have_attribute("aria-busy", "false", timeout=PATIENCE_MS)


def set_settings(page: Page, **values: str) -> None:
    """Fills fields of the settings by their ids, with `_` for `-`."""
    page.locator("#show-settings").click()
    for name, value in values.items():
        page.locator("#" + name.replace("_", "-")).fill(value)
    page.get_by_role("button", name="Done").click()


def say(page: Page, text: str, max_tokens: int = 400) -> Locator:
    """Makes the model that repeats its prompt say `text`, which is its system prompt, once."""
    set_settings(page, system=text + "§", max_tokens=str(max_tokens), stop_texts="§")
    return ask(page, "Say it.")


def response_of(answer: Locator) -> str:
    """The id of the response behind an answer."""
    expect(answer.locator("a.job")).to_be_visible(timeout=PATIENCE_MS)
    return answer.locator("a.job").inner_text()


def job_of(service: Launched, answer: Locator) -> dict[str, Any]:
    """The job behind an answer, as the service tells it."""
    reply = httpx.get(f"{service.base_url}/v1/jobs/{response_of(answer)}")
    assert reply.status_code == 200
    job: dict[str, Any] = reply.json()
    return job


def output_of(service: Launched, answer: Locator) -> dict[str, str]:
    """The text of each kind of item of a response that has ended, as the service tells it."""
    reply = httpx.get(f"{service.base_url}/v1/responses/{response_of(answer)}").json()
    return {item["type"]: item["content"][0]["text"] for item in reply["output"]}


def num_jobs(service: Launched) -> int:
    return len(httpx.get(f"{service.base_url}/v1/jobs?limit=1000").json()["data"])


def poll(look: Callable[[], bool], deadline_s: float = 60.0) -> None:
    end_s = time.monotonic() + deadline_s
    while not look():
        assert time.monotonic() < end_s, "it did not come to be in time"
        time.sleep(POLL_S)


def sse(*payloads: object) -> str:
    return "".join(f"data: {json.dumps(payload)}\n\n" for payload in payloads)
