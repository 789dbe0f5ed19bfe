"""What holds for every page, and the page of the API."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.support.browser import Tab

pytestmark = pytest.mark.browser


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
    tab.page.set_viewport_size({"width": 320, "height": 640})
    tab.page.goto(path)
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= 320
