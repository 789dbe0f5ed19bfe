"""An answer goes on where it was: after a reload, in another tab, behind a link, and when servers
die. What it is made of in the end is what the service has, once each."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.support.browser import PATIENCE_MS, Tab
from tests.support.launched import Launched
from tests.support.playground import (
    ask,
    expect_whole,
    job_of,
    last_answer,
    num_jobs,
    output_of,
    poll,
    ready,
    response_of,
    set_settings,
    text_of,
)

pytestmark = pytest.mark.browser

SERVICE = {"FRONTENDS": "2", "WORKERS": "2"}


def begin(page: Page, max_tokens: int = 160) -> None:
    """Asks, and waits for the first of the answer."""
    set_settings(page, max_tokens=str(max_tokens))
    answer = ask(page, "Water and iron, gates and wheels.")
    expect(text_of(answer)).not_to_be_empty(timeout=PATIENCE_MS)


def expect_all_of_it(page: Page, service: Launched) -> None:
    """The text on the page is the response's, nothing missing and nothing twice."""
    answer = last_answer(page)
    expect_whole(answer)
    stored = page.evaluate(
        """() => Object.entries(localStorage)
          .filter(([key]) => key.startsWith("penstock-chat-"))
          .map(([, text]) => JSON.parse(text).turns.at(-1).answer)"""
    )
    assert [kept["text"] for kept in stored] == [output_of(service, answer)["message"]]
    assert stored[0]["status"] == "incomplete"
    assert stored[0]["numTokens"] == job_of(service, answer)["usage"]["completion_tokens"]


def test_a_reload_goes_on_with_the_answer_and_asks_nothing_twice(
    playground: Page, service: Launched
) -> None:
    begin(playground)
    before, response = num_jobs(service), response_of(last_answer(playground))
    playground.reload()
    expect(last_answer(playground)).to_have_attribute("aria-busy", "true")
    assert response_of(last_answer(playground)) == response
    expect_all_of_it(playground, service)
    assert num_jobs(service) == before


def test_a_reload_before_the_service_answered_asks_for_the_same_response(
    playground: Page, tab: Tab, service: Launched
) -> None:
    before = num_jobs(service)

    def lose_the_answer(route: Route) -> None:
        route.fetch()
        route.abort("connectionreset")

    playground.route("**/v1/responses", lose_the_answer)
    set_settings(playground, max_tokens="60")
    ask(playground, "Once?")
    expect(playground.locator("#status")).to_contain_text("Trying again…", timeout=PATIENCE_MS)
    playground.unroute_all()
    playground.reload()
    expect_all_of_it(playground, service)
    assert num_jobs(service) == before + 1
    tab.expect_complaint("ERR_CONNECTION_RESET")


def test_a_closed_tab_loses_nothing(tab: Tab, service: Launched) -> None:
    begin(ready(tab.page), max_tokens=80)
    response = response_of(last_answer(tab.page))
    other = tab.page.context.new_page()
    tab.page.close()
    job = f"{service.base_url}/v1/jobs/{response}"
    poll(lambda: httpx.get(job).json()["status"] == "finished")
    ready(other)
    assert response_of(last_answer(other)) == response
    expect_all_of_it(other, service)


def test_two_tabs_of_one_chat_show_one_answer(tab: Tab, service: Launched) -> None:
    begin(ready(tab.page))
    before = num_jobs(service)
    other = ready(tab.page.context.new_page())
    expect(last_answer(other)).to_have_attribute("aria-busy", "true")
    ask(other, "A second question at once?")
    expect(other.locator("#status")).to_contain_text("An answer is running")
    expect_all_of_it(tab.page, service)
    expect_all_of_it(other, service)
    assert num_jobs(service) == before
    ask(tab.page, "And now?")
    expect(other.locator(".turn")).to_have_count(4)  # it follows
    # The question is told before its request has come to the service.
    poll(lambda: num_jobs(service) == before + 1)
    expect_all_of_it(other, service)
    expect_all_of_it(tab.page, service)


