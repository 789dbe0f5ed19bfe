"""Pages whose requests are cut off, as a laptop's are when it changes networks."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Route, expect

from tests.support.browser import Tab
from tests.support.playground import (
    ask,
    expect_whole,
    last_answer,
    ready,
    response_of,
    set_settings,
    text_of,
)
from tests.support.two_machines import NO_MACHINES, can_make_machines

pytestmark = pytest.mark.browser


@contextmanager
def another_address() -> Iterator[None]:
    """Gives this machine an address more."""
    device = f"pst-n{os.getpid()}"
    subprocess.run(["ip", "link", "add", device, "type", "bridge"], check=True)
    try:
        subprocess.run(["ip", "address", "add", "10.212.0.1/24", "dev", device], check=True)
        subprocess.run(["ip", "link", "set", device, "up"], check=True)
        yield
    finally:
        subprocess.run(["ip", "link", "delete", device], check=True)


# More streams than the browser has connections to one host: the others wait for one.
STREAMS = """() => {
  window.lost = [];
  for (let number = 0; number < 9; number += 1) {
    fetch("v1/deployment/stream").catch((error) => window.lost.push(String(error)));
  }
}"""


@pytest.mark.skipif(not can_make_machines(), reason=NO_MACHINES)
def test_requests_of_the_tests_browser_outlive_a_change_of_addresses(tab: Tab) -> None:
    page = tab.page
    page.goto("/docs")
    page.evaluate(STREAMS)
    with another_address():
        page.wait_for_timeout(500)
    page.wait_for_timeout(500)
    assert page.evaluate("window.lost") == []


@pytest.mark.parametrize(
    ("path", "file", "whole"),
    [
        ("/", "session.js", "Ready: thinker."),
        ("/dashboard", "style.css", "Healthy."),
        ("/docs", "docs_schema.js", re.compile(r"^\d+ operations$")),
    ],
)
def test_a_page_without_one_of_its_files_loads_again(
    tab: Tab, path: str, file: str, whole: str | re.Pattern[str]
) -> None:
    page, status = tab.page, tab.page.locator("#status")
    page.route(f"**/static/{file}", lambda route: route.abort("connectionreset"))
    page.route(
        "**" + path,
        lambda route: route.abort() if route.request.method == "HEAD" else route.continue_(),
    )
    page.goto(path)
    expect(status).to_have_text("The page did not load completely. Trying again…")
    with page.expect_event("load"):
        page.unroute_all()
    expect(status).to_have_text(whole)
    tab.expect_complaint("Failed to load resource")


def test_the_api_page_asks_for_its_document_again(tab: Tab) -> None:
    page, status = tab.page, tab.page.locator("#status")
    page.route("**/openapi.json", lambda route: route.abort("connectionreset"))
    page.goto("/docs")
    expect(status).to_have_text("The server cannot be reached. Trying again…")
    page.unroute_all()
    expect(status).to_have_text(re.compile(r"^\d+ operations$"))
    tab.expect_complaint("Failed to load resource")


def test_a_linked_answer_is_looked_for_again(tab: Tab) -> None:
    page = ready(tab.page)
    set_settings(page, max_tokens="8")
    answer = ask(page, "a gate")
    expect_whole(answer)
    text, job = text_of(answer).text_content() or "", response_of(answer)
    page.evaluate("localStorage.clear(); sessionStorage.clear()")  # as another reader has it
    page.goto("about:blank")
    page.route("**/input_items*", lambda route: route.abort("connectionreset"))
    page.goto(f"/#job={job}")
    expect(page.locator("#status")).to_have_text("The server cannot be reached. Trying again…")
    page.unroute_all()
    expect(text_of(last_answer(page))).to_have_text(text)
    tab.expect_complaint("Failed to load resource")


def test_the_api_page_asks_again_for_a_document_that_was_cut_off(tab: Tab) -> None:
    page = tab.page
    page.add_init_script(
        """const whole = Response.prototype.json;
        Response.prototype.json = function () {
          if (window.isCut || !this.url.endsWith("openapi.json")) return whole.call(this);
          window.isCut = true;
          return Promise.reject(new TypeError("network error"));
        };"""
    )
    page.goto("/docs")
    expect(page.locator("#status")).to_have_text("The connection was lost. Trying again…")
    expect(page.locator("#status")).to_have_text(re.compile(r"^\d+ operations$"))


def test_a_script_that_a_proxy_adds_in_vain_reloads_nothing(tab: Tab) -> None:
    page = tab.page

    def with_beacon(route: Route) -> None:
        response = route.fetch()
        beacon = '<script src="https://beacon.example/beacon.js"></script></head>'
        route.fulfill(response=response, body=response.text().replace("</head>", beacon))

    page.route("**/dashboard", with_beacon)
    page.goto("/dashboard")
    expect(page.locator("#status")).to_have_text("Healthy.")
    page.evaluate("window.isFirst = true")
    page.wait_for_timeout(2500)
    assert page.evaluate("window.isFirst") is True
    tab.expect_complaint("beacon.example")
    tab.addresses.remove("https://beacon.example/beacon.js")  # that was refused


def test_a_page_whose_file_stays_away_stops_loading_again(tab: Tab) -> None:
    page = tab.page
    page.add_init_script('sessionStorage.setItem("penstock.reloads", 5)')
    page.route("**/static/style.css", lambda route: route.abort("connectionreset"))
    page.goto("/dashboard")
    page.evaluate("window.isFirst = true")
    page.wait_for_timeout(2500)
    assert page.evaluate("window.isFirst") is True
    tab.expect_complaint("Failed to load resource")
