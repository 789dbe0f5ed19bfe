"""The playground in a real browser over SmolLM2: the page shows the text that the API has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.e2e.pages.conftest import browser, tab
from tests.support.browser import PATIENCE_MS, Tab
from tests.support.launched import Launched
from tests.support.playground import (
    ask,
    expect_whole,
    job_of,
    last_answer,
    num_jobs,
    output_of,
    ready,
    response_of,
    set_settings,
    text_of,
)
from tests.support.real_model import real_checkpoint

__all__ = ["browser", "tab"]

pytestmark = [pytest.mark.packages, pytest.mark.browser]

LONG = "Write a long story about a lighthouse keeper and the sea, with many details."


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    env = {
        "MODEL": str(real_checkpoint()),
        "DEVICE": "cpu",
        "MAX_MODEL_LEN": "2048",
        "KV_CACHE_MEMORY_GB": "0.3",
    }
    with Launched(tmp_path_factory.mktemp("page"), env) as penstock:
        yield penstock


def asked(page: Page, question: str, max_tokens: int) -> Locator:
    """Asks for an answer, whose text has begun on the page."""
    set_settings(page, max_tokens=str(max_tokens), temperature="0")
    answer = ask(page, question)
    expect(text_of(answer)).not_to_be_empty(timeout=PATIENCE_MS)
    return answer


def kept_text(page: Page) -> str:
    """The text of the last answer as the page keeps it, before Markdown is made of it."""
    text: str = page.evaluate(
        """() => Object.entries(localStorage)
          .filter(([key]) => key.startsWith("penstock-chat-"))
          .map(([, text]) => JSON.parse(text).turns.at(-1).answer.text)[0]"""
    )
    return text


def words(text: str) -> list[str]:
    """Words alone: Markdown's own characters, and line breaks, are not shown."""
    return "".join(one if one.isalnum() else " " for one in text).split()


def expect_the_services_text(page: Page, service: Launched) -> str:
    """The last answer is whole, and shows the text that the service has. Returns it."""
    answer = last_answer(page)
    expect_whole(answer)
    text = output_of(service, answer)["message"]
    assert kept_text(page) == text
    shown = words(text_of(answer).inner_text())
    assert shown
    assert [word for word in words(text) if not word.isdigit()] == [
        word
        for word in shown
        if not word.isdigit()  # lists are numbered by the browser
    ]
    return text


def test_a_chat_of_two_turns_shows_the_answers_of_the_model(tab: Tab, service: Launched) -> None:
    page = ready(tab.page)
    asked(page, "What is the capital of France? Answer in one sentence.", 32)
    assert "Paris" in expect_the_services_text(page, service)
    first = job_of(service, last_answer(page))
    ask(page, "Repeat the name of that city, please.")
    expect(page.locator(".turn")).to_have_count(4)
    assert "Paris" in expect_the_services_text(page, service)
    second = job_of(service, last_answer(page))
    turns = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
    assert second["usage"]["prompt_tokens"] > turns  # the first turn is part of the prompt


def test_a_stopped_answer_keeps_what_was_shown_and_its_job_is_cancelled(
    tab: Tab, service: Launched
) -> None:
    page = ready(tab.page)
    answer = asked(page, LONG, 1500)
    page.get_by_role("button", name="Stop").click()
    expect_whole(answer)
    job = job_of(service, answer)
    assert job["status"] == "cancelled"
    assert words(kept_text(page))[:3] == words(text_of(answer).inner_text())[:3]
    asked(page, "Say yes.", 8)  # the chat goes on
    expect_the_services_text(page, service)


def test_a_reload_in_mid_answer_and_a_second_tab_show_the_one_answer(
    tab: Tab, service: Launched
) -> None:
    page = ready(tab.page)
    answer = asked(page, LONG, 1000)
    before, response = num_jobs(service), response_of(answer)
    page.reload()
    expect(last_answer(page)).to_have_attribute("aria-busy", "true")
    other = ready(page.context.new_page())
    assert response_of(last_answer(page)) == response_of(last_answer(other)) == response
    assert expect_the_services_text(page, service) == expect_the_services_text(other, service)
    assert num_jobs(service) == before