def test_a_cut_network_is_waited_out(playground: Page, tab: Tab, service: Launched) -> None:
    """The page's own requests fail; what was open ends as a cut connection does: without an end."""
    cut = {"now": True}

    def pass_or_cut(route: Route) -> None:
        if not cut["now"]:
            route.continue_()
        elif "starting_after" in route.request.url:
            route.abort("internetdisconnected")
        else:  # the first events alone
            body = "".join(httpx_lines(route.request.url))
            route.fulfill(body=body, content_type="text/event-stream")

    playground.route("**/v1/responses/*?stream=true*", pass_or_cut)
    begin(playground)
    expect(playground.locator("#status")).to_have_text(
        "The server cannot be reached. Trying again…"
    )
    cut["now"] = False
    expect_all_of_it(playground, service)
    tab.expect_complaint("ERR_INTERNET_DISCONNECTED")


def test_an_answer_goes_on_when_its_frontend_is_killed(tab: Tab, service: Launched) -> None:
    begin(ready(tab.page))
    os.kill(frontend_on(service, service.port), signal.SIGKILL)
    expect(tab.page.locator("#status")).to_contain_text("Trying again…", timeout=PATIENCE_MS)
    expect_all_of_it(tab.page, service)
    assert job_of(service, last_answer(tab.page))["attempt"] == 1
    tab.expect_complaint("ERR_")


def test_an_answer_goes_on_when_its_worker_is_killed(tab: Tab, service: Launched) -> None:
    begin(ready(tab.page))
    answer = last_answer(tab.page)
    owner = job_of(service, answer)["worker"]
    workers = httpx.get(f"{service.base_url}/health").json()["workers"]
    (pid,) = (worker["pid"] for worker in workers if worker["id"] == owner)
    os.kill(pid, signal.SIGKILL)
    expect_all_of_it(tab.page, service)
    expect(answer.locator(".rescue")).to_contain_text("nothing lost")


def test_a_link_shows_the_answer_at_any_frontend_while_it_runs_and_after(
    tab: Tab, browser: Browser, service: Launched
) -> None:
    begin(ready(tab.page), max_tokens=320)  # it runs while another page is opened
    answer = last_answer(tab.page)
    tab.page.get_by_role("button", name="Share this answer").click()
    dialog = tab.page.get_by_role("dialog")
    expect(dialog).to_contain_text("can read the conversation up to this answer")
    link = dialog.locator("pre").inner_text()
    assert link == f"{service.base_url}/#job={response_of(answer)}"
    dialog.get_by_role("button", name="Close").click()

    other = Tab(browser, f"http://127.0.0.1:{service.port + 1}")
    page = other.page
    page.goto(link.replace(service.base_url, other.base_url))
    expect(page.locator(".turn.user .text")).to_have_text("Water and iron, gates and wheels.")
    expect(last_answer(page)).to_have_attribute("aria-busy", "true")
    expect_all_of_it(tab.page, service)
    expect_whole(last_answer(page))
    assert text_of(last_answer(page)).inner_text() == text_of(answer).inner_text()
    page.reload()
    expect(text_of(last_answer(page))).to_have_text(
        text_of(answer).inner_text(), use_inner_text=True
    )
    other.close()


def test_a_link_to_nothing_says_so(tab: Tab) -> None:
    tab.page.goto("/#job=resp_0-00000000-0000-4000-8000-000000000000")
    expect(tab.page.locator("#status")).to_contain_text(
        "The server no longer has the linked answer."
    )
    tab.expect_complaint("404")


def test_an_answer_that_the_service_lost_keeps_what_came(playground: Page, tab: Tab) -> None:
    begin(playground)
    first = text_of(last_answer(playground)).inner_text()
    playground.route(
        "**/v1/responses/*?stream=true*", lambda route: route.fulfill(status=404, json={})
    )
    playground.reload()
    expect(last_answer(playground).get_by_role("alert")).to_have_text(
        "The server no longer has this answer."
    )
    assert text_of(last_answer(playground)).inner_text().startswith(first[:10])
    tab.expect_complaint("404")


def httpx_lines(url: str) -> Iterator[str]:
    """The first events of a stream, which is then left."""
    with httpx.stream("GET", url) as answer:
        for number, line in enumerate(answer.iter_lines()):
            yield line + "\n"
            if number > 40 and line == "":
                return


def frontend_on(service: Launched, port: int) -> int:
    """The process that listens on a port of the service."""
    inodes = {
        line.split()[9]
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
        if line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A"
    }
    for pid in service.descendants():
        for file in Path(f"/proc/{pid}/fd").iterdir():
            if os.readlink(file).removeprefix("socket:[").removesuffix("]") in inodes:
                return pid
    raise AssertionError(f"nobody listens on {port}")
