"""Links to jobs: the playground shows the text of a job of any kind, and follows it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from playwright.sync_api import Route, expect

from tests.e2e.pages.scripted_service import *  # noqa: F403
from tests.e2e.pages.scripted_service import begun
from tests.support.browser import PATIENCE_MS, Tab
from tests.support.playground import expect_whole
from tests.support.running_service import MODEL, RunningService

pytestmark = pytest.mark.browser

MESSAGES = [{"role": "user", "content": "of gates"}]
LENGTH = {"max_tokens": 20, "ignore_eos": True}
ASKED: dict[str, dict[str, Any]] = {
    "/generate": {"prompt": "of gates", "stream": False, **LENGTH},
    "/v1/completions": {"prompt": "of gates", "model": MODEL, **LENGTH},
    "/v1/chat/completions": {"messages": MESSAGES, "model": MODEL, **LENGTH},
    "/v1/messages": {"messages": MESSAGES, "model": MODEL, "max_tokens": 20},
}


def text_of_reply(reply: dict[str, Any]) -> str:
    """What the model wrote, of a reply of any of the APIs."""
    if "choices" in reply:
        choice = reply["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
    else:
        text = reply["content"][0]["text"] if "content" in reply else reply["text"]
    return str(text)


@pytest.mark.parametrize("path", ASKED)
def test_a_link_to_a_job_of_any_kind_shows_its_text(
    tab: Tab, service: RunningService, path: str
) -> None:
    answered = httpx.post(service.base_url + path, json=ASKED[path], timeout=60)
    assert answered.status_code == 200, answered.text
    reply = answered.json()
    page = tab.page
    page.goto(f"/dashboard#job={reply['id']}")
    page.get_by_role("link", name="Open in the playground").click()
    expect(page).to_have_url(f"{service.base_url}/#job={reply['id']}")
    answer = page.locator(".turn.assistant")
    expect_whole(answer)
    expect(answer).to_contain_text("The question is not stored as text.")
    expect(answer.locator(".who")).to_have_text(MODEL)
    num_tokens = service.job(reply["id"])["usage"]["completion_tokens"]
    expect(answer.locator(".facts")).to_contain_text(f"{num_tokens} tokens")
    expect(answer.get_by_role("button", name="Answer the question again")).to_be_hidden()
    shown = page.evaluate(
        """() => Object.entries(localStorage)
          .filter(([key]) => key.startsWith("penstock-chat-"))
          .map(([, text]) => JSON.parse(text).turns.at(-1).answer.text)"""
    )
    assert shown == [text_of_reply(reply)]
    page.reload()
    expect_whole(answer)
    expect(answer).to_have_count(1)
    expect(page.locator("#chat-list li")).to_have_count(1)


def test_a_linked_job_is_followed_over_a_reload_and_cancelled(
    tab: Tab, service: RunningService
) -> None:
    service.script.step_s = 0.05
    name, page = begun(service), tab.page
    page.goto(f"/#job={name.removeprefix('gen-')}")  # its bare id will do
    answer = page.locator(".turn.assistant")
    text = answer.locator("> .text")
    expect(text).not_to_be_empty(timeout=PATIENCE_MS)
    first = text.inner_text()
    page.reload()
    expect(answer).to_have_attribute("aria-busy", "true")
    expect(text).not_to_have_text(first)
    assert text.inner_text().startswith(first)
    page.get_by_role("button", name="Stop").click()
    expect_whole(answer)
    expect(page.locator("#status")).to_contain_text("Stopped: the job is cancelled")
    assert service.job(name)["status"] == "cancelled"


def test_a_link_to_a_response_s_job_shows_its_conversation(
    tab: Tab, service: RunningService
) -> None:
    body = {"model": MODEL, "input": "of gates", "max_output_tokens": 8}
    reply = httpx.post(f"{service.base_url}/v1/responses", json=body, timeout=60).json()
    tab.page.goto(f"/#job={reply['id'].removeprefix('resp_')}")
    expect(tab.page.locator(".turn.user .text")).to_have_text("of gates")
    expect_whole(tab.page.locator(".turn.assistant"))


@pytest.mark.parametrize("later", ["v1/models", "v1/jobs/*"])
def test_a_link_to_no_job_says_so(tab: Tab, later: str) -> None:
    """Whichever of the two answers comes last: the list of models is told of in the same place."""
    held: list[Route] = []
    tab.page.route(f"**/{later}", lambda route: held.append(route))
    tab.page.goto("/#job=chatcmpl-0-00000000-0000-4000-8000-000000000000")
    status = tab.page.locator("#status")
    if later == "v1/models":
        expect(status).to_have_text("The server no longer has the linked answer.")
    else:
        expect(status).to_contain_text("Ready: ")
    held.pop().continue_()
    expect(tab.page.locator("#send")).to_be_enabled()
    expect(status).to_contain_text("The server no longer has the linked answer.")
    tab.expect_complaint("404")
